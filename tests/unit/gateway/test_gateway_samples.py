"""Samples in the background: given up at any moment, kept across a stop, one project's own."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest
from tests.support.wait import eventually

from tinsmith.tensors import encode_tensor, encode_tokens
from tinsmith.v1 import sampler_pb2, scheduler_pb2, trajectories_pb2
from tinsmith_gateway.access.authentication import Callers, Credential
from tinsmith_gateway.project_threads import ProjectThreads
from tinsmith_gateway.tinker.promises.future_store import FutureStore
from tinsmith_gateway.tinker.promises.usage import HourlyUsage
from tinsmith_gateway.tinker.sampling import sample_futures
from tinsmith_gateway.tinker.sampling.sample_futures import Samples
from tinsmith_gateway.tinker.wire import bodies
from tinsmith_gateway.upstream.pod_client import Upstream
from tinsmith_runtime.errors import (
    QueueFullError,
    StorageUnavailableError,
)
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.rpc.pod_identity import PodRole
from tinsmith_runtime.sql import Database

BODY = bodies.Sample(
    sampling_session_id="s",
    seq_id=0,
    prompt=bodies.ModelInput(chunks=[bodies.TextChunk(tokens=[5, 6])]),
    sampling_params=bodies.SamplingParams(max_tokens=2, seed=1),
)
SESSION = "projects/a/samplingSessions/s"
FUTURE = "sample.s.0"


class SlowSampler:
    """A sampler that draws when it is told to."""

    def __init__(self) -> None:
        self.may_draw = asyncio.Event()
        self.num_calls = self.num_looks = 0
        self.answer = sampler_pb2.SampleResponse()

    async def call(self, _: str, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "GetSamplingSession":
            self.num_looks += 1
            return scheduler_pb2.SamplingSession(base_model="tiny")
        self.num_calls += 1
        await self.may_draw.wait()
        return self.answer


class PodKeys:
    """Makes credentials of no caller."""

    def for_pods(self, project: str, *, charged_key: str = "") -> Credential:
        return Credential(Caller(project, PodRole.GATEWAY, "pod"), (), "")


@pytest.fixture
def sampler() -> SlowSampler:
    return SlowSampler()


def make(database: Database, sampler: SlowSampler) -> Samples:
    return Samples(
        FutureStore(database),
        cast(Upstream, sampler),
        cast(Callers, PodKeys()),
        HourlyUsage(database),
        ProjectThreads(),
    )


async def test_a_sample_is_given_up_before_it_began(
    database: Database, sampler: SlowSampler
) -> None:
    drawn = make(database, sampler)
    await drawn.submit("a", SESSION, FUTURE, BODY, key_id="k")
    async with asyncio.timeout(10):
        await drawn.cancel("a", FUTURE)
    ended = await drawn.wait("a", FUTURE, 1)
    assert not isinstance(ended, str)
    assert ended is not None
    assert "cancelled" in str(ended.error)
    assert sampler.num_calls == 0


async def test_a_sample_is_given_up_many_times_at_once(
    database: Database, sampler: SlowSampler
) -> None:
    drawn = make(database, sampler)
    await drawn.submit("a", SESSION, FUTURE, BODY, key_id="k")
    await eventually(lambda: sampler.num_calls)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(drawn.cancel("a", FUTURE))
            await asyncio.sleep(0)
    ended = await drawn.wait("a", FUTURE, 1)
    assert not isinstance(ended, str)
    assert ended is not None
    assert "cancelled" in str(ended.error)
    # Its place is free, and the same promise is not made again.
    await drawn.submit("a", SESSION, FUTURE, BODY, key_id="k")
    assert sampler.num_calls == 1


async def test_what_a_stop_cut_off_is_drawn_after_the_start(
    database: Database, sampler: SlowSampler
) -> None:
    before = make(database, sampler)
    await before.submit("a", SESSION, FUTURE, BODY, key_id="k")
    await eventually(lambda: sampler.num_calls)
    await before.stop()
    after = make(database, sampler)
    await after.load()
    sampler.may_draw.set()
    ended = await after.wait("a", FUTURE, 10)
    assert not isinstance(ended, str)
    assert ended is not None
    assert ended.result is not None
    assert ended.request == b""
    assert sampler.num_calls == 2
    await after.stop()


async def test_a_promise_belongs_to_its_project(database: Database, sampler: SlowSampler) -> None:
    drawn = make(database, sampler)
    await drawn.submit("a", SESSION, FUTURE, BODY, key_id="k")
    await drawn.submit("b", SESSION, FUTURE, BODY, key_id="k")
    await drawn.cancel("b", FUTURE)
    assert isinstance(await drawn.wait("a", FUTURE, 0), str)
    assert await drawn.wait("c", FUTURE, 0) is None
    sampler.may_draw.set()
    for project, is_drawn in (("a", True), ("b", False)):
        ended = await drawn.wait(project, FUTURE, 10)
        assert not isinstance(ended, str)
        assert ended is not None
        assert (ended.result is not None) is is_drawn


@pytest.mark.parametrize(
    ("limit", "value"), [("_MAX_PENDING_PER_PROJECT", 1), ("_MAX_PENDING_BYTES_PER_PROJECT", 10)]
)
async def test_a_project_that_waits_for_much_is_told_to_come_again(
    database: Database,
    sampler: SlowSampler,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
) -> None:
    monkeypatch.setattr(sample_futures, limit, value)
    drawn = make(database, sampler)
    await drawn.submit("a", SESSION, FUTURE, BODY, key_id="k")
    with pytest.raises(QueueFullError) as refusal:
        await drawn.submit("a", SESSION, "sample.s.1", BODY, key_id="k")
    assert refusal.value.retry_after_s is not None
    # What was promised is promised still, and another project has its own share.
    await drawn.submit("a", SESSION, FUTURE, BODY, key_id="k")
    await drawn.submit("b", SESSION, FUTURE, BODY, key_id="k")
    await drawn.cancel("a", FUTURE)
    await drawn.submit("a", SESSION, "sample.s.1", BODY, key_id="k")
    await drawn.stop()


async def test_the_bytes_of_what_waits_are_filled_to_their_bound(
    database: Database, sampler: SlowSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = "_MAX_PENDING_BYTES_PER_PROJECT"
    drawn = make(database, sampler)
    await drawn.submit("a", SESSION, FUTURE, BODY, key_id="k")
    promised = await FutureStore(database).get("a", FUTURE)
    assert promised is not None
    monkeypatch.setattr(sample_futures, limit, 2 * len(promised.request))
    await drawn.submit("a", SESSION, "sample.s.1", BODY, key_id="k")
    with pytest.raises(QueueFullError, match=f"2 samples .* {2 * len(promised.request)} bytes"):
        await drawn.submit("a", SESSION, "sample.s.2", BODY, key_id="k")
    await drawn.stop()


async def test_what_was_drawn_is_counted_for_its_session_and_model(
    database: Database, sampler: SlowSampler
) -> None:
    usage = HourlyUsage(database)
    drawn = Samples(
        FutureStore(database),
        cast(Upstream, sampler),
        cast(Callers, PodKeys()),
        usage,
        ProjectThreads(),
    )
    sampler.answer = sampler_pb2.SampleResponse(num_cached_prompt_tokens=1)
    for tokens in ([7, 8], [9]):
        sampler.answer.sequences.add(
            tokens=encode_tokens(tokens),
            logprobs=encode_tensor(np.zeros(len(tokens), np.float32)),
            stop_reason=trajectories_pb2.SampledSequence.STOP_REASON_STOP,
        )
    sampler.may_draw.set()
    session = "projects/a/samplingSessions/s-sample-0"
    for number in (0, 1):
        await drawn.submit("a", session, f"sample.s.{number}", BODY, key_id="k")
        await drawn.wait("a", f"sample.s.{number}", 10)
    counted = await usage.read("a", begin_s=0, end_s=1e12)
    assert [(key.session, key.base_model, key.kind, count) for key, count in counted] == [
        ("s", "tiny", "sampling_sample", 6),
        ("s", "tiny", "sampling_prefill", 2),
        ("s", "tiny", "sampling_prefill_cached", 2),
    ]
    # What a session samples from is asked for once.
    assert sampler.num_looks == 1


class FlakyStore(FutureStore):
    """A store whose database is away for the first ends."""

    def __init__(self, database: Database, num_failures: int) -> None:
        super().__init__(database)
        self.num_failures = num_failures

    async def finish(self, project: str, future: str, **end: Any) -> int:
        if self.num_failures:
            self.num_failures -= 1
            raise StorageUnavailableError("the database is away")
        return await super().finish(project, future, **end)


async def test_the_end_of_a_sample_is_kept_once_the_database_is_back(
    database: Database, sampler: SlowSampler
) -> None:
    sampler.may_draw.set()
    store = FlakyStore(database, num_failures=3)
    drawn = Samples(
        store,
        cast(Upstream, sampler),
        cast(Callers, PodKeys()),
        HourlyUsage(database),
        ProjectThreads(),
    )
    await drawn.submit("a", SESSION, FUTURE, BODY, key_id="k")
    ended = await drawn.wait("a", FUTURE, 30)
    assert not isinstance(ended, str)
    assert ended is not None
    assert ended.is_ended
    assert (store.num_failures, sampler.num_calls) == (0, 1)
