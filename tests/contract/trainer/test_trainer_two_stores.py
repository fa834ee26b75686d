"""Trainers of one ledger with a store each: what is deleted is deleted where it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.trainer.test_trainer_shared_ledger import release
from tests.fakes.scheduler import bearer
from tests.fakes.trainer_harness import RunClient, TrainerRig, refusal, running_trainer
from tests.support.wait import eventually

from tinsmith.v1 import checkpoint_pb2, trainer_control_pb2
from tinsmith_engine.host import EngineHost

_DELETE = trainer_control_pb2.ReleaseRunRequest.MODE_DELETE
_LATER_S = 3600.0


@pytest.fixture
async def near(
    tmp_path: Path, engine_host: EngineHost, postgres_url: str
) -> AsyncIterator[TrainerRig]:
    async with running_trainer(
        tmp_path / "near", engine_host, database_url=postgres_url, worker_name="near"
    ) as rig:
        yield rig


@pytest.fixture
async def far(
    tmp_path: Path, engine_host: EngineHost, postgres_url: str
) -> AsyncIterator[TrainerRig]:
    async with running_trainer(
        tmp_path / "far", engine_host, database_url=postgres_url, worker_name="far"
    ) as rig:
        yield rig


def folder_of(checkpoint: checkpoint_pb2.Checkpoint) -> Path:
    return Path(checkpoint.manifest_uri.removeprefix("file://")).parent


async def swept(rig: TrainerRig) -> None:
    rig.passed_s += _LATER_S
    await rig.pod.sweep_checkpoints()


async def test_a_checkpoint_that_another_store_holds_is_removed_there(
    near: TrainerRig, far: TrainerRig
) -> None:
    run = await near.new_run()
    folder = folder_of(await run.saved("a"))
    name = f"{run.name}/checkpoints/a"
    # Any trainer of the ledger may be asked.
    asked = RunClient(far, run.name, far.scheduler.new_key("p"))
    await asked.call(
        "DeleteCheckpoint",
        checkpoint_pb2.DeleteCheckpointRequest(name=name),
        metadata=bearer(far.scheduler.new_key("p")),
    )
    await swept(far)
    assert folder.exists()
    await swept(near)
    assert not folder.exists()


async def test_an_expired_checkpoint_is_removed_from_the_store_that_holds_it(
    near: TrainerRig, far: TrainerRig
) -> None:
    run = await near.new_run()
    saved = await run.saved("a", ttl={"seconds": 60})
    await swept(far)
    await swept(far)
    assert folder_of(saved).exists()
    await swept(near)
    await swept(near)
    assert not folder_of(saved).exists()


async def test_a_run_that_another_store_holds_is_removed_there(
    near: TrainerRig, far: TrainerRig
) -> None:
    run = await near.new_run()
    folder = folder_of(await run.saved("a"))
    asked = RunClient(far, run.name, far.scheduler.new_key("p"))
    await release(far, asked, _DELETE)
    assert (await refusal(asked.status())).reason == "RUN_NOT_FOUND"
    await swept(far)
    assert folder.exists()
    await swept(near)

    async def is_gone() -> bool:
        return not folder.exists()

    await eventually(is_gone)
