"""Newer weights for requests that follow a run: when a request asks, and what it is told."""

from __future__ import annotations

import asyncio

from tests.support.wait import eventually

from tinsmith_engine import WeightVersion
from tinsmith_runtime.errors import VersionNotLoadedError, WorkerUnavailableError
from tinsmith_sampler.requests.sessions import Target
from tinsmith_sampler.weights.live_weights import WeightFollower

RUN = "projects/p/trainingRuns/r"
TARGET = Target("tiny", "", RUN, "trainer:1", "p")
NEVER_S = 1e6


class Weights:
    """A run whose newest version is counted up by tests."""

    def __init__(self) -> None:
        self.version = 1
        self.num_fetches = 0
        self.errors: list[Exception] = []

    async def fetch(self, target: Target) -> WeightVersion:
        assert target == TARGET
        self.num_fetches += 1
        if self.errors:
            raise self.errors.pop(0)
        return WeightVersion(RUN, self.version, self.version)


class Taker:
    def __init__(self) -> None:
        self.versions: list[int] = []
        self.errors: list[Exception] = []

    async def take(self, handle: WeightVersion) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.versions.append(handle.version)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_look_serves_all_that_follow_a_run() -> None:
    weights, takers = Weights(), [Taker(), Taker()]
    follower = WeightFollower(weights.fetch, poll_interval_s=NEVER_S, is_told=True)
    stops = [follower.follow(TARGET, taker.take) for taker in takers]
    await eventually(lambda: all(taker.versions == [1] for taker in takers))
    assert weights.num_fetches == 1
    weights.version = 2
    follower.note_outdated(RUN)
    follower.note_outdated("projects/p/trainingRuns/another")
    await eventually(lambda: all(taker.versions == [1, 2] for taker in takers))
    assert weights.num_fetches == 2
    stops[0]()
    follower.note_outdated(RUN)
    await eventually(lambda: takers[1].versions == [1, 2, 2])
    assert takers[0].versions == [1, 2]
    stops[1]()
    stops[1]()
    follower.note_outdated(RUN)
    await settle()
    assert weights.num_fetches == 3


async def test_a_trainer_elsewhere_is_asked_at_the_rate_alone() -> None:
    weights, taker = Weights(), Taker()
    follower = WeightFollower(weights.fetch, poll_interval_s=NEVER_S, is_told=False)
    stops = [follower.follow(TARGET, taker.take) for _ in range(3)]
    await settle()
    assert weights.num_fetches == 0
    for stop in stops:
        stop()
    often = WeightFollower(weights.fetch, poll_interval_s=0.001, is_told=False)
    stop = often.follow(TARGET, taker.take)
    await eventually(lambda: len(taker.versions) >= 3)
    stop()
    await settle()
    num_fetches = weights.num_fetches
    await asyncio.sleep(0.01)
    assert weights.num_fetches == num_fetches


async def test_a_failure_is_tried_again() -> None:
    weights, taker = Weights(), Taker()
    weights.errors = [WorkerUnavailableError("away"), RuntimeError("a bug")]
    follower = WeightFollower(weights.fetch, poll_interval_s=0.001, is_told=True)
    stop = follower.follow(TARGET, taker.take)
    await eventually(lambda: taker.versions == [1])
    assert weights.num_fetches == 3
    stop()


async def test_a_version_that_was_replaced_meanwhile_is_fetched_anew() -> None:
    weights, taker = Weights(), Taker()
    taker.errors = [VersionNotLoadedError("replaced")]
    follower = WeightFollower(weights.fetch, poll_interval_s=NEVER_S, is_told=True)
    stop = follower.follow(TARGET, taker.take)
    await eventually(lambda: taker.versions == [1])
    assert weights.num_fetches == 2
    stop()


async def test_a_run_can_be_followed_again() -> None:
    weights, first, second = Weights(), Taker(), Taker()
    follower = WeightFollower(weights.fetch, poll_interval_s=NEVER_S, is_told=True)
    follower.follow(TARGET, first.take)()
    stop = follower.follow(TARGET, second.take)
    await eventually(lambda: second.versions == [1])
    assert first.versions == []
    stop()
