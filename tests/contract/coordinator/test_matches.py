"""Matches: seats, turns in each order, barriers, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.fakes.coordinator_harness import PROJECT, CoordinatorRig, new_id, running_coordinator
from tests.fakes.match_player import (
    POINTS,
    Barrier,
    Game,
    Match,
    begin,
    create_match,
    get_match,
    join,
    stub_of,
    watch,
)
from tests.fakes.scheduler_fake_trainer import expect_rpc_error

from tinsmith.v1 import coordinator_pb2

Code = grpc.StatusCode
Agent = coordinator_pb2.Agent


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[CoordinatorRig]:
    async with running_coordinator(tmp_path, database_url=database_url) as rig:
        yield rig


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[CoordinatorRig]:
    """A coordinator on a file: for what no database has a say in."""
    async with running_coordinator(tmp_path, max_open_matches=2) as rig:
        yield rig


def states(match: Any) -> dict[str, int]:
    return {agent.agent: agent.state for agent in match.agents}


async def test_a_game_in_fixed_order(rig: CoordinatorRig) -> None:
    match = await create_match(rig, num_epochs=1)
    assert match.state == Match.STATE_GATHERING
    assert match.waiting_for == "black, white to join"
    black, white = await begin(rig, match)
    begun = await get_match(rig, match.name)
    assert begun.state == Match.STATE_RUNNING
    assert begun.waiting_for == "black to move in 1 game"
    assert states(begun) == {"black": Agent.STATE_RUNNING, "white": Agent.STATE_PENDING}
    assert (await black.move(turn=0)).running_agents == ["white"]
    assert (await white.move(turn=1)).running_agents == ["black"]
    over = await black.move(turn=2, rewards={"black": 1, "white": -1})
    assert over.state == Game.STATE_OVER
    assert over.turn == 3
    assert dict(over.rewards) == {"black": 1, "white": -1}
    for point in POINTS[1:]:
        assert not await black.arrive(point)
        assert await white.arrive(point)
    assert (await get_match(rig, match.name)).state == Match.STATE_COMPLETED


async def test_a_phase_waits_for_every_member_and_for_every_game(rig: CoordinatorRig) -> None:
    match = await create_match(rig, num_games=2)
    black, white = await begin(rig, match)
    waiting = asyncio.create_task(black.arrive(Barrier.POINT_ROLLOUT_END, timeout_s=20))
    assert not await white.arrive(Barrier.POINT_ROLLOUT_END)
    await black.move(game=0, rewards={})
    assert not waiting.done()
    await black.move(game=1, rewards={})
    assert await waiting
    # Later arrivals find it open.
    assert await white.arrive(Barrier.POINT_ROLLOUT_END)


async def test_the_first_move_may_pass_from_agent_to_agent(rig: CoordinatorRig) -> None:
    match = await create_match(rig, num_games=3, rotates_first_agent=True)
    await begin(rig, match)
    [update] = await watch(rig, match.name, until=lambda update: update.games)
    assert [list(game.running_agents) for game in update.games] == [["black"], ["white"], ["black"]]


async def test_simultaneous_moves_are_shown_together(rig: CoordinatorRig) -> None:
    order = Match.TURN_ORDER_SIMULTANEOUS
    match = await create_match(rig, "a", "b", "c", turn_order=order)
    players = await begin(rig, match)
    for player in players[:2]:
        game = await player.move(action=player.agent)
    assert game.running_agents == ["c"]
    [before] = await watch(rig, match.name, until=lambda update: True)
    assert not before.turns
    game = await players[2].move(action="c")
    assert game.turn == 1
    assert game.running_agents == ["a", "b", "c"]
    updates = await watch(
        rig, match.name, after_revision=before.revision, until=lambda update: update.turns
    )
    assert [turn.action_json for turn in updates[-1].turns] == ['"a"', '"b"', '"c"']


async def test_agents_that_disagree_on_the_outcome_abandon_their_game(rig: CoordinatorRig) -> None:
    match = await create_match(rig, turn_order=Match.TURN_ORDER_SIMULTANEOUS)
    black, white = await begin(rig, match)
    await black.move(rewards={"black": 1, "white": -1})
    game = await white.move(rewards={"black": -1, "white": 1})
    assert game.state == Game.STATE_ABANDONED
    assert game.failure == "black, white do not agree on what turn 0 led to"
    assert not game.rewards


async def test_whoever_moves_names_who_is_next_in_a_custom_order(rig: CoordinatorRig) -> None:
    match = await create_match(rig, turn_order=Match.TURN_ORDER_CUSTOM)
    black, white = await begin(rig, match)
    assert (await black.move(turn=0, next_agents=["black"])).running_agents == ["black"]
    assert (await black.move(turn=1, next_agents=["white"])).running_agents == ["white"]
    for wrong in ([], ["nobody"]):
        with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
            await white.move(turn=2, next_agents=wrong)
    assert (await white.move(turn=2, rewards={"white": 1})).state == Game.STATE_OVER


async def test_a_move_may_be_sent_again_and_no_other_in_its_place(rig: CoordinatorRig) -> None:
    match = await create_match(rig)
    black, white = await begin(rig, match)
    first = await black.move(action=7)
    assert await black.move(action=7) == first
    await white.move(turn=1, action=8)
    assert (await black.move(action=7)).turn == 2
    [update] = await watch(rig, match.name, until=lambda update: True)
    assert [(turn.agent, turn.action_json) for turn in update.turns] == [
        ("black", "7"),
        ("white", "8"),
    ]
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="OUT_OF_TURN"):
        await black.move(action=9)


async def test_turns_of_others_late_ahead_or_of_no_game_are_refused(rig: CoordinatorRig) -> None:
    match = await create_match(rig)
    players = [await join(rig, match.name, agent) for agent in ("black", "white")]
    black, white = players
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="OUT_OF_TURN"):
        await black.move()
    for player in players:
        await player.arrive(Barrier.POINT_ROLLOUT_START)
    for attempt in (
        white.move(turn=0),
        black.move(turn=1),
        black.move(game=1),
        black.move(epoch=1),
    ):
        with expect_rpc_error(Code.FAILED_PRECONDITION, reason="OUT_OF_TURN"):
            await attempt
    await black.move(turn=0, rewards={})
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="OUT_OF_TURN") as caught:
        await white.move(turn=1)
    assert caught[0].metadata["state"] == "over"


async def test_a_barrier_ahead_is_refused_and_a_past_one_is_open(rig: CoordinatorRig) -> None:
    match = await create_match(rig)
    black, _ = await begin(rig, match)
    assert await black.arrive(Barrier.POINT_ROLLOUT_START)
    for point, epoch in ((Barrier.POINT_UPDATE_START, 0), (Barrier.POINT_ROLLOUT_START, 1)):
        with expect_rpc_error(Code.FAILED_PRECONDITION, reason="OUT_OF_TURN"):
            await black.arrive(point, epoch=epoch)


async def test_epochs_follow_one_another_and_the_last_barrier_stays_open(
    rig: CoordinatorRig,
) -> None:
    match = await create_match(rig, num_epochs=3, num_games=0)
    players = [await join(rig, match.name, agent) for agent in ("black", "white")]
    for epoch in range(3):
        for point in POINTS:
            both = [player.arrive(point, epoch=epoch, timeout_s=10) for player in players]
            assert await asyncio.gather(*both) == [True, True]
    assert (await get_match(rig, match.name)).state == Match.STATE_COMPLETED
    assert await players[0].arrive(POINTS[-1], epoch=2)
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="MATCH_ENDED"):
        await players[0].arrive(POINTS[0], epoch=3)
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="MATCH_ENDED"):
        await players[0].heartbeat()


async def test_a_seat_has_one_holder_and_the_same_request_gets_the_same_token(
    rig: CoordinatorRig,
) -> None:
    match = await create_match(rig)
    request_id = new_id()
    seat = await join(rig, match.name, "black", request_id=request_id)
    assert await join(rig, match.name, "black", request_id=request_id) == seat
    await rig.restart()
    assert (await join(rig, match.name, "black", request_id=request_id)).token == seat.token
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="SEAT_TAKEN"):
        await join(rig, match.name, "black")
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await join(rig, match.name, "red")


async def test_a_repeated_creation_opens_one_match(small: CoordinatorRig) -> None:
    request_id = new_id()
    first = await create_match(small, request_id=request_id, seed=1)
    assert (await create_match(small, request_id=request_id, seed=1)).name == first.name
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await create_match(small, request_id=request_id, seed=2)
    await create_match(small)
    with expect_rpc_error(Code.RESOURCE_EXHAUSTED, reason="QUEUE_FULL"):
        await create_match(small)
    request = coordinator_pb2.CancelMatchRequest(name=first.name)
    cancelled = await stub_of(small).CancelMatch(request, metadata=small.mine)
    assert cancelled.state == Match.STATE_CANCELLED
    assert (await stub_of(small).CancelMatch(request, metadata=small.mine)) == cancelled
    await create_match(small)
    listed = await stub_of(small).ListMatches(
        coordinator_pb2.ListMatchesRequest(parent=PROJECT, page_size=2), metadata=small.mine
    )
    assert len(listed.matches) == 2
    rest = await stub_of(small).ListMatches(
        coordinator_pb2.ListMatchesRequest(parent=PROJECT, page_token=listed.next_page_token),
        metadata=small.mine,
    )
    assert [match.name for match in rest.matches] == [first.name]


async def test_a_match_of_another_project_is_as_if_there_were_none(small: CoordinatorRig) -> None:
    match = await create_match(small)
    calls = (
        ("GetMatch", coordinator_pb2.GetMatchRequest(name=match.name)),
        ("CancelMatch", coordinator_pb2.CancelMatchRequest(name=match.name)),
        (
            "JoinMatch",
            coordinator_pb2.JoinMatchRequest(
                name=match.name, request_id=new_id(), agent="black", client_id="x"
            ),
        ),
    )
    for method, request in calls:
        with expect_rpc_error(Code.NOT_FOUND, reason="MATCH_NOT_FOUND"):
            await getattr(stub_of(small), method)(request, metadata=small.theirs, timeout=10)


@pytest.mark.parametrize(
    "fields",
    [
        {"agents": ("alone",)},
        {"agents": ("a", "a")},
        {"agents": ("a", "b c")},
        {"agents": tuple(f"a{index}" for index in range(65))},
        {"min_members": 3},
        {"min_members": -1},
        {"num_games": 4097},
        {"num_epochs": -1},
        {"turn_s": 0.5},
        {"lease_s": 86_401},
        {"config_json": "{"},
        {"turn_order": 9},
        {"policy": 9},
    ],
    ids=str,
)
async def test_a_match_that_cannot_be_played_is_refused(
    small: CoordinatorRig, fields: dict[str, Any]
) -> None:
    agents = fields.pop("agents", ("black", "white")) if "agents" in fields else ()
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await create_match(small, *agents, **fields)


async def test_moves_that_are_too_large_or_not_finite_are_refused(small: CoordinatorRig) -> None:
    match = await create_match(small)
    black, _ = await begin(small, match)
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await black.move(action="x" * 65_536)
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="NOT_FINITE"):
        await black.move(rewards={"black": float("nan")})
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await black.move(rewards={"red": 1.0})
    assert (await black.move(rewards={"black": 1.0})).state == Game.STATE_OVER


async def test_a_game_ends_where_its_moves_take_too_much(small: CoordinatorRig) -> None:
    match = await create_match(small, turn_order=Match.TURN_ORDER_CUSTOM)
    black, _ = await begin(small, match)
    action = "x" * 65_000
    for turn in range(16):
        await black.move(turn=turn, action=action, next_agents=["black"])
    with expect_rpc_error(Code.RESOURCE_EXHAUSTED, reason="CAPACITY_EXHAUSTED"):
        await black.move(turn=16, action=action, next_agents=["black"])
    assert (await black.move(turn=16, rewards={})).state == Game.STATE_OVER


async def test_a_watch_brings_every_move_once_in_order(small: CoordinatorRig) -> None:
    match = await create_match(small, num_games=40, turn_order=Match.TURN_ORDER_CUSTOM)
    black, white = await begin(small, match)

    async def play(game: int) -> None:
        for turn in range(10):
            player, other = (black, white) if turn % 2 == 0 else (white, black)
            rewards = {} if turn == 9 else None
            next_agents = [] if turn == 9 else [other.agent]
            await player.move(game, turn, action=turn, next_agents=next_agents, rewards=rewards)

    playing = asyncio.gather(*(play(game) for game in range(40)))
    seen: dict[int, list[int]] = {game: [] for game in range(40)}
    revision = 0
    while any(len(turns) < 10 for turns in seen.values()):
        updates = await watch(
            small, match.name, after_revision=revision, until=lambda update: update.turns
        )
        revision = updates[-1].revision
        for update in updates:
            for turn in update.turns:
                seen[turn.game].append(turn.turn)
    await playing
    assert all(turns == list(range(10)) for turns in seen.values())
