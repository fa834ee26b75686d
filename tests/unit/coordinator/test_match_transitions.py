"""The table of transitions of a match, walked completely: each state, event and policy."""

from __future__ import annotations

import itertools

import pytest
from tests.unit.coordinator.test_match_rules import make_match

from tinsmith_coordinator.matches import rules
from tinsmith_coordinator.store.match_records import (
    LossPolicy,
    Match,
    MatchState,
    MemberState,
)

GATHERING, RUNNING, ABORTED = MatchState.GATHERING, MatchState.RUNNING, MatchState.ABORTED
WAIT, DROP, ABORT = LossPolicy
JOINED, LOST, DROPPED, ABSENT = (
    MemberState.JOINED,
    MemberState.LOST,
    MemberState.DROPPED,
    MemberState.ABSENT,
)
STATES = (GATHERING, RUNNING)
EVENTS = ("loss", "late")
ENOUGH = (True, False)
"""Whether there are still `min_members` without the member."""

TABLE = {
    # A member is lost: its lease ran out, or it left.
    (GATHERING, "loss", WAIT, True): (GATHERING, LOST),
    (GATHERING, "loss", WAIT, False): (GATHERING, LOST),
    (GATHERING, "loss", DROP, True): (GATHERING, DROPPED),
    (GATHERING, "loss", DROP, False): (ABORTED, DROPPED),
    (GATHERING, "loss", ABORT, True): (ABORTED, JOINED),
    (GATHERING, "loss", ABORT, False): (ABORTED, JOINED),
    (RUNNING, "loss", WAIT, True): (RUNNING, LOST),
    (RUNNING, "loss", WAIT, False): (RUNNING, LOST),
    (RUNNING, "loss", DROP, True): (RUNNING, DROPPED),
    (RUNNING, "loss", DROP, False): (ABORTED, DROPPED),
    (RUNNING, "loss", ABORT, True): (ABORTED, JOINED),
    (RUNNING, "loss", ABORT, False): (ABORTED, JOINED),
    # A member did not come, or did not arrive at a barrier, in the time there is.
    (GATHERING, "late", WAIT, True): (ABORTED, ABSENT),
    (GATHERING, "late", WAIT, False): (ABORTED, ABSENT),
    (GATHERING, "late", DROP, True): (GATHERING, DROPPED),
    (GATHERING, "late", DROP, False): (ABORTED, DROPPED),
    (GATHERING, "late", ABORT, True): (ABORTED, ABSENT),
    (GATHERING, "late", ABORT, False): (ABORTED, ABSENT),
    (RUNNING, "late", WAIT, True): (ABORTED, JOINED),
    (RUNNING, "late", WAIT, False): (ABORTED, JOINED),
    (RUNNING, "late", DROP, True): (RUNNING, DROPPED),
    (RUNNING, "late", DROP, False): (ABORTED, DROPPED),
    (RUNNING, "late", ABORT, True): (ABORTED, JOINED),
    (RUNNING, "late", ABORT, False): (ABORTED, JOINED),
}


def before(state: MatchState, event: str, policy: LossPolicy, is_enough: bool) -> Match:
    """Return a match whose second member is about to be lost, or is late."""
    others = [(JOINED, 0 if state is RUNNING else -1)] * (2 if is_enough else 1)
    is_absent = state is GATHERING and event == "late"
    member = (ABSENT if is_absent else JOINED, -1)
    return make_match(others[0], member, *others[1:], state=state, policy=policy)


def test_the_table_has_a_row_for_everything() -> None:
    assert set(TABLE) == set(itertools.product(STATES, EVENTS, LossPolicy, ENOUGH))


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_a_row_of_the_table(row: tuple[MatchState, str, LossPolicy, bool]) -> None:
    match = before(*row)
    event = row[1]
    after = rules.lose(match, "b", "gone") if event == "loss" else rules.give_up_waiting(match)
    assert (after.state, after.members[1].state) == TABLE[row]
    # No other member is touched, and a match that goes on waits for none that is dropped.
    others = [index for index in range(len(match.members)) if index != 1]
    assert [after.members[index] for index in others] == [match.members[index] for index in others]
    if after.state.is_open and after.members[1].state is DROPPED:
        assert rules.can_open(after)
    assert bool(after.failure) == (after.state is ABORTED)


@pytest.mark.parametrize("state", [each for each in MatchState if not each.is_open])
def test_what_has_ended_goes_nowhere(state: MatchState) -> None:
    match = make_match((JOINED, 0), (JOINED, 0), state=state)
    assert not rules.can_open(match)
    assert rules.wait_deadline(match, now_s=0.0) is None
    assert not rules.may_continue(match, match)
