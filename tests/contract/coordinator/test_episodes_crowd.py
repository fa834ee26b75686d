"""Nothing is lost or counted twice: not with agents that die, nor when the coordinator does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from bench.episode_crowd import AgentCrowd, Habits
from bench.episode_pods import COORDINATOR, episode_pods
from tests.fakes.coordinator_harness import (
    Episode,
    claim_request,
    create_request,
    running_coordinator,
)
from tests.fakes.scheduler_fake_trainer import expect_rpc_error
from tests.support.pods import PodDeployment

from tinsmith.v1 import episode_pb2, episode_pb2_grpc

Code = grpc.StatusCode


async def test_unreliable_agents_lose_nothing(tmp_path: Path, database_url: str) -> None:
    async with running_coordinator(tmp_path, database_url=database_url) as rig:
        rig.clock.speed = 5
        key = rig.scheduler.new_key("default")
        crowd = AgentCrowd(
            rig.pod.address, key, Habits(dying=0.33, late=0.03, twice=0.1, lease_s=3), seed=1
        )
        outcome = await crowd.run(num_agents=40, num_episodes=200)
    outcome.check(200)
    assert outcome.num_dead > 30
    assert outcome.num_fenced > 0
    assert outcome.num_twice > 0


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodDeployment]:
    with episode_pods(tmp_path) as pods:
        yield pods


async def test_what_was_acknowledged_outlives_a_kill(pods: PodDeployment) -> None:
    metadata = (("authorization", f"Bearer {pods.api_key}"),)

    async def call(method: str, request: Any) -> Any:
        async with grpc.aio.insecure_channel(pods.processes[COORDINATOR].address) as channel:
            stub = episode_pb2_grpc.EpisodeServiceStub(channel)
            return await getattr(stub, method)(request, metadata=metadata, timeout=20)

    registration = create_request(3)
    created = await call("CreateEpisodes", registration)
    claims = [claim_request() for _ in range(2)]
    first, second = [await call("ClaimEpisode", claim) for claim in claims]
    submit = episode_pb2.SubmitEpisodeRequest(
        name=first.episode.name, lease_token=first.lease_token, outcome={"reward": 0.5}
    )
    ended = await call("SubmitEpisode", submit)
    await asyncio.to_thread(pods.restart, COORDINATOR)
    # An agent that lost an answer repeats the call; one that held an episode goes on.
    assert await call("CreateEpisodes", registration) == created
    assert (await call("ClaimEpisode", claims[1])).lease_token == second.lease_token
    assert await call("SubmitEpisode", submit) == ended
    submit.outcome.reward = 1.0
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="EPISODE_ENDED"):
        await call("SubmitEpisode", submit)
    other = episode_pb2.SubmitEpisodeRequest(
        name=second.episode.name, lease_token=second.lease_token, outcome={"reward": 0.25}
    )
    assert (await call("SubmitEpisode", other)).revision == 2
    third = await call("ClaimEpisode", claim_request())
    assert third.episode.name == created.episodes[2].name
    listed = await call("ListEpisodes", episode_pb2.ListEpisodesRequest(parent="projects/default"))
    states = [episode.state for episode in listed.episodes]
    assert states == [Episode.STATE_CLAIMED, Episode.STATE_SUBMITTED, Episode.STATE_SUBMITTED]


async def test_a_coordinator_that_is_killed_while_agents_play_loses_nothing(
    pods: PodDeployment,
) -> None:
    metadata = (("authorization", f"Bearer {pods.api_key}"),)
    num_episodes = 60
    acknowledged: dict[str, float] = {}
    half = asyncio.Event()

    async def insist(stub: Any, method: str, request: Any) -> Any:
        """Repeat a call with its request id until it is answered."""
        while True:
            try:
                return await getattr(stub, method)(request, metadata=metadata, timeout=5)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                    raise
                await asyncio.sleep(0.02)

    async def play(number: int) -> None:
        async with grpc.aio.insecure_channel(
            pods.processes[COORDINATOR].address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 100),
            ],
        ) as channel:
            stub = episode_pb2_grpc.EpisodeServiceStub(channel)
            while True:
                claimed = await insist(stub, "ClaimEpisode", claim_request())
                if not claimed.HasField("episode"):
                    return
                reward = number + len(acknowledged) / 1000
                submit = episode_pb2.SubmitEpisodeRequest(
                    name=claimed.episode.name,
                    lease_token=claimed.lease_token,
                    outcome={"reward": reward},
                )
                await insist(stub, "SubmitEpisode", submit)
                assert claimed.episode.name not in acknowledged
                acknowledged[claimed.episode.name] = reward
                if len(acknowledged) >= num_episodes // 3:
                    half.set()

    async with grpc.aio.insecure_channel(pods.processes[COORDINATOR].address) as channel:
        stub: Any = episode_pb2_grpc.EpisodeServiceStub(channel)
        await insist(stub, "CreateEpisodes", create_request(num_episodes))
        async with asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(play(number))
            await half.wait()
            await asyncio.to_thread(pods.restart, COORDINATOR)
        request = episode_pb2.ListEpisodesRequest(parent="projects/default", page_size=1000)
        listed = await insist(stub, "ListEpisodes", request)
    kept = {episode.name: episode.outcome.reward for episode in listed.episodes}
    assert len(kept) == num_episodes
    assert kept == acknowledged
