"""A real coordinator on a real channel, with a clock that a test moves."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import sqlalchemy as sa
from google.protobuf import duration_pb2
from tests.fakes.scheduler import FakeScheduler, bearer
from tests.support.pod_keys import POD_KEY, pod

from tinsmith.tensors import encode_tensor, encode_tokens
from tinsmith.v1 import episode_pb2, episode_pb2_grpc, trajectories_pb2
from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_coordinator.pod import CoordinatorPod
from tinsmith_coordinator.rollouts.players import Players
from tinsmith_coordinator.store.database import database_clock

PROJECT = "projects/default"
Episode = episode_pb2.Episode


class MovedClock:
    """The clock of the database, moved by what a test adds, and perhaps faster than it."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.speed = 1.0
        self._begin_s: float | None = None

    def __call__(self, connection: sa.Connection) -> float:
        time_s = database_clock(connection)
        if self._begin_s is None:
            self._begin_s = time_s
        return self._begin_s + (time_s - self._begin_s) * self.speed + self.offset_s


class CoordinatorRig:
    """One coordinator that can be restarted, and calls to it with defaults."""

    def __init__(self, scheduler: FakeScheduler, config: CoordinatorConfig) -> None:
        self.scheduler = scheduler
        self.config = config
        self.clock = MovedClock()
        self.players: Players | None = None
        self.mine = bearer(scheduler.new_key("default"))
        self.theirs = bearer(scheduler.new_key("other"))
        self.pod: CoordinatorPod
        self.channel: grpc.aio.Channel
        self.stub: Any

    async def start(self) -> None:
        """Start the pod on what is in its database."""
        self.pod = CoordinatorPod(self.config, clock=self.clock, players=self.players)
        await self.pod.start()
        self.channel = grpc.aio.insecure_channel(self.pod.address)
        self.stub = episode_pb2_grpc.EpisodeServiceStub(self.channel)

    async def stop(self) -> None:
        """Stop the pod."""
        await self.channel.close()
        await self.pod.stop()

    async def restart(self) -> None:
        """Stop the pod, and start it on the same database."""
        await self.stop()
        await self.start()

    async def create(self, num: int = 1, **fields: Any) -> list[episode_pb2.Episode]:
        """Register episodes that are alike but for their task."""
        request = create_request(num, **fields)
        answer = await self.stub.CreateEpisodes(request, metadata=self.mine, timeout=10)
        return list(answer.episodes)

    async def claim(self, **fields: Any) -> episode_pb2.ClaimEpisodeResponse:
        """Claim an episode."""
        answer: episode_pb2.ClaimEpisodeResponse = await self.stub.ClaimEpisode(
            claim_request(**fields), metadata=self.mine, timeout=30
        )
        return answer

    async def heartbeat(self, claimed: episode_pb2.ClaimEpisodeResponse) -> episode_pb2.Episode:
        """Renew the lease of a claim."""
        request = episode_pb2.HeartbeatEpisodeRequest(
            name=claimed.episode.name, lease_token=claimed.lease_token
        )
        answer: episode_pb2.Episode = await self.stub.HeartbeatEpisode(
            request, metadata=self.mine, timeout=10
        )
        return answer

    async def submit(
        self, claimed: episode_pb2.ClaimEpisodeResponse, reward: float = 1.0, **outcome: Any
    ) -> episode_pb2.Episode:
        """Submit what a claim was worth."""
        request = episode_pb2.SubmitEpisodeRequest(
            name=claimed.episode.name,
            lease_token=claimed.lease_token,
            outcome=episode_pb2.EpisodeOutcome(**{"reward": reward, **outcome}),
        )
        answer: episode_pb2.Episode = await self.stub.SubmitEpisode(
            request, metadata=self.mine, timeout=10
        )
        return answer

    async def abort(
        self, claimed: episode_pb2.ClaimEpisodeResponse, reason: str = ""
    ) -> episode_pb2.Episode:
        """Give a claim up."""
        request = episode_pb2.AbortEpisodeRequest(
            name=claimed.episode.name, lease_token=claimed.lease_token, reason=reason
        )
        answer: episode_pb2.Episode = await self.stub.AbortEpisode(
            request, metadata=self.mine, timeout=10
        )
        return answer

    async def get(self, name: str, *, trajectories: bool = False) -> episode_pb2.Episode:
        """Return an episode."""
        request = episode_pb2.GetEpisodeRequest(name=name, include_trajectories=trajectories)
        answer: episode_pb2.Episode = await self.stub.GetEpisode(
            request, metadata=self.mine, timeout=10
        )
        return answer

    async def record(
        self,
        claimed: episode_pb2.ClaimEpisodeResponse,
        prompt: Sequence[int],
        *samples: Sequence[int],
        request_id: str = "",
    ) -> int:
        """Record a model call as a pod does."""
        request = record_request(claimed, prompt, *samples, request_id=request_id)
        answer = await self.stub.RecordModelCall(request, metadata=pod("gateway"), timeout=10)
        return int(answer.call_index)

    async def cancel(self, **fields: Any) -> int:
        """Cancel episodes."""
        request = episode_pb2.CancelEpisodesRequest(parent=PROJECT, **fields)
        answer = await self.stub.CancelEpisodes(request, metadata=self.mine, timeout=10)
        return int(answer.num_cancelled)


@contextlib.asynccontextmanager
async def running_coordinator(
    data_dir: Path, *, database_url: str = "", players: Players | None = None, **settings: Any
) -> AsyncIterator[CoordinatorRig]:
    """Run a coordinator beside a scheduler that knows keys; `players` play its rollouts."""
    scheduler = FakeScheduler()
    await scheduler.server.start()
    config = CoordinatorConfig(
        data_dir=data_dir,
        database_url=database_url,
        scheduler_address=scheduler.server.address,
        pod_key=POD_KEY,
        **{"drain_timeout_s": 2.0, "sweep_interval_s": 0.01, **settings},
    )
    rig = CoordinatorRig(scheduler, config)
    rig.players = players
    try:
        await rig.start()
        try:
            yield rig
        finally:
            await rig.stop()
    finally:
        await scheduler.server.stop()


def create_request(num: int = 1, **fields: Any) -> episode_pb2.CreateEpisodesRequest:
    """Return a request to register episodes."""
    request_id = fields.pop("request_id", new_id())
    parent = fields.pop("parent", PROJECT)
    return episode_pb2.CreateEpisodesRequest(
        parent=parent,
        request_id=request_id,
        episodes=[
            episode_pb2.Episode(**{"task_id": f"task-{number}", "task_json": "{}", **fields})
            for number in range(num)
        ],
    )


def claim_request(
    *, timeout_s: float = 0, lease_s: float = 60, **fields: Any
) -> episode_pb2.ClaimEpisodeRequest:
    """Return a request for an episode."""
    return episode_pb2.ClaimEpisodeRequest(
        **{
            "parent": PROJECT,
            "request_id": new_id(),
            "client_id": "agent",
            "timeout": duration(timeout_s),
            "lease_duration": duration(lease_s),
            **fields,
        }
    )


def record_request(
    claimed: episode_pb2.ClaimEpisodeResponse,
    prompt: Sequence[int],
    *samples: Sequence[int],
    request_id: str = "",
) -> episode_pb2.RecordModelCallRequest:
    """Return the record of a model call whose log-probabilities tell its tokens."""
    request = episode_pb2.RecordModelCallRequest(
        name=claimed.episode.name,
        request_id=request_id or new_id(),
        api_key=claimed.api_key,
        params=trajectories_pb2.SamplingParams(seed=7),
    )
    request.prompt.chunks.add(tokens=encode_tokens(prompt))
    for tokens in samples:
        request.sequences.add(
            tokens=encode_tokens(tokens),
            logprobs=encode_tensor(np.asarray(tokens, dtype=np.float32) / -100),
            versions=encode_tensor(np.full(len(tokens), 3, dtype=np.int64)),
        )
    return request


def duration(seconds: float) -> duration_pb2.Duration:
    """Return a duration."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def new_id() -> str:
    """Return a request id."""
    return str(uuid.uuid4())
