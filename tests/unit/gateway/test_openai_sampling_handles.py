"""Sampling sessions are made when they are needed, shared, kept while in use, and bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tinsmith.v1 import scheduler_pb2
from tinsmith_gateway.access.authentication import Credential
from tinsmith_gateway.openai.sampling_handles import SamplingHandles
from tinsmith_gateway.openai.text.model_names import BaseModel, Checkpoint, LatestWeights
from tinsmith_runtime.errors import (
    ModelNotFoundError,
    RunNotFoundError,
    SessionFinishedError,
    TinsmithError,
    WorkerUnavailableError,
)
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.rpc.permissions import KeyRole

CREDENTIAL = Credential(Caller("p", KeyRole.MEMBER, "k"), (), "key")


class FakeUpstream:
    """A scheduler that knows the base models `a` to `z` and no run."""

    def __init__(self, *, interval_s: float = 1000.0) -> None:
        self.calls: Counter[str] = Counter()
        self.interval_s = interval_s
        self.ended: set[str] = set()
        self.failures: list[TinsmithError] = []
        self.heartbeat = asyncio.Event()

    async def call(
        self, service: str, method: str, request: Any, response: type[Any], credential: Any
    ) -> Any:
        await asyncio.sleep(0)
        self.calls[method] += 1
        if self.failures:
            raise self.failures.pop()
        if method == "CreateSession":
            session = scheduler_pb2.Session(name=f"projects/p/sessions/{self.calls[method]}")
            session.heartbeat_interval.FromNanoseconds(int(self.interval_s * 1e9))
            return session
        name = request.session if method == "HeartbeatSession" else request.parent
        if name in self.ended:
            raise SessionFinishedError("ended")
        if method == "HeartbeatSession":
            self.heartbeat.set()
            return scheduler_pb2.Session(name=name)
        if request.run:
            raise RunNotFoundError("no such run")
        if len(request.base_model) != 1:
            raise ModelNotFoundError("no such model")
        return scheduler_pb2.SamplingSession(
            name=f"projects/p/samplingSessions/{self.calls[method]}", base_model=request.base_model
        )


def handles(upstream: Any, clock: Any = lambda: 0.0) -> SamplingHandles:
    return SamplingHandles(upstream, clock=clock)


async def name_of(handles: SamplingHandles, *models: str) -> str:
    async with handles.use(CREDENTIAL, [BaseModel(model) for model in models]) as handle:
        return handle.sampling_session


async def test_requests_that_arrive_together_share_one() -> None:
    upstream = FakeUpstream()
    made = handles(upstream)
    names = await asyncio.gather(*(name_of(made, "a") for _ in range(10)))
    assert len(set(names)) == 1
    assert await name_of(made, "b") not in names
    assert upstream.calls == {"CreateSession": 1, "CreateSamplingSession": 2}


async def test_the_first_source_that_exists_is_taken() -> None:
    made = handles(FakeUpstream())
    assert await name_of(made, "absent", "a") == await name_of(made, "a")
    with pytest.raises(ModelNotFoundError):
        async with made.use(CREDENTIAL, [BaseModel("absent"), LatestWeights("absent")]):
            pass


async def test_other_failures_are_not_taken_for_absence() -> None:
    upstream = FakeUpstream()
    made = handles(upstream)
    await name_of(made, "a")
    upstream.failures = [WorkerUnavailableError("away")]
    with pytest.raises(WorkerUnavailableError):
        async with made.use(CREDENTIAL, [Checkpoint("c"), BaseModel("b")]):
            pass


async def test_a_session_that_ended_is_found_out_after_a_pause() -> None:
    now_s = 0.0
    upstream = FakeUpstream(interval_s=10.0)
    made = handles(upstream, lambda: now_s)
    first = await name_of(made, "a")
    now_s = 4.0
    assert await name_of(made, "a") == first
    assert not upstream.calls["HeartbeatSession"]
    upstream.ended.add("projects/p/sessions/1")
    now_s = 6.0
    assert await name_of(made, "a") != first


async def test_a_handle_that_is_forgotten_is_made_anew() -> None:
    made = handles(FakeUpstream())
    async with made.use(CREDENTIAL, [BaseModel("a")]) as handle:
        made.forget(CREDENTIAL, handle)
        assert await name_of(made, "a") != handle.sampling_session


async def test_a_session_is_kept_while_it_is_used_and_no_longer() -> None:
    upstream = FakeUpstream(interval_s=0.002)
    made = handles(upstream)
    async with made.use(CREDENTIAL, [BaseModel("a")]):
        for _ in range(2):
            await asyncio.wait_for(upstream.heartbeat.wait(), 10)
            upstream.heartbeat.clear()
        # A heartbeat that fails is tried again.
        upstream.failures = [WorkerUnavailableError("away")]
        await asyncio.wait_for(upstream.heartbeat.wait(), 10)
    await asyncio.sleep(0)
    (current,) = asyncio.all_tasks() - {task for task in asyncio.all_tasks() if task.done()}
    assert current is asyncio.current_task()


async def test_the_handles_of_a_session_are_bounded() -> None:
    upstream = FakeUpstream()
    made = handles(upstream)
    for number in range(600):
        assert await name_of(made, chr(0x4E00 + number))
    assert upstream.calls["CreateSession"] == 3


async def test_a_key_of_a_pool_shares_nothing_with_the_rest_of_its_project() -> None:
    upstream = FakeUpstream()
    made = handles(upstream)
    bound = Credential(Caller("p", KeyRole.MEMBER, "job", "space.j"), (), "job")
    names = set()
    for credential in (CREDENTIAL, bound):
        async with made.use(credential, [BaseModel("a")]) as handle:
            names.add(handle.sampling_session)
    assert len(names) == 2
    assert upstream.calls["CreateSession"] == 2
