"""Agents that claim episodes and are unreliable: they die, come late, and submit twice.

Raw stubs in one event loop; each agent has a connection of its own. What the service acknowledged
is written down here, and compared with what it keeps: every episode is counted once, with the
reward that was acknowledged, and none is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf import duration_pb2
from grpc_status import rpc_status

from tinsmith.rpc.error_codec import decode_status
from tinsmith.v1 import episode_pb2, episode_pb2_grpc

_TIMEOUT_S = 60.0
_WAIT_S = 20.0
_MARGIN_S = 0.1
_MANY_ATTEMPTS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """How unreliable agents are; shares of all attempts.

    Attributes:
        dying: Never heard of again.
        late: Submitting after the lease ran out.
        twice: Submitting two times.
        lease_s: What they ask for.
        play_s: How long they play, on average.
    """

    dying: float = 0.3
    late: float = 0.05
    twice: float = 0.05
    lease_s: float = 1.0
    play_s: float = 0.0


@dataclass
class AgentCrowdOutcome:
    """What agents and watcher saw.

    Attributes:
        claim_s: Durations of claims, until each episode was claimed once.
        acknowledged: Reward that was acknowledged, by episode.
        ends: Episodes in the order in which the watcher saw them end.
        num_attempts: Claims that gave an episode.
        num_dead: Attempts that were left.
        num_fenced: Submits after the lease ran out, all of which must be refused.
        num_twice: Submits that were repeated.
        duration_s: From the first claim to the last end.
        first_claims_s: From the first claim until every episode was claimed once.
    """

    claim_s: list[float] = field(default_factory=list)
    acknowledged: dict[str, float] = field(default_factory=dict)
    ends: list[episode_pb2.Episode] = field(default_factory=list)
    num_attempts: int = 0
    num_dead: int = 0
    num_fenced: int = 0
    num_twice: int = 0
    duration_s: float = 0.0
    first_claims_s: float = 0.0

    def check(self, num_episodes: int) -> None:
        """Compare what was acknowledged with what is kept.

        Raises:
            AssertionError: If an episode is lost, counted twice, or worth something else.
        """
        names = [episode.name for episode in self.ends]
        revisions = [episode.revision for episode in self.ends]
        assert len(names) == len(set(names)) == num_episodes, "an episode ended twice, or never"
        assert revisions == sorted(set(revisions)), "ends came out of order"
        kept = {episode.name: episode.outcome.reward for episode in self.ends}
        submitted = episode_pb2.Episode.STATE_SUBMITTED
        assert all(episode.state == submitted for episode in self.ends), "an episode was given up"
        assert kept == self.acknowledged, "a submit was lost, or counted though it was refused"


class AgentCrowd:
    """Agents on one queue.

    Args:
        address: Of the coordinator.
        key: Of the project `default`.
        habits: How unreliable they are.
        seed: Decides which agent dies when.
    """

    def __init__(self, address: str, key: str, habits: Habits, *, seed: int = 0) -> None:
        self._address = address
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._habits = habits
        self._random = random.Random(seed)
        self._rewards = itertools.count(1)
        self._outcome = AgentCrowdOutcome()
        self._all_acknowledged = asyncio.Event()
        self._begin_s = 0.0

    async def run(self, num_agents: int, num_episodes: int) -> AgentCrowdOutcome:
        """Register episodes, let agents play them, and return once all have ended."""
        async with self._channel() as channel:
            stub: Any = episode_pb2_grpc.EpisodeServiceStub(channel)
            await self._register(stub, num_episodes)
            async with asyncio.TaskGroup() as tasks:
                self._begin_s = time.perf_counter()
                watch = tasks.create_task(self._watch(stub, num_episodes))
                agents = [
                    tasks.create_task(self._play(number, num_episodes))
                    for number in range(num_agents)
                ]
                # An end may be seen before its submit is answered.
                await asyncio.gather(watch, self._all_acknowledged.wait())
                for agent in agents:
                    agent.cancel()
        self._outcome.duration_s = time.perf_counter() - self._begin_s
        return self._outcome

    def _channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            self._address, options=[("grpc.use_local_subchannel_pool", 1)]
        )

    async def _register(self, stub: Any, num_episodes: int) -> None:
        for first in range(0, num_episodes, 1000):
            request = episode_pb2.CreateEpisodesRequest(
                parent="projects/default",
                request_id=str(uuid.uuid4()),
                episodes=[
                    episode_pb2.Episode(task_id=str(number), max_attempts=_MANY_ATTEMPTS)
                    for number in range(first, min(first + 1000, num_episodes))
                ],
            )
            await stub.CreateEpisodes(request, metadata=self._metadata, timeout=_TIMEOUT_S)

    async def _watch(self, stub: Any, num_episodes: int) -> None:
        ends = self._outcome.ends
        while len(ends) < num_episodes:
            request = episode_pb2.WatchEpisodesRequest(
                parent="projects/default", after_revision=ends[-1].revision if ends else 0
            )
            async for episode in stub.WatchEpisodes(request, metadata=self._metadata):
                ends.append(episode)
                if len(ends) >= num_episodes:
                    break

    async def _play(self, number: int, num_episodes: int) -> None:
        async with self._channel() as channel:
            stub: Any = episode_pb2_grpc.EpisodeServiceStub(channel)
            await channel.channel_ready()
            while True:
                begin_s = time.perf_counter()
                claimed = await self._claim(stub, number)
                if not claimed.HasField("episode"):
                    continue
                if self._outcome.num_attempts < num_episodes:
                    # Until each was claimed once, there is always one that waits.
                    self._outcome.claim_s.append(time.perf_counter() - begin_s)
                self._outcome.num_attempts += 1
                if self._outcome.num_attempts == num_episodes:
                    self._outcome.first_claims_s = time.perf_counter() - self._begin_s
                await self._end(stub, claimed)
                if len(self._outcome.acknowledged) == num_episodes:
                    self._all_acknowledged.set()

    async def _claim(self, stub: Any, number: int) -> episode_pb2.ClaimEpisodeResponse:
        request = episode_pb2.ClaimEpisodeRequest(
            parent="projects/default",
            request_id=str(uuid.uuid4()),
            client_id=f"agent-{number}",
            lease_duration=_duration(self._habits.lease_s),
            timeout=_duration(_WAIT_S),
        )
        answer: episode_pb2.ClaimEpisodeResponse = await stub.ClaimEpisode(
            request, metadata=self._metadata, timeout=_TIMEOUT_S
        )
        return answer

    async def _end(self, stub: Any, claimed: episode_pb2.ClaimEpisodeResponse) -> None:
        habits, draw = self._habits, self._random.random()
        request = episode_pb2.SubmitEpisodeRequest(
            name=claimed.episode.name,
            lease_token=claimed.lease_token,
            outcome=episode_pb2.EpisodeOutcome(reward=float(next(self._rewards))),
        )
        await asyncio.sleep(habits.play_s * self._random.uniform(0.5, 1.5))
        if draw < habits.dying:
            self._outcome.num_dead += 1
            return
        if draw < habits.dying + habits.late:
            await asyncio.sleep(habits.lease_s + _MARGIN_S)
            assert await self._submit(stub, request) is None, "taken after the lease ran out"
            self._outcome.num_fenced += 1
            return
        is_twice = draw < habits.dying + habits.late + habits.twice
        first = await self._submit(stub, request)
        if first is None:
            # This machine was too slow for the lease; refused, so that it must not be counted.
            self._outcome.num_fenced += 1
            return
        if is_twice:
            again = await self._submit(stub, request)
            assert again == first, "a repeated submit was answered in another way"
        assert request.name not in self._outcome.acknowledged, "two submits were acknowledged"
        self._outcome.acknowledged[request.name] = request.outcome.reward
        self._outcome.num_twice += is_twice

    async def _submit(
        self, stub: Any, request: episode_pb2.SubmitEpisodeRequest
    ) -> episode_pb2.Episode | None:
        """Submit, and return the answer, or None if the lease is lost."""
        try:
            answer: episode_pb2.Episode = await stub.SubmitEpisode(
                request, metadata=self._metadata, timeout=_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            status = rpc_status.from_call(error)
            if status is None or decode_status(status).reason != "LEASE_LOST":
                raise
            return None
        return answer


def _duration(seconds: float) -> duration_pb2.Duration:
    message = duration_pb2.Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message
