"""What follows in a match, row by row: waits, losses and turns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tinsmith_coordinator.matches import rules
from tinsmith_coordinator.store.match_records import (
    GameState,
    LossPolicy,
    Match,
    MatchRules,
    MatchState,
    Member,
    MemberState,
    Move,
    Point,
    TurnOrder,
    barrier_index,
)

AGENTS = ("a", "b", "c")
J, L, D, N = MemberState.JOINED, MemberState.LOST, MemberState.DROPPED, MemberState.ABSENT
NOW_S = 1000.0


def make_match(
    *seats: tuple[MemberState, int],
    state: MatchState = MatchState.RUNNING,
    num_opened: int = 0,
    num_open_games: int = 0,
    deadline_s: float | None = None,
    **changes: Any,
) -> Match:
    agents = AGENTS[: len(seats)]
    terms = MatchRules(
        **{
            "agents": agents,
            "models": ("",) * len(agents),
            "turn_order": TurnOrder.FIXED,
            "rotates_first_agent": False,
            "policy": LossPolicy.WAIT,
            "min_members": 2,
            "num_games": 1,
            "num_epochs": 1,
            "seed": 0,
            "lease_duration_s": 10.0,
            "turn_timeout_s": 30.0,
            "barrier_timeout_s": 60.0,
            "config_json": "",
            **changes,
        }
    )
    members = tuple(
        Member(
            index=index,
            agent=agent,
            state=seat,
            client_id="",
            num_joins=1,
            lease_expire_s=NOW_S + 10,
            arrived=arrived,
            failure="",
            request_sha256=b"",
            salt=b"",
            token_sha256=b"",
        )
        for index, (agent, (seat, arrived)) in enumerate(zip(agents, seats, strict=True))
    )
    return Match(
        serial=1,
        project="default",
        match_id="m",
        rules=terms,
        state=state,
        members=members,
        num_opened=num_opened,
        num_open_games=num_open_games,
        deadline_s=deadline_s,
        failure="",
        revision=1,
        create_time_s=NOW_S,
        end_time_s=None,
    )


GATHERING = MatchState.GATHERING
IN_ROLLOUT = barrier_index(0, Point.ROLLOUT_END)
LAST = barrier_index(0, Point.UPDATE_END)


@pytest.mark.parametrize(
    ("match", "awaited", "opens"),
    [
        (make_match((J, -1), (N, -1), state=GATHERING), ["b"], False),
        (make_match((J, -1), (J, -1), state=GATHERING), [], True),
        (make_match((J, -1), (D, -1), (J, -1), state=GATHERING), [], True),
        (make_match((J, 0), (J, -1)), ["b"], False),
        (make_match((J, 0), (J, 0)), [], True),
        (make_match((J, 0), (L, -1)), ["b"], False),
        (make_match((J, 0), (L, 0)), [], True),
        (make_match((J, 0), (D, -1), (J, 0)), [], True),
        (make_match((J, 1), (J, 1), num_opened=IN_ROLLOUT, num_open_games=1), [], False),
        (make_match((J, 1), (J, 1), num_opened=IN_ROLLOUT), [], True),
        (make_match((J, 0), (J, 0), state=MatchState.CANCELLED), [], False),
    ],
)
def test_a_barrier_opens_once_no_member_is_waited_for(
    match: Match, awaited: list[str], opens: bool
) -> None:
    assert [member.agent for member in rules.awaited_members(match)] == awaited
    assert rules.can_open(match) == opens


@pytest.mark.parametrize(
    ("match", "state", "num_opened"),
    [
        (make_match((J, -1), (J, -1), state=GATHERING), MatchState.RUNNING, 0),
        (make_match((J, 0), (J, 0)), MatchState.RUNNING, 1),
        (make_match((J, 3), (J, 3), num_opened=LAST), MatchState.COMPLETED, 4),
        (make_match((J, 3), (J, 3), num_opened=LAST, num_epochs=2), MatchState.RUNNING, 4),
        (make_match((J, 3), (J, 3), num_opened=LAST, num_epochs=0), MatchState.RUNNING, 4),
    ],
)
def test_barriers_open_one_by_one_to_the_last_epoch(
    match: Match, state: MatchState, num_opened: int
) -> None:
    opened = rules.open_next(match)
    assert (opened.state, opened.num_opened) == (state, num_opened)


@pytest.mark.parametrize(
    ("match", "deadline_s"),
    [
        (make_match((J, -1), (N, -1), state=GATHERING), 1060),
        (make_match((J, -1), (N, -1), state=GATHERING, deadline_s=1005), 1005),
        (make_match((J, -1), (J, -1)), None),
        (make_match((J, 0), (J, -1)), 1060),
        (make_match((J, 0), (J, -1), deadline_s=1010), 1010),
        (make_match((J, -1), (L, -1)), 1060),
        (make_match((J, 1), (J, 1), num_opened=IN_ROLLOUT, num_open_games=1), None),
        (make_match((J, 0), (J, -1), state=MatchState.ABORTED), None),
    ],
)
def test_members_are_waited_for_from_the_first_arrival_or_loss(
    match: Match, deadline_s: float | None
) -> None:
    assert rules.wait_deadline(match, now_s=NOW_S) == deadline_s


@pytest.mark.parametrize(
    ("policy", "num", "state", "seat"),
    [
        (LossPolicy.WAIT, 2, MatchState.RUNNING, L),
        (LossPolicy.DROP, 3, MatchState.RUNNING, D),
        (LossPolicy.DROP, 2, MatchState.ABORTED, D),
        (LossPolicy.ABORT, 3, MatchState.ABORTED, J),
    ],
)
def test_a_loss_keeps_the_seat_closes_it_or_ends_the_match(
    policy: LossPolicy, num: int, state: MatchState, seat: MemberState
) -> None:
    lost = rules.lose(make_match(*[(J, 0)] * num, policy=policy), "b", "gone")
    assert (lost.state, lost.members[1].state) == (state, seat)
    assert bool(lost.failure) == (state is MatchState.ABORTED)


@pytest.mark.parametrize(
    ("policy", "num", "state", "seats"),
    [
        (LossPolicy.WAIT, 3, MatchState.ABORTED, [J, J, J]),
        (LossPolicy.ABORT, 3, MatchState.ABORTED, [J, J, J]),
        (LossPolicy.DROP, 3, MatchState.RUNNING, [J, D, J]),
        (LossPolicy.DROP, 2, MatchState.ABORTED, [J, D]),
    ],
)
def test_a_wait_ends_with_those_who_came_or_with_the_match(
    policy: LossPolicy, num: int, state: MatchState, seats: list[MemberState]
) -> None:
    arrived = [(J, 0), (J, -1), (J, 0)][:num]
    ended = rules.give_up_waiting(make_match(*arrived, policy=policy))
    assert ended.state is state
    assert [member.state for member in ended.members] == seats


@pytest.mark.parametrize(
    ("order", "rotates", "game", "running"),
    [
        (TurnOrder.FIXED, False, 1, ("a",)),
        (TurnOrder.FIXED, True, 1, ("b",)),
        (TurnOrder.FIXED, True, 5, ("c",)),
        (TurnOrder.CUSTOM, False, 2, ("a",)),
        (TurnOrder.SIMULTANEOUS, True, 1, AGENTS),
    ],
)
def test_who_moves_first(
    order: TurnOrder, rotates: bool, game: int, running: tuple[str, ...]
) -> None:
    match = make_match(*[(J, 0)] * 3, turn_order=order, rotates_first_agent=rotates, num_opened=1)
    assert rules.first_turn(match, game, now_s=NOW_S).running == running


def make_move(agent: str, **fields: Any) -> Move:
    return Move(**{"epoch": 0, "game": 0, "turn": 0, "agent": agent, "action_json": "1", **fields})


@pytest.mark.parametrize(
    ("order", "running", "moves", "expected"),
    [
        (TurnOrder.FIXED, ("c",), [make_move("c")], (GameState.PLAYING, 1, ("a",))),
        (
            TurnOrder.CUSTOM,
            ("a",),
            [make_move("a", next_agents=("a", "c"))],
            (GameState.PLAYING, 1, ("a", "c")),
        ),
        (TurnOrder.SIMULTANEOUS, AGENTS, [make_move("b")], (GameState.PLAYING, 0, ("a", "c"))),
        (
            TurnOrder.SIMULTANEOUS,
            ("c",),
            [make_move("a"), make_move("b"), make_move("c")],
            (GameState.PLAYING, 1, AGENTS),
        ),
        (
            TurnOrder.SIMULTANEOUS,
            ("b",),
            [make_move("a", is_over=True), make_move("b")],
            (GameState.ABANDONED, 0, ()),
        ),
        (
            TurnOrder.FIXED,
            ("a",),
            [make_move("a", is_over=True, rewards={"a": 1.0})],
            (GameState.OVER, 1, ()),
        ),
    ],
)
def test_whose_turn_it_is_after_a_move(
    order: TurnOrder,
    running: tuple[str, ...],
    moves: list[Move],
    expected: tuple[GameState, int, tuple[str, ...]],
) -> None:
    match = make_match(*[(J, 0)] * 3, turn_order=order, num_opened=1)
    game = dataclasses.replace(rules.first_turn(match, 0, now_s=0.0), running=running)
    after = rules.move(match, game, moves, now_s=NOW_S)
    assert (after.state, after.turn, after.running) == expected
    assert after.num_bytes == 1


def test_a_dropped_agent_is_skipped_in_later_games() -> None:
    match = make_match((J, 0), (D, 0), (J, 0), num_opened=1)
    game = rules.first_turn(match, 0, now_s=NOW_S)
    assert rules.move(match, game, [make_move("a")], now_s=NOW_S).running == ("c",)
