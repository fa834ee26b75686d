"""Weights that change while a request decodes: in one process, and from a trainer in another."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from tests.fakes.sampler_harness import (
    BASE_MODEL,
    SamplerRig,
    running_sampler,
    tokens_of,
    versions_of,
)
from tests.support.wait import eventually

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import sampler_pb2
from tinsmith_engine import Engine, LoraConfig, WeightVersion
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import RunNotFoundError

IN_FLIGHT = {"weight_updates": sampler_pb2.WEIGHT_UPDATES_IN_FLIGHT}
LONG = 4000


class FakeLiveRun:
    """A run that is trained on the sampler's own engine."""

    def __init__(self, host: EngineHost) -> None:
        self.name = f"projects/p/trainingRuns/run-{uuid.uuid4().hex[:8]}"
        self._host = host
        self._engine = host.engine(BASE_MODEL)
        self.num_exports = 0
        self.is_away = False

    async def export(self, run: str) -> WeightVersion:
        self.num_exports += 1
        if self.is_away:
            raise RunNotFoundError(f"{run} is away")
        return await self._host.call(self._engine.export, run)

    async def create(self) -> None:
        await self._host.call(self._engine.create_run, self.name, LoraConfig(rank=4, seed=1))
        await self.step(1)

    async def step(self, version: int) -> None:
        """Give the run other weights, as an optimizer step would."""
        await self._host.call(_step, self._engine, self.name, version)

    async def drop(self) -> None:
        await self._host.call(self._engine.drop_run, self.name)

    async def held(self) -> list[int]:
        """Return the versions of the run that are in memory."""
        held = await self._host.call(self._engine.versions.held)
        return [handle.version for handle in held if handle.run == self.name]


def _step(engine: Engine, run: str, version: int) -> None:
    state = engine.export_state(run)
    generator = torch.Generator().manual_seed(version)
    state.tensors["theta"].normal_(std=0.2, generator=generator)
    state.version = version
    engine.import_state(run, state)


@asynccontextmanager
async def live(folder: Path, host: EngineHost) -> AsyncIterator[tuple[SamplerRig, FakeLiveRun]]:
    run = FakeLiveRun(host)
    await run.create()
    try:
        async with running_sampler(folder, host, export_live=run.export) as rig:
            yield rig, run
    finally:
        await run.drop()


async def versions_until(call: Any, version: int) -> list[int]:
    """Read a stream until a token of a version arrives; return the versions of all tokens."""
    found: list[int] = []
    while version not in found:
        found += decode_tensor((await call.read()).piece.versions).tolist()
    return found


async def test_steps_take_effect_between_the_tokens_of_a_live_run(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with live(tmp_path, engine_host) as (rig, run):
        session = rig.session(run=run.name)
        call = rig.stream(session, max_tokens=LONG, extras=IN_FLIGHT)
        pinned = asyncio.ensure_future(rig.sample(session, max_tokens=200, num_samples=2))
        versions = await versions_until(call, 1)
        for version in (2, 3):
            await run.step(version)
            versions += await versions_until(call, version)
        assert versions == sorted(versions)
        assert set(versions) == {1, 2, 3}
        # The version in between is let go; the pinned request keeps its own, or has ended.
        assert set(await run.held()) <= {1, 3}
        call.cancel()
        response = await pinned
        assert versions_of(response) == {1}
        assert response.version == 1
        await eventually(lambda: _holds(run, [3]))


async def _holds(run: FakeLiveRun, versions: list[int]) -> bool:
    return await run.held() == versions


async def test_sample_takes_newer_weights_and_tells_the_newest(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with live(tmp_path, engine_host) as (rig, run):
        session = rig.session(run=run.name)
        probe = rig.stream(session, max_tokens=LONG, extras=IN_FLIGHT)
        await versions_until(probe, 1)
        call = asyncio.ensure_future(
            rig.sample(session, num_samples=2, max_tokens=1000, extras=IN_FLIGHT)
        )
        # Behind the request in the queue of the engine: what follows is in the midst of it.
        await eventually(lambda: _num_holders(run, 3))
        await run.step(2)
        response = await call
        probe.cancel()
        assert versions_of(response) == {1, 2}
        assert response.version == 2
        for sequence in response.sequences:
            versions = decode_tensor(sequence.versions).tolist()
            assert versions == sorted(versions)


async def _num_holders(run: FakeLiveRun, count: int) -> bool:
    versions = run._engine.versions
    newest = await run._host.call(versions.newest, run.name)
    return newest is not None and await run._host.call(versions.num_holders, newest) >= count


async def test_nothing_is_published_while_nothing_changes(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with live(tmp_path, engine_host) as (rig, run):
        session = rig.session(run=run.name)
        response = await rig.sample(session, max_tokens=150, extras=IN_FLIGHT)
        assert (versions_of(response), response.version) == ({1}, 1)
        # For the request, and one look whether the run stepped on before it was followed.
        assert run.num_exports <= 2
        pinned = await rig.sample(session, max_tokens=150)
        assert tokens_of(pinned) == tokens_of(response)


async def test_sampling_goes_on_while_newer_weights_can_not_be_had(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    run = FakeLiveRun(engine_host)
    await run.create()
    async with running_sampler(
        tmp_path, engine_host, export_live=run.export, weight_poll_interval_s=0.01
    ) as rig:
        call = rig.stream(rig.session(run=run.name), max_tokens=LONG, extras=IN_FLIGHT)
        await versions_until(call, 1)
        run.is_away = True
        num_exports = run.num_exports
        await run.step(2)
        await eventually(lambda: run.num_exports > num_exports + 1)
        assert decode_tensor((await call.read()).piece.versions).tolist()[0] == 1
        run.is_away = False
        await versions_until(call, 2)
        call.cancel()
        await eventually(lambda: _holds(run, [2]))
    await run.drop()
    assert await run.held() == []


async def test_newer_weights_of_a_trainer_elsewhere(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with running_sampler(tmp_path, engine_host, weight_poll_interval_s=0.01) as rig:
        run = await rig.export("far", seed=1, version=1)
        session = rig.session(run=run)
        pinned = rig.stream(session, max_tokens=LONG)
        calls = [rig.stream(session, max_tokens=LONG, extras=IN_FLIGHT) for _ in range(2)]
        for call in (*calls, pinned):
            await versions_until(call, 1)
        await rig.export("far", seed=2, version=2)
        for call in calls:
            versions = await versions_until(call, 2)
            assert versions == sorted(versions)
        assert decode_tensor((await pinned.read()).piece.versions).tolist()[0] == 1
        for call in (*calls, pinned):
            call.cancel()
        await eventually(lambda: _is_idle(rig))
        # No request follows any more, so none asks.
        num_exports = rig.trainer.num_exports
        await rig.sample(rig.session(), max_tokens=200)
        assert rig.trainer.num_exports == num_exports


async def _is_idle(rig: SamplerRig) -> bool:
    return await rig.num_active() == 0


async def test_a_checkpoint_and_a_base_model_have_no_newer_weights(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with running_sampler(tmp_path, engine_host, weight_poll_interval_s=0.001) as rig:
        for source in ({}, {"checkpoint": await rig.checkpoint("a", version=4)}):
            session = rig.session(**source)
            plain = await rig.sample(session)
            followed = await rig.sample(session, extras=IN_FLIGHT)
            assert tokens_of(followed) == tokens_of(plain)
            assert versions_of(followed) == {followed.version}
        assert rig.trainer.num_exports == 0
