"""Pauses between attempts."""

from __future__ import annotations

import itertools

import pytest

from tinsmith.backoff import backoff, backoff_s


def test_pauses_double_up_to_a_limit_and_are_spread() -> None:
    for count, full_s in enumerate((0.1, 0.2, 0.4, 0.8, 1.0, 1.0), start=1):
        drawn = [backoff_s(count, 0.1, 1.0) for _ in range(100)]
        assert all(full_s / 2 <= pause_s <= full_s for pause_s in drawn)
        assert len(set(drawn)) > 1
    assert backoff_s(10**6, 0.1, 1.0) <= 1.0


def test_a_series_begins_with_the_shortest_pause() -> None:
    first_s, second_s = itertools.islice(backoff(1.0, 100.0), 2)
    assert (first_s, second_s) == (pytest.approx(0.75, abs=0.25), pytest.approx(1.5, abs=0.5))
