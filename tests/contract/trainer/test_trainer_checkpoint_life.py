"""Checkpoints of a trainer beyond save and load: expiry, grants, copies, exports, uploads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import field_mask_pb2
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    TrainerRig,
    edit_ledger,
    error_of,
    new_id,
    query_ledger,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.checkpoint_calls import (
    MERGED,
    SETTINGS,
    WEIGHTS,
    copy,
    export,
    exported,
    folder_of,
    get,
    publish,
    reason,
    ttl,
)
from tests.support.pod_keys import pod

from tinsmith.v1 import checkpoint_pb2, trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_trainer.checkpoints import transfers
from tinsmith_trainer.checkpoints.expiry import TOMBSTONE_S
from tinsmith_trainer.checkpoints.registry import GRACE_S
from tinsmith_trainer.runs.storage_cleanup import READERS_GRACE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    data_dir: Path = tmp_path_factory.mktemp("trainer")
    settings = {"max_import_bytes": 2**20, "checkpoint_sweep_interval_s": 3600.0}
    async with running_trainer(data_dir, engine_host, **settings) as rig:
        yield rig


# Expiry.


async def test_an_expired_checkpoint_is_told_from_one_that_never_was(rig: TrainerRig) -> None:
    run = await rig.new_run("expiry", project="expiry")
    other = await rig.new_run("other", project="elsewhere")
    saved = await run.saved("short", ttl=ttl(60))
    assert 59 < saved.expire_time.seconds - saved.create_time.seconds < 61
    await publish(run, saved.name)
    rig.passed_s += 61
    assert await reason(get(run, saved.name)) == "CHECKPOINT_EXPIRED"
    assert await reason(get(other, saved.name)) == "CHECKPOINT_NOT_FOUND"
    listed = await run.call(
        "ListCheckpoints", checkpoint_pb2.ListCheckpointsRequest(parent=run.name)
    )
    assert not listed.checkpoints
    error = error_of(await run.wait(await run.load(saved.name)))
    assert (error.code.name, error.reason) == ("NOT_FOUND", "CHECKPOINT_EXPIRED")
    assert await reason(publish(run, saved.name)) == "CHECKPOINT_EXPIRED"
    assert await reason(export(run, saved.name)) == "CHECKPOINT_EXPIRED"
    delete = checkpoint_pb2.DeleteCheckpointRequest(name=saved.name)
    assert await reason(run.call("DeleteCheckpoint", delete)) == "CHECKPOINT_EXPIRED"

    await rig.pod.sweep_checkpoints()
    assert folder_of(saved).exists()  # readers of other processes finish
    assert await reason(get(run, saved.name)) == "CHECKPOINT_EXPIRED"
    rig.passed_s += GRACE_S
    await rig.pod.sweep_checkpoints()
    assert not folder_of(saved).exists()
    assert await reason(get(run, saved.name)) == "CHECKPOINT_EXPIRED"
    rig.passed_s += TOMBSTONE_S
    await rig.pod.sweep_checkpoints()
    assert await reason(get(run, saved.name)) == "CHECKPOINT_NOT_FOUND"


async def test_the_name_of_an_expired_checkpoint_is_free(rig: TrainerRig) -> None:
    run = await rig.new_run("reuse")
    first = await run.saved("name", ttl=ttl(10))
    rig.passed_s += 11
    second = await run.saved("name")
    assert await get(run, first.name) == second
    await run.saved("other", ttl=ttl(10))
    rig.passed_s += 11
    done = await run.wait(await copy(run, second.name, "other"))
    assert response_of(done, checkpoint_pb2.Checkpoint()).source_checkpoint == second.name
    rig.passed_s += GRACE_S
    await rig.pod.sweep_checkpoints()
    assert folder_of(second).exists()
    assert not folder_of(first).exists()


async def test_files_that_a_dead_process_left_are_removed(rig: TrainerRig) -> None:
    run = await rig.new_run("left")
    saved = await run.saved("a")
    kept = await run.saved("b")
    # As a kill between the row and the files leaves them.
    await rig.pod._ledger.delete_checkpoint(saved.name, key_id="k", now_s=0.0)
    assert folder_of(saved).exists()
    await rig.restart()
    await rig.pod.sweep_checkpoints()
    assert not folder_of(saved).exists()
    assert folder_of(kept).exists()
    assert query_ledger(rig.config.data_dir, "SELECT * FROM folder_deletions") == []


async def test_a_load_that_reads_is_not_deprived_of_its_files(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinsmith_trainer.checkpoints import registry

    run = await rig.new_run("held")
    await run.step()
    saved = await run.saved("a")
    reading, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    read = registry.checkpoint_manifests.read_checkpoint

    def slow_read(*args: Any, **kwargs: Any) -> Any:
        loop.call_soon_threadsafe(reading.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(TIMEOUT_S)
        return read(*args, **kwargs)

    monkeypatch.setattr(registry.checkpoint_manifests, "read_checkpoint", slow_read)
    load_call = await run.load(saved.name)
    await reading.wait()
    await run.call("DeleteCheckpoint", checkpoint_pb2.DeleteCheckpointRequest(name=saved.name))
    rig.passed_s += READERS_GRACE_S
    await rig.pod.sweep_checkpoints()
    assert folder_of(saved).exists()
    go_on.set()
    assert not (await run.wait(load_call)).HasField("error")
    await rig.pod.sweep_checkpoints()
    assert not folder_of(saved).exists()


@pytest.mark.parametrize("seconds", [0, -5, 20 * 366 * 86_400])
async def test_a_ttl_out_of_range_is_refused(rig: TrainerRig, seconds: int) -> None:
    run = await rig.new_run("ttl")
    assert (await refusal(run.save("a", ttl=ttl(seconds)))).metadata["field"] == "ttl"
    run.next_number -= 1


# Changes and grants.


async def test_labels_and_expiry_are_changed_by_mask(rig: TrainerRig) -> None:
    run = await rig.new_run("change")
    saved = await run.saved("a", labels={"x": "1"}, ttl=ttl(100))

    async def update(*paths: str, **fields: Any) -> checkpoint_pb2.Checkpoint:
        mask = field_mask_pb2.FieldMask(paths=paths)
        request = checkpoint_pb2.UpdateCheckpointRequest(
            name=saved.name, update_mask=mask, **fields
        )
        return await run.call("UpdateCheckpoint", request)

    found = await update("labels", labels={"y": "2"})
    assert (dict(found.labels), found.expire_time) == ({"y": "2"}, saved.expire_time)
    found = await update("expire_time")
    assert not found.HasField("expire_time")
    assert dict(found.labels) == {"y": "2"}
    found = await update("ttl", "labels", ttl=ttl(1000))
    assert found.expire_time.seconds > saved.expire_time.seconds + 800
    assert not found.labels
    for paths, fields, wrong in [
        ((), {}, "update_mask"),
        (("name",), {}, "update_mask"),
        (("expire_time",), {"ttl": ttl(0)}, "ttl"),
        (("expire_time",), {"expire_time": saved.create_time}, "expire_time"),
        (("labels",), {"labels": {str(i): "" for i in range(65)}}, "labels"),
    ]:
        error = await refusal(update(*paths, **fields))
        assert error.metadata["field"] == wrong


async def test_a_published_checkpoint_is_read_by_all_and_changed_by_its_owner(
    rig: TrainerRig,
) -> None:
    run = await rig.new_run("owner", project="owner")
    guest = await rig.new_run("guest", project="guest")
    await run.step()
    saved = await run.saved("a")
    nothing = f"{run.name}/checkpoints/nothing"

    async def outcomes(name: str) -> list[str]:
        """What the guest is told, the name left out."""
        calls = [
            get(guest, name),
            guest.load(name),
            copy(guest, name, "copied"),
            publish(guest, name),
            publish(guest, name, undo=True),
            export(guest, name),
            guest.call("DeleteCheckpoint", checkpoint_pb2.DeleteCheckpointRequest(name=name)),
            guest.call(
                "UpdateCheckpoint",
                checkpoint_pb2.UpdateCheckpointRequest(
                    name=name, update_mask=field_mask_pb2.FieldMask(paths=["labels"])
                ),
            ),
            guest.call(
                "CreateCheckpointDownload",
                checkpoint_pb2.CreateCheckpointDownloadRequest(name=name),
            ),
        ]
        found = []
        for call in calls:
            try:
                await call
            except grpc.aio.AioRpcError as error:
                found.append(f"{error.code().name} {error.details()}".replace(name, "NAME"))
            else:
                found.append("ok")
        return found

    private = await outcomes(saved.name)
    assert private == await outcomes(nothing)
    assert all(outcome.startswith("NOT_FOUND") for outcome in private)
    assert (await publish(run, saved.name)).state == checkpoint_pb2.Checkpoint.STATE_PUBLISHED
    public = await outcomes(saved.name)
    assert public[:3] == ["ok"] * 3
    assert public[3:] == private[3:]
    all_runs = checkpoint_pb2.ListCheckpointsRequest(parent="projects/guest/trainingRuns/-")
    await guest.wait(guest.next_number - 1)
    listed = await guest.call("ListCheckpoints", all_runs)
    assert saved.name not in [checkpoint.name for checkpoint in listed.checkpoints]
    withdrawn = await publish(run, saved.name, undo=True)
    assert withdrawn.state == checkpoint_pb2.Checkpoint.STATE_PRIVATE
    assert await outcomes(saved.name) == private


async def test_a_grant_that_is_withdrawn_before_the_turn_of_a_load_fails_it(
    rig: TrainerRig,
) -> None:
    run = await rig.new_run("granter", project="granter")
    guest = await rig.new_run("loader", project="loader")
    saved = await run.saved("a")
    await publish(run, saved.name)
    with rig.engine_held():
        first = await guest.forward_backward()
        load_call = await guest.load(saved.name)
        await publish(run, saved.name, undo=True)
    await guest.wait(first)
    assert error_of(await guest.wait(load_call)).reason == "CHECKPOINT_NOT_FOUND"


# Copies and exports.


async def test_a_copy_is_a_checkpoint_of_its_own(rig: TrainerRig) -> None:
    run = await rig.new_run("copied-from")
    target = await rig.new_run("copied-to", rank=8)
    await run.step()
    saved = await run.saved("a", labels={"old": "1"})
    request_id = new_id()
    fields: dict[str, Any] = {"request_id": request_id, "labels": {"new": "1"}, "ttl": ttl(500)}
    operation = await copy(target, saved.name, "b", **fields)
    assert operation.name == f"{target.name}/operations/copy-{request_id}"
    made = response_of(await target.wait(operation), checkpoint_pb2.Checkpoint())
    assert made.name == f"{target.name}/checkpoints/b"
    assert (made.files, made.version, made.kind) == (saved.files, saved.version, saved.kind)
    assert (dict(made.labels), made.source_checkpoint) == ({"new": "1"}, saved.name)
    assert made.adapter.lora.rank == 2
    assert made.state == checkpoint_pb2.Checkpoint.STATE_PRIVATE
    # The same request is the same operation; another body is refused.
    assert (await copy(target, saved.name, "b", **fields)).name == operation.name
    assert await reason(copy(target, saved.name, "c", **fields)) == "REQUEST_ID_REUSED"
    taken = await target.wait(await copy(target, saved.name, "b"))
    assert error_of(taken).reason == "CHECKPOINT_ALREADY_EXISTS"
    await run.call("DeleteCheckpoint", checkpoint_pb2.DeleteCheckpointRequest(name=saved.name))
    done = await run.wait(await run.load(made.name))
    assert response_of(done, trainer_pb2.LoadCheckpointResponse()).version == 1
    folders = {path.name for path in folder_of(made).parent.iterdir()}
    assert folders == {folder_of(made).name}  # nothing is left of the copy that failed


async def test_a_copy_of_damaged_files_fails(rig: TrainerRig) -> None:
    run = await rig.new_run("damaged")
    saved = await run.saved("a")
    path = folder_of(saved) / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = await run.wait(await copy(run, saved.name, "b"))
    assert error_of(done).reason == "CHECKPOINT_CORRUPT"
    path.unlink()
    done = await run.wait(await copy(run, saved.name, "b"))
    assert error_of(done).reason == "CHECKPOINT_CORRUPT"


async def test_exports_are_kept_for_a_day_and_go_with_their_checkpoint(rig: TrainerRig) -> None:
    run = await rig.new_run("exports")
    saved = await run.saved("a")
    first = await exported(run, saved.name)
    assert first.name == f"{saved.name}/exports/peft"
    assert {file.file for file in first.files} == {SETTINGS, WEIGHTS}
    rig.passed_s += 3600
    again = await exported(run, saved.name)
    assert again.manifest_uri == first.manifest_uri
    assert again.expire_time.seconds > first.expire_time.seconds
    rig.passed_s += 24 * 3600 + 1
    await rig.pod.sweep_checkpoints()
    rig.passed_s += GRACE_S
    await rig.pod.sweep_checkpoints()
    assert not folder_of(first).exists()
    third = await exported(run, saved.name)
    merged = await exported(run, saved.name, MERGED)
    assert {"config.json", "model.safetensors"} <= {file.file for file in merged.files}
    await run.call("DeleteCheckpoint", checkpoint_pb2.DeleteCheckpointRequest(name=saved.name))
    assert folder_of(third).exists()
    rig.passed_s += READERS_GRACE_S
    await rig.pod.sweep_checkpoints()
    assert not folder_of(third).exists()
    assert not folder_of(merged).exists()


async def test_a_task_that_a_restart_cut_off_is_done_again(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run("cut-off")
    saved = await run.saved("a")
    begun = asyncio.Event()
    do = transfers.CheckpointWork.do

    async def stuck(*args: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(transfers.CheckpointWork, "do", stuck)
    operation = await export(run, saved.name)
    await begun.wait()
    metadata = checkpoint_pb2.CheckpointTaskMetadata()
    standing = await run.wait(operation, 0.01)
    assert standing.metadata.Unpack(metadata)
    assert not standing.done
    assert (metadata.kind, metadata.checkpoint) == ("export", saved.name)
    assert metadata.state == checkpoint_pb2.CheckpointTaskMetadata.STATE_RUNNING
    monkeypatch.setattr(transfers.CheckpointWork, "do", do)
    await rig.restart()
    done = response_of(await run.wait(operation), checkpoint_pb2.CheckpointExport())
    assert folder_of(done).exists()


async def test_a_bug_in_a_task_is_an_internal_error(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run("bug")
    saved = await run.saved("a")

    async def broken(*args: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(transfers.CheckpointWork, "do", broken)
    error = error_of(await run.wait(await export(run, saved.name)))
    assert (error.reason, "ZeroDivision" in error.message) == ("INTERNAL", False)


async def test_tasks_of_a_run_are_another_projects_business_only_if_it_is_theirs(
    rig: TrainerRig,
) -> None:
    run = await rig.new_run("private-task", project="private-task")
    guest = await rig.new_run("nosy", project="nosy")
    operation = await export(run, (await run.saved("a")).name)
    await run.wait(operation)
    guest.name = run.name
    assert await reason(guest.wait(operation)) == "RUN_NOT_FOUND"
    assert await reason(run.get("export-nothing")) == "OPERATION_NOT_FOUND"  # type: ignore[arg-type]
    assert await reason(run.get("unknown-1")) == "INVALID_FIELD"  # type: ignore[arg-type]


async def test_tasks_and_exports_go_with_their_run(rig: TrainerRig) -> None:
    run = await rig.new_run("doomed")
    saved = await run.saved("a")
    await exported(run, saved.name)
    release = trainer_control_pb2.ReleaseRunRequest(
        run=run.name, epoch=1, mode=trainer_control_pb2.ReleaseRunRequest.MODE_DELETE
    )
    await rig.stub.ReleaseRun(release, metadata=pod("scheduler"), timeout=TIMEOUT_S)
    for table in ("checkpoint_tasks", "checkpoint_exports", "checkpoints"):
        query = f"SELECT name FROM {table} WHERE run = ?"
        assert query_ledger(rig.config.data_dir, query, run.name) == []


# Uploads.


async def test_a_task_of_a_fenced_run_leaves_no_row(rig: TrainerRig) -> None:
    run = await rig.new_run("fenced-task")
    saved = await run.saved("a")
    await rig.restart()
    # In use, so that its epoch is known here.
    await run.status()
    edit_ledger(rig.config.data_dir, "UPDATE leases SET epoch = 9 WHERE run = ?", run.name)
    operation = await copy(run, saved.name, "b")
    await asyncio.gather(*rig.pod._tasks._running.values())
    assert not (await run.wait(operation, 0.01)).done
    query = "SELECT name FROM checkpoints WHERE run = ?"
    assert query_ledger(rig.config.data_dir, query, run.name) == [(saved.name,)]
    edit_ledger(rig.config.data_dir, "UPDATE leases SET epoch = 1 WHERE run = ?", run.name)
