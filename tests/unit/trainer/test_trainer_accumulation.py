"""When a step may be applied although a part of its accumulation failed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinsmith_trainer.runs.accumulation import Accumulation


def test_a_client_that_looks_itself_says_what_it_saw() -> None:
    accumulation = Accumulation().add_part(0).fail(2).fail(4)
    assert accumulation.unseen_failures(0, 0) == [2, 4]
    assert accumulation.unseen_failures(3, 0) == [4]
    assert accumulation.unseen_failures(4, 0) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["part", "failure"]), st.integers(0, 5)), min_size=1, max_size=8
    ),
    st.integers(0, 5),
)
def test_deliveries_count_if_all_that_is_applied_was_sent_after_them(
    calls: list[tuple[str, int]], wait_of_the_step: int
) -> None:
    """The model: call i is sent at time i, the failure of call f is delivered at f + wait + 1."""
    delivered_at = {
        number: number + wait + 1
        for number, (what, wait) in enumerate(calls, 1)
        if what == "failure"
    }
    step = len(calls) + 1 + wait_of_the_step

    def seen_through(number: int, sent_at: int) -> int:
        unseen = [f for f, at in delivered_at.items() if f < number and at > sent_at]
        return min([number, *unseen]) - 1

    accumulation = Accumulation()
    parts = []
    for number, (what, _) in enumerate(calls, 1):
        if what == "failure":
            accumulation = accumulation.fail(number)
        else:
            parts.append(number)
            accumulation = accumulation.add_part(seen_through(number, number))
    unseen = accumulation.unseen_failures(None, seen_through(len(calls) + 1, step))
    could_know_all = all(
        at <= sent_at for at in delivered_at.values() for sent_at in [*parts, step]
    )
    assert (unseen == []) == could_know_all
