"""Exported weights whose folder the trainer removes before a sampler has read them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.sampler_harness import SamplerRig, refusal, running_sampler, versions_of

from tinsmith.v1 import trainer_control_pb2
from tinsmith_engine.host import EngineHost

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[SamplerRig]:
    async with running_sampler(tmp_path_factory.mktemp("store"), engine_host) as rig:
        yield rig


async def removed(
    rig: SamplerRig, run_id: str, version: int
) -> trainer_control_pb2.ExportWeightsResponse:
    """Export weights of a run, remove their folder, and return what named them."""
    run = await rig.export(run_id, seed=version, version=version)
    exported = rig.trainer.exported[run]
    shutil.rmtree(Path(exported.manifest_uri.removeprefix("file://")).parent)
    return exported


async def test_removed_weights_are_asked_for_again(rig: SamplerRig) -> None:
    replaced = [await removed(rig, "moving", version) for version in (1, 2)]
    run = await rig.export("moving", seed=3, version=3)
    session = rig.session(run=run)
    rig.trainer.replaced = replaced
    assert versions_of(await rig.sample(session)) == {3}
    assert not rig.trainer.replaced


async def test_weights_that_are_still_named_are_damaged(rig: SamplerRig) -> None:
    await removed(rig, "damaged", 1)
    session = rig.session(run="projects/p/trainingRuns/damaged")
    num_before = rig.trainer.num_exports
    error = await refusal(rig.sample(session))
    assert error.reason == "CHECKPOINT_CORRUPT"
    assert rig.trainer.num_exports == num_before + 2
