"""Limits of the sampler's queue, and what ends a request early: its rows are free at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from tests.fakes.sampler_harness import (
    TIMEOUT_S,
    SamplerRig,
    code_of,
    make_request,
    refusal,
    running_sampler,
    tokens_of,
)
from tests.fakes.scheduler import bearer
from tests.support.metrics import metric
from tests.support.wait import eventually

from tinsmith_engine import Sampler
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import ConfigError
from tinsmith_sampler.config import SamplerConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[SamplerRig]:
    async with running_sampler(tmp_path_factory.mktemp("sampler"), engine_host) as rig:
        yield rig


def waiting_sequences() -> float:
    return metric("tinsmith_sampler_waiting_sequences")


async def test_queue_limit(tmp_path: Path, engine_host: EngineHost) -> None:
    async with running_sampler(tmp_path, engine_host, max_queued_sequences=4, max_samples=4) as rig:
        session = rig.session()
        alone = tokens_of(await rig.sample(session, num_samples=2))
        with rig.engine_held():
            calls = [asyncio.ensure_future(rig.sample(session, num_samples=2)) for _ in range(3)]
            done, waiting = await asyncio.wait(
                calls, timeout=TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            error = await refusal(done.pop())
        assert (code_of(error), error.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert error.retry_after_s
        assert [tokens_of(response) for response in await asyncio.gather(*waiting)] == [alone] * 2
        assert tokens_of(await rig.sample(session, num_samples=2)) == alone


async def test_a_request_must_fit_into_the_queue() -> None:
    with pytest.raises(ConfigError, match="max_samples"):
        SamplerConfig(storage_uri="file:///store", max_samples=5, max_queued_sequences=4)


async def test_more_samples_than_rows(tmp_path: Path, engine_host: EngineHost) -> None:
    async with running_sampler(tmp_path, engine_host, max_concurrent_sequences=3) as narrow:
        drawn = await narrow.sample(narrow.session(), num_samples=10)
    async with running_sampler(tmp_path, engine_host) as wide:
        assert tokens_of(drawn) == tokens_of(await wide.sample(wide.session(), num_samples=10))


@pytest.mark.parametrize("when", ["decoding", "queued"])
async def test_cancel_frees_the_rows(
    tmp_path: Path, engine_host: EngineHost, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    num_steps = 0
    step = Sampler.step

    def counted(sampler: Sampler) -> Any:
        nonlocal num_steps
        num_steps += sampler.has_work
        return step(sampler)

    monkeypatch.setattr(Sampler, "step", counted)
    async with running_sampler(tmp_path, engine_host, max_concurrent_sequences=2) as rig:
        session = rig.session(checkpoint=await rig.checkpoint("a"))
        alone = tokens_of(await rig.sample(session))
        idle = waiting_sequences()

        def ask_for_much() -> Any:
            return rig.sample(session, num_samples=2, max_tokens=4000)

        # It takes both rows for thousands of steps.
        if when == "decoding":
            num_steps = 0
            long = ask_for_much()
            await eventually(lambda: num_steps > 3)
        with rig.engine_held():
            if when == "queued":
                long = ask_for_much()
                await eventually(lambda: waiting_sequences() > idle)
            num_steps = 0
            long.cancel()
            await eventually(lambda: waiting_sequences() == idle)
            short = asyncio.ensure_future(rig.sample(session))
            await eventually(lambda: waiting_sequences() > idle)
        assert tokens_of(await short) == alone
        # The short one needs 8 steps; one step may have begun while the engine was asked to hold.
        assert num_steps < 20
        with pytest.raises(asyncio.CancelledError):
            await long
        assert await rig.num_active() == 0


async def test_cancel_of_a_request_that_is_just_being_taken(
    tmp_path: Path, engine_host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    go_on.set()
    add = Sampler.add

    def slow_add(sampler: Sampler, *args: Any) -> int:
        entered.set()
        go_on.wait(TIMEOUT_S)
        return add(sampler, *args)

    monkeypatch.setattr(Sampler, "add", slow_add)
    async with running_sampler(tmp_path, engine_host) as rig:
        session = rig.session(checkpoint=await rig.checkpoint("a"))
        alone = tokens_of(await rig.sample(session))
        idle = waiting_sequences()
        entered.clear()
        go_on.clear()
        long = rig.sample(session, max_tokens=4000)
        await eventually(entered.is_set)
        long.cancel()
        await eventually(lambda: waiting_sequences() == idle)
        go_on.set()
        # Taken behind the long one and its end.
        assert tokens_of(await rig.sample(session)) == alone
        assert await rig.num_active() == 0


async def test_cancel_of_one_leaves_the_others(rig: SamplerRig) -> None:
    session = rig.session(checkpoint=await rig.checkpoint("shared"))
    alone = tokens_of(await rig.sample(session, num_samples=4, max_tokens=64))
    calls = [
        asyncio.ensure_future(rig.sample(session, num_samples=4, max_tokens=64)) for _ in range(6)
    ]
    await eventually(lambda: _is_active(rig))
    for call in calls[::2]:
        call.cancel()
    kept = await asyncio.gather(*calls[1::2])
    assert [tokens_of(response) for response in kept] == [alone] * 3
    await asyncio.gather(*calls, return_exceptions=True)
    await eventually(lambda: _is_idle(rig))


async def _is_active(rig: SamplerRig) -> bool:
    return await rig.num_active() > 0


async def _is_idle(rig: SamplerRig) -> bool:
    return await rig.num_active() == 0


async def test_deadline_frees_the_rows(tmp_path: Path, engine_host: EngineHost) -> None:
    async with running_sampler(tmp_path, engine_host, max_concurrent_sequences=1) as rig:
        session = rig.session(checkpoint=await rig.checkpoint("a"))
        alone = tokens_of(await rig.sample(session))
        with rig.engine_held(), pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.stub.Sample(
                make_request(session, max_tokens=4000), metadata=bearer(rig.key), timeout=0.1
            )
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert tokens_of(await rig.sample(session)) == alone
        await eventually(lambda: _is_idle(rig))
