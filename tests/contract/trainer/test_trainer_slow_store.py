"""A store that does not answer holds up what needs it, and no adoption or deletion of a run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.trainer.test_trainer_shared_ledger import release
from tests.fakes.trainer_harness import RunClient, TrainerRig, refusal, running_trainer
from tests.support.wait import eventually

from tinsmith.v1 import trainer_control_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.storage.file import FileStore

_DELETE = trainer_control_pb2.ReleaseRunRequest.MODE_DELETE
_NUM_RUNS = 64


@pytest.fixture
async def rig(
    tmp_path: Path, engine_host: EngineHost, postgres_url: str
) -> AsyncIterator[TrainerRig]:
    async with running_trainer(tmp_path / "data", engine_host, database_url=postgres_url) as rig:
        yield rig


class Hanging:
    """Lets calls of the store wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self.num_waiting = 0
        for name in ("delete_folder", "list_folder"):
            method = getattr(FileStore, name)

            def hung(*args: Any, method: Any = method) -> Any:
                self.num_waiting += 1
                self.let_go.wait(120)
                return method(*args)

            monkeypatch.setattr(FileStore, name, hung)


@pytest.fixture
def hanging(rig: TrainerRig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    made = Hanging(monkeypatch)
    yield made
    made.let_go.set()


async def test_runs_are_adopted_while_the_store_hangs(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[RunClient] = []
    for number in range(_NUM_RUNS):
        run = await rig.new_run(f"run-{number}", seed=number)
        # It waits for the number before it, so that the next trainer has something to take in.
        await run.optim_step(number=2)
        runs.append(run)
    await rig.restart()
    hanging = Hanging(monkeypatch)
    try:
        await asyncio.gather(*(rig.adopt(run.name, epoch=2, seed=0) for run in runs))
        statuses = await asyncio.gather(*(run.status() for run in runs))
        assert [status.num_pending_operations for status in statuses] == [1] * _NUM_RUNS
        await eventually(lambda: hanging.num_waiting)
    finally:
        hanging.let_go.set()


async def test_a_run_is_deleted_while_the_store_hangs(rig: TrainerRig, hanging: Hanging) -> None:
    runs = [await rig.new_run(f"run-{number}") for number in range(4)]
    await asyncio.gather(*(release(rig, run, _DELETE) for run in runs))
    assert (await refusal(runs[0].status())).reason == "RUN_NOT_FOUND"
    other = await rig.new_run("other")
    assert await other.step() == 1


async def test_files_of_a_deleted_run_go_once_the_store_answers(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run()
    saved = await run.saved("a")
    folder = Path(saved.manifest_uri.removeprefix("file://")).parent
    hanging = Hanging(monkeypatch)
    try:
        await release(rig, run, _DELETE)
        assert folder.exists()
    finally:
        hanging.let_go.set()
    await eventually(lambda: not folder.exists())
