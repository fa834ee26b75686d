"""A mistake in a match is a typed error for the member that made it, and touches no other."""

from __future__ import annotations

import asyncio
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
)
from tests.fakes.scheduler_fake_trainer import expect_rpc_error

from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_coordinator.pod import CoordinatorPod
from tinsmith_runtime.errors import ConfigError

Code = grpc.StatusCode
AGENTS = ("a", "b", "c")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[CoordinatorRig]:
    async with running_coordinator(tmp_path) as rig:
        yield rig


async def play_epoch(players: list[Player], epoch: int, *, leaving_at: int) -> None:
    """Go through an epoch; the last player leaves when so many of its steps are done."""
    steps: list[Any] = [
        Barrier.POINT_ROLLOUT_START,
        "game",
        Barrier.POINT_ROLLOUT_END,
        Barrier.POINT_UPDATE_START,
        Barrier.POINT_UPDATE_END,
    ]
    for number, step in enumerate(steps):
        if number == leaving_at:
            await players.pop().leave("it was asked to")
        if step == "game":
            game = await players[0].abandon(epoch=epoch, reason="not played")
            assert game.state == Game.STATE_ABANDONED
            continue
        for player in players:
            await player.arrive(step, epoch=epoch)


@pytest.mark.parametrize("leaving_at", range(5))
async def test_a_member_leaves_in_each_phase_and_the_others_go_on(
    rig: CoordinatorRig, leaving_at: int
) -> None:
    match = await create_match(rig, *AGENTS, policy=Match.POLICY_DROP, num_epochs=2)
    players = [await join(rig, match.name, agent) for agent in AGENTS]
    gone = players[-1]
    await play_epoch(players, 0, leaving_at=leaving_at)
    left = await get_match(rig, match.name)
    assert left.next_barrier.epoch == 1
    for call in (
        gone.heartbeat(),
        gone.move(epoch=0),
        gone.abandon(epoch=0),
        gone.arrive(Barrier.POINT_ROLLOUT_START, epoch=1),
    ):
        with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
            await call
    assert (await get_match(rig, match.name)).revision == left.revision
    await play_epoch(players, 1, leaving_at=9)
    assert (await get_match(rig, match.name)).state == Match.STATE_COMPLETED


@pytest.mark.parametrize("policy", [Match.POLICY_WAIT, Match.POLICY_DROP, Match.POLICY_ABORT])
async def test_a_stranger_can_do_nothing(rig: CoordinatorRig, policy: Any) -> None:
    match = await create_match(rig, policy=policy)
    black, _ = await begin(rig, match)
    before = await get_match(rig, match.name)
    other = await create_match(rig)
    # One has a seat elsewhere, one guesses.
    elsewhere = await join(rig, other.name, "black")
    for token in (elsewhere.token, black.token[:-1] + "?", "nothing"):
        stranger = Player(rig, match.name, "black", token)
        for call in (
            stranger.heartbeat(),
            stranger.move(),
            stranger.abandon(),
            stranger.arrive(POINTS[1]),
            stranger.leave(),
        ):
            with expect_rpc_error(Code.ABORTED, reason="LEASE_LOST"):
                await call
    assert (await get_match(rig, match.name)).revision == before.revision


async def test_an_order_of_a_schedule_is_named_move_by_move(rig: CoordinatorRig) -> None:
    schedule = ("a", "b", "b", "a", "c")
    match = await create_match(rig, *AGENTS, turn_order=Match.TURN_ORDER_CUSTOM)
    players = {player.agent: player for player in await begin(rig, match)}
    for turn, agent in enumerate(schedule):
        for other in set(AGENTS) - {agent}:
            with expect_rpc_error(Code.FAILED_PRECONDITION, reason="OUT_OF_TURN"):
                await players[other].move(turn=turn, next_agents=[agent])
        is_last = turn == len(schedule) - 1
        game = await players[agent].move(
            turn=turn,
            next_agents=[] if is_last else [schedule[turn + 1]],
            rewards={} if is_last else None,
        )
    assert game.state == Game.STATE_OVER


async def test_a_second_coordinator_on_the_same_files_is_refused(
    rig: CoordinatorRig, tmp_path: Path
) -> None:
    match = await create_match(rig)
    second = CoordinatorPod(
        CoordinatorConfig(
            data_dir=tmp_path,
            scheduler_address=rig.config.scheduler_address,
            pod_key=rig.config.pod_key,
            drain_timeout_s=0.2,
        )
    )
    with pytest.raises(ConfigError, match="in use"):
        await second.start()
    await second.stop()
    await begin(rig, match)


async def test_a_second_coordinator_on_a_database_waits_for_the_first_to_end(
    tmp_path: Path, postgres_url: str
) -> None:
    async with running_coordinator(tmp_path, database_url=postgres_url) as rig:
        match = await create_match(rig)
        black, white = await begin(rig, match)
        second = CoordinatorPod(rig.config, clock=rig.clock)
        starting = asyncio.create_task(second.start())
        # The one that serves goes on as if there were no other.
        await black.move(turn=0)
        await white.move(turn=1)
        assert not starting.done()
        await rig.stop()
        async with asyncio.timeout(60):
            await starting
        rig.pod, rig.channel = second, grpc.aio.insecure_channel(second.address)
        assert (await black.move(turn=2, rewards={})).state == Game.STATE_OVER
