"""pass@k is the mean over all ways to draw k of the samples."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.rollouts import pass_at_k


@given(st.integers(1, 9), st.data())
def test_it_is_the_share_of_draws_with_a_right_one(num_samples: int, data: st.DataObject) -> None:
    num_correct = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    is_right = [index < num_correct for index in range(num_samples)]
    draws = list(itertools.combinations(is_right, k))
    share = sum(map(any, draws)) / len(draws)
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share, abs=1e-12)


def test_many_samples_do_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 1), (4, -1, 1), (0, 0, 1)]
)
def test_what_was_not_drawn_has_no_chance(num_samples: int, num_correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"no pass@{k} of {num_samples} samples"):
        pass_at_k(num_samples, num_correct, k)
