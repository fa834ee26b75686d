"""A copy that is done twice: no attempt touches files of another, and one set of them stays."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.contract.trainer.test_trainer_shared_ledger import copied
from tests.fakes.trainer_harness import TrainerRig, new_id, response_of
from tests.support.wait import eventually

from tinsmith.v1 import checkpoint_pb2
from tinsmith_runtime.errors import NotFoundError
from tinsmith_runtime.storage.file import FileStore


class HeldCopies:
    """Holds up the first copy of a file until it is let go, and then lets it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go, self.ended = (threading.Event() for _ in range(3))
        copy = FileStore.copy

        def held(store: FileStore, *args: Any) -> None:
            if self.begun.is_set():
                copy(store, *args)
                return
            self.begun.set()
            copy(store, *args)
            self.let_go.wait(120)
            self.ended.set()
            raise NotFoundError("the source is gone")

        monkeypatch.setattr(FileStore, "copy", held)


def folder_of(checkpoint: checkpoint_pb2.Checkpoint) -> Path:
    return Path(checkpoint.manifest_uri.removeprefix("file://")).parent


async def test_an_attempt_that_ends_late_leaves_the_committed_files_alone(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run()
    source = await run.saved("a")
    copies = HeldCopies(monkeypatch)
    request = checkpoint_pb2.CopyCheckpointRequest(
        parent=run.name, checkpoint_id="b", source_checkpoint=source.name, request_id=new_id()
    )
    try:
        operation = await run.call("CopyCheckpoint", request)
        await eventually(copies.begun.is_set)
        # Its thread outlives the task; the next process does it again.
        await rig.restart()
        made = response_of(await run.wait(operation), checkpoint_pb2.Checkpoint())
        before = {path.name for path in folder_of(made).iterdir()}
    finally:
        copies.let_go.set()
    await eventually(copies.ended.is_set)
    wanted = {path.name: path.read_bytes() for path in folder_of(source).glob("*.safetensors")}

    async def is_alone() -> bool:
        await rig.pod.sweep_checkpoints()
        attempts = folder_of(made).parent.iterdir()
        return [path for path in attempts if any(path.iterdir())] == [folder_of(made)]

    await eventually(is_alone)
    assert {path.name for path in folder_of(made).iterdir()} == before
    for name, content in wanted.items():
        assert (folder_of(made) / name).read_bytes() == content


async def test_a_copy_that_failed_leaves_no_files(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run()
    source = await run.saved("a")
    parent = folder_of(source).parent
    copies = HeldCopies(monkeypatch)
    copies.let_go.set()
    assert (await copied(run, source.name, "b")).HasField("error")
    wanted = sorted(folder_of(source).glob("*.safetensors"))

    async def is_tidy() -> bool:
        await rig.pod.sweep_checkpoints()
        return sorted(parent.rglob("*.safetensors")) == wanted

    await eventually(is_tidy)
