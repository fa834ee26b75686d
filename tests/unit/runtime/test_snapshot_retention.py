"""Which snapshots of a run are kept: the newest, and some of its past."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.runtime.ledger_suite import snapshot

from tinsmith_runtime.ledger import SnapshotRecord
from tinsmith_runtime.ledger.snapshot_statements import begin_of_past, superfluous_snapshots

_RECENT_S = 100.0


def thinned(
    gaps: list[int], num_history: int, history_s: float = _RECENT_S
) -> tuple[list[SnapshotRecord], float]:
    """Write snapshots that lie so far apart, tidying up after each; return what is left."""
    kept: list[SnapshotRecord] = []
    now_s = 0.0
    for number, gap in enumerate(gaps, 1):
        now_s += gap
        kept = [snapshot(number, create_time_s=now_s), *kept]
        gone = superfluous_snapshots(
            kept, now_s=now_s, history_s=history_s, recent_s=_RECENT_S, num_history=num_history
        )
        kept = [each for each in kept if each not in gone]
    return kept, now_s


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=120),
    st.integers(1, 6),
    st.sampled_from([1, 2, 3, 10, 30]),
)
def test_no_state_of_the_time_that_is_kept_is_far_from_a_snapshot_before_it(
    gaps: list[int], num_history: int, factor: int
) -> None:
    history_s = factor * _RECENT_S
    kept, now_s = thinned(gaps, num_history, history_s)
    times = [each.create_time_s for each in kept]
    num_levels = math.ceil(math.log2(factor))
    assert len(kept) <= (num_history + 1) * (num_levels + 1) + 3
    assert [each.sequence_number for each in kept[:2]] == [len(gaps), len(gaps) - 1][: len(kept)]
    written = [float(sum(gaps[:number])) for number in range(1, len(gaps) + 1)]
    for each in written:
        before = [time for time in times if time <= each]
        if each < now_s - history_s:
            continue
        # One was there to begin with: the first that was written, or one before the past.
        age_s = max(now_s - max(before), _RECENT_S)
        assert each - max(before) < age_s / num_history


@given(st.lists(st.integers(101, 300), min_size=3, max_size=40), st.integers(1, 6))
def test_of_a_run_that_rarely_trains_the_newest_are_kept(gaps: list[int], num: int) -> None:
    kept, _ = thinned(gaps, num)
    numbers = [each.sequence_number for each in kept]
    assert numbers == [len(gaps), len(gaps) - 1]


def test_of_ninety_days_some_thirty_snapshots_are_kept() -> None:
    kept, _ = thinned([1] * 10_000, 4, 86.4 * _RECENT_S)
    assert 25 <= len(kept) <= 33


def test_the_past_begins_at_the_newest_snapshot_that_is_as_old_but_not_at_the_newest() -> None:
    kept = [snapshot(number, create_time_s=10.0 * number) for number in (4, 3, 2, 1)]
    for past_s, number in [(25.0, 2), (30.0, 3), (90.0, 3), (10.0, 1)]:
        begin = begin_of_past(kept, past_s)
        assert begin is not None
        assert begin.sequence_number == number
    assert begin_of_past(kept, 9.0) is None
    assert begin_of_past(kept[:1], 90.0) is None
