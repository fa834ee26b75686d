"""Matches whose members are lost, late or gone: under each policy, and after a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.fakes.coordinator_harness import CoordinatorRig, running_coordinator
from tests.fakes.match_player import (
    POINTS,
    Barrier,
    Game,
    Match,
    Player,
    begin,
    create_match,
    get_match,
    join,
    watch,
)
from tests.fakes.scheduler_fake_trainer import expect_rpc_error
from tests.support.wait import eventually

from tinsmith.v1 import coordinator_pb2

Code = grpc.StatusCode
Agent = coordinator_pb2.Agent


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[CoordinatorRig]:
    async with running_coordinator(tmp_path, database_url=database_url) as rig:
        yield rig


async def has_state(rig: CoordinatorRig, name: str, state: Any) -> bool:
    return (await get_match(rig, name)).state == state


async def seat_has_state(rig: CoordinatorRig, name: str, agent: str, state: Any) -> bool:
    match = await get_match(rig, name)
    return any(each.agent == agent and each.state == state for each in match.agents)


async def let_run_out(rig: CoordinatorRig, *alive: Player, time_s: float = 61) -> None:
    """Let the leases of all run out but of those who are alive.

    These renew theirs half way and not at the end: a match that is aborted then refuses them.
    """
    rig.clock.offset_s += time_s / 2
    for player in alive:
        await player.heartbeat()
    rig.clock.offset_s += time_s / 2


async def games_of(rig: CoordinatorRig, name: str) -> list[Any]:
    [update] = await watch(rig, name, until=lambda update: True)
    return list(update.games)


async def test_a_dropped_member_leaves_the_others_to_go_on(rig: CoordinatorRig) -> None:
    match = await create_match(rig, "a", "b", "c", policy=Match.POLICY_DROP)
    a, b, c = await begin(rig, match)
    await let_run_out(rig, b, c)
    assert await eventually(lambda: seat_has_state(rig, match.name, "a", Agent.STATE_DROPPED))
    [game] = await games_of(rig, match.name)
    assert game.state == Game.STATE_ABANDONED
    assert game.failure == "agent a was dropped: the lease ran out"
    for point in POINTS[1:]:
        assert not await b.arrive(point)
        assert await c.arrive(point)
    for player in (b, c):
        await player.arrive(Barrier.POINT_ROLLOUT_START, epoch=1)
    assert (await b.move(epoch=1)).running_agents == ["c"]
    with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
        await a.heartbeat()
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="SEAT_TAKEN"):
        await join(rig, match.name, "a")


async def test_too_few_members_abort_the_match(rig: CoordinatorRig) -> None:
    match = await create_match(rig, policy=Match.POLICY_DROP)
    black, white = await begin(rig, match)
    await black.leave("out of memory")
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="MATCH_ENDED") as caught:
        await white.arrive(Barrier.POINT_ROLLOUT_END)
    reason = "1 of 2 members are left (black: it left: out of memory)"
    assert caught[0].metadata["failure"] == reason
    ended = await get_match(rig, match.name)
    assert ended.state == Match.STATE_ABORTED
    assert ended.failure == reason
    # Repeating it changes nothing.
    assert (await black.leave("out of memory")).state == Match.STATE_ABORTED


async def test_a_lost_member_aborts_the_match_where_it_is_told_to(rig: CoordinatorRig) -> None:
    match = await create_match(rig, policy=Match.POLICY_ABORT)
    _, white = await begin(rig, match)
    await let_run_out(rig, white)
    assert await eventually(lambda: has_state(rig, match.name, Match.STATE_ABORTED))
    ended = await get_match(rig, match.name)
    assert ended.failure == "agent black is lost: the lease ran out"
    assert (await games_of(rig, match.name))[0].failure == ended.failure


async def test_a_seat_that_is_waited_for_is_taken_again_in_the_middle_of_a_game(
    rig: CoordinatorRig,
) -> None:
    match = await create_match(rig, turn_s=3600, barrier_s=3600)
    black, white = await begin(rig, match)
    await let_run_out(rig, white)
    assert await eventually(lambda: seat_has_state(rig, match.name, "black", Agent.STATE_LOST))
    with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
        await black.move()
    again = await join(rig, match.name, "black")
    with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
        await black.heartbeat()
    assert (await again.move()).running_agents == ["white"]
    joined = await get_match(rig, match.name)
    assert joined.agents[0].num_joins == 2


async def test_no_seat_is_waited_for_longer_than_the_barrier_may_take(rig: CoordinatorRig) -> None:
    match = await create_match(rig, barrier_s=100, num_games=0)
    _, white = await begin(rig, match)
    await white.arrive(Barrier.POINT_ROLLOUT_END)
    await let_run_out(rig, white)
    assert await has_state(rig, match.name, Match.STATE_RUNNING)
    rig.clock.offset_s += 50
    assert await eventually(lambda: has_state(rig, match.name, Match.STATE_ABORTED))
    ended = await get_match(rig, match.name)
    assert ended.failure == "waited 100 s for members at a barrier: black"


async def test_a_member_that_is_alive_and_late_is_dropped(rig: CoordinatorRig) -> None:
    match = await create_match(
        rig, "a", "b", "c", policy=Match.POLICY_DROP, barrier_s=100, num_games=0
    )
    players = await begin(rig, match)
    for player in players[:2]:
        assert not await player.arrive(Barrier.POINT_ROLLOUT_END)
    await let_run_out(rig, *players)
    for player in players:
        await player.heartbeat()
    assert await seat_has_state(rig, match.name, "c", Agent.STATE_RUNNING)
    rig.clock.offset_s += 50
    assert await eventually(lambda: seat_has_state(rig, match.name, "c", Agent.STATE_DROPPED))
    assert await players[0].arrive(Barrier.POINT_ROLLOUT_END)


async def test_agents_that_never_come_are_not_waited_for_for_ever(rig: CoordinatorRig) -> None:
    dropped = await create_match(rig, "a", "b", "c", policy=Match.POLICY_DROP, lease_s=3600)
    aborted = await create_match(rig, "a", "b", "c", lease_s=3600)
    for agent in ("a", "b"):
        await join(rig, dropped.name, agent)
        await join(rig, aborted.name, agent)
    rig.clock.offset_s += 61
    assert await eventually(lambda: has_state(rig, dropped.name, Match.STATE_RUNNING))
    assert await eventually(lambda: has_state(rig, aborted.name, Match.STATE_ABORTED))
    assert (await get_match(rig, aborted.name)).failure == "waited 60 s for agents to join: c"


async def test_a_turn_that_takes_too_long_ends_its_game_alone(rig: CoordinatorRig) -> None:
    match = await create_match(rig, num_games=2, lease_s=3600, turn_s=60)
    black, white = await begin(rig, match)
    rig.clock.offset_s += 40
    await black.move(game=1)
    rig.clock.offset_s += 40
    [abandoned] = [
        game
        for game in (await watched_after_change(rig, match.name))
        if game.state == Game.STATE_ABANDONED
    ]
    assert abandoned.game == 0
    assert abandoned.failure == "black did not move within 60 s"
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="OUT_OF_TURN"):
        await black.move(game=0)
    assert (await white.move(game=1, turn=1)).running_agents == ["black"]


async def watched_after_change(rig: CoordinatorRig, name: str) -> list[Any]:
    updates = await watch(
        rig,
        name,
        until=lambda update: any(game.state == Game.STATE_ABANDONED for game in update.games),
    )
    return [game for update in updates for game in update.games]


async def test_a_game_that_is_given_up_ends_alone_and_for_all_its_agents(
    rig: CoordinatorRig,
) -> None:
    match = await create_match(rig, num_games=2)
    black, white = await begin(rig, match)
    left = await white.abandon(0, reason="its context is full")
    assert left.state == Game.STATE_ABANDONED
    assert left.failure == "white gave it up: its context is full"
    assert not left.rewards
    # Repeating it changes nothing, and neither does the other agent that gives it up as well.
    assert await white.abandon(0) == left
    assert await black.abandon(0) == left
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="OUT_OF_TURN"):
        await black.move(game=0)
    over = await black.move(game=1, rewards={"black": 1.0})
    assert (await white.abandon(1)).rewards == over.rewards
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="OUT_OF_TURN"):
        await black.abandon(2)
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="OUT_OF_TURN"):
        await black.abandon(0, epoch=1)
    await black.leave()
    with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
        await black.abandon(0)


async def test_time_without_a_coordinator_is_not_held_against_the_members(
    rig: CoordinatorRig,
) -> None:
    match = await create_match(rig, policy=Match.POLICY_ABORT)
    black, white = await begin(rig, match)
    await black.move(turn=0)
    await rig.stop()
    rig.clock.offset_s += 1000
    await rig.start()
    await white.heartbeat()
    assert (await white.move(turn=1)).running_agents == ["black"]
    assert (await black.move(turn=2, rewards={})).state == Game.STATE_OVER


async def test_a_match_goes_on_where_it_was_after_a_restart(rig: CoordinatorRig) -> None:
    match = await create_match(rig, num_epochs=2)
    players = await begin(rig, match)
    for epoch in range(2):
        for player in players:
            await player.arrive(Barrier.POINT_ROLLOUT_START, epoch=epoch)
        await players[0].move(epoch=epoch)
        await rig.restart()
        await players[1].move(epoch=epoch, turn=1, rewards={"white": 1.0})
        for point in POINTS[1:]:
            assert not await players[0].arrive(point, epoch=epoch)
            await rig.restart()
            assert await players[1].arrive(point, epoch=epoch)
    assert (await get_match(rig, match.name)).state == Match.STATE_COMPLETED
