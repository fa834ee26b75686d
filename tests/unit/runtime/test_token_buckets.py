"""Token buckets that lend, and those that do not."""

from __future__ import annotations

import pytest
from tests.support.clock import Clock

from tinsmith_runtime.fairness.token_buckets import TokenBuckets


def test_what_is_larger_than_a_bucket_is_lent_to_a_full_one() -> None:
    clock = Clock(0.0)
    buckets = TokenBuckets(60, 1.0, clock=clock, lends=True)
    assert buckets.take("p", 100) == 0.0
    # 40 are owed, and then one.
    assert buckets.take("p", 1) == pytest.approx(41.0)
    assert buckets.take("p", 100) == pytest.approx(100.0)
    clock.now_s = 41.0
    assert buckets.take("p", 1) == 0.0
    assert buckets.take("q", 1) == 0.0
    clock.now_s = 101.0
    assert buckets.take("p", 100) == 0.0


def test_one_that_does_not_lend_never_gives_so_much() -> None:
    buckets = TokenBuckets(60, 1.0, clock=Clock(0.0))
    assert buckets.take("p", 100) == pytest.approx(40.0)
    assert buckets.num_left("p") == 60
