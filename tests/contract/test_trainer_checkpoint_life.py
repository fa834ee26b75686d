"""Checkpoints of a trainer beyond save and load: expiry, grants, copies, exports, uploads."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from google.protobuf import duration_pb2, field_mask_pb2
from safetensors.torch import load, save
from tests.fakes.trainer_harness import (
    TIMEOUT_S,
    RunClient,
    TrainerRig,
    edit_ledger,
    error_of,
    new_id,
    query_ledger,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.pod_keys import pod

from tinsmith.v1 import checkpoint_pb2, trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import TinsmithError
from tinsmith_trainer.checkpoints import transfers
from tinsmith_trainer.checkpoints.expiry import TOMBSTONE_S
from tinsmith_trainer.checkpoints.registry import GRACE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
PEFT = checkpoint_pb2.CheckpointExport.FORMAT_PEFT
MERGED = checkpoint_pb2.CheckpointExport.FORMAT_MERGED
WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    data_dir: Path = tmp_path_factory.mktemp("trainer")
    settings = {"max_import_bytes": 2**20, "checkpoint_sweep_interval_s": 3600.0}
    async with running_trainer(data_dir, engine_host, **settings) as rig:
        yield rig


def folder_of(checkpoint: Any) -> Path:
    return Path(checkpoint.manifest_uri.removeprefix("file://")).parent


def ttl(seconds: int) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=seconds)


async def get(run: RunClient, name: str) -> checkpoint_pb2.Checkpoint:
    return await run.call("GetCheckpoint", checkpoint_pb2.GetCheckpointRequest(name=name))


async def reason(call: Any) -> str:
    return (await refusal(call)).reason


async def copy(run: RunClient, source: str, checkpoint_id: str, **fields: Any) -> Any:
    fields = {"request_id": new_id(), **fields}
    request = checkpoint_pb2.CopyCheckpointRequest(
        parent=run.name, source_checkpoint=source, checkpoint_id=checkpoint_id, **fields
    )
    return await run.call("CopyCheckpoint", request)


async def export(run: RunClient, name: str, kind: Any = PEFT, **fields: Any) -> Any:
    fields = {"request_id": new_id(), **fields}
    request = checkpoint_pb2.ExportCheckpointRequest(name=name, format=kind, **fields)
    return await run.call("ExportCheckpoint", request)


async def exported(run: RunClient, name: str, kind: Any = PEFT) -> checkpoint_pb2.CheckpointExport:
    done = await run.wait(await export(run, name, kind))
    return response_of(done, checkpoint_pb2.CheckpointExport())


async def publish(run: RunClient, name: str, *, undo: bool = False) -> checkpoint_pb2.Checkpoint:
    method = "UnpublishCheckpoint" if undo else "PublishCheckpoint"
    return await run.call(method, getattr(checkpoint_pb2, f"{method}Request")(name=name))


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


# Downloads.


async def read_file(run: RunClient, name: str, token: str, offset: int = 0) -> bytes:
    request = checkpoint_pb2.DownloadCheckpointFileRequest(
        name=name, token=token, offset_bytes=offset
    )
    content = b""
    call = run.rig.stub.DownloadCheckpointFile(request, metadata=run.metadata, timeout=TIMEOUT_S)
    async for piece in call:
        assert piece.offset_bytes == offset + len(content)
        content += piece.data
    return content


async def sources(run: RunClient, name: str) -> dict[str, Any]:
    request = checkpoint_pb2.CreateCheckpointDownloadRequest(name=name)
    answer = await run.call("CreateCheckpointDownload", request)
    assert answer.expire_time.seconds > 0
    return {source.file.file: source for source in answer.sources}


async def test_files_are_streamed_from_any_offset(rig: TrainerRig) -> None:
    run = await rig.new_run("download", rank=64)
    saved = await run.saved("a")
    found = await sources(run, saved.name)
    assert set(found) == {SETTINGS, WEIGHTS, "optimizer.safetensors"}
    for name, source in found.items():
        wanted = (folder_of(saved) / name).read_bytes()
        assert (source.url, source.file.size_bytes) == ("", len(wanted))
        assert source.file.sha256 == hashlib.sha256(wanted).hexdigest()
        for offset in (0, 1, len(wanted) // 2, len(wanted)):
            assert await read_file(run, saved.name, source.token, offset) == wanted[offset:]
        for offset in (-1, len(wanted) + 1):
            error = await refusal(_whole(run, saved.name, source.token, offset))
            assert error.metadata["field"] == "offset_bytes"


async def _whole(run: RunClient, *args: Any) -> bytes:
    return await read_file(run, *args)


async def test_a_token_is_good_for_one_file_of_one_checkpoint_for_an_hour(
    rig: TrainerRig,
) -> None:
    run = await rig.new_run("tokens")
    saved = await run.saved("a")
    other = await run.saved("b")
    token = (await sources(run, saved.name))[WEIGHTS].token
    body, _, signature = token.partition(".")
    forged = [
        "",
        ".",
        body,
        f"{body}.",
        f"{body}x.{signature}",
        f"{body}.{signature[:-1]}{'1' if signature.endswith('0') else '0'}",
        f"{body}.\u00e9",
        "x" * 10_000,
    ]
    for wrong in forged:
        error = await refusal(_whole(run, saved.name, wrong))
        assert error.reason == "DOWNLOAD_TOKEN_INVALID", wrong
    assert (await refusal(_whole(run, other.name, token))).reason == "DOWNLOAD_TOKEN_INVALID"
    rig.passed_s += 3601
    assert (await refusal(_whole(run, saved.name, token))).reason == "DOWNLOAD_TOKEN_INVALID"
    token = (await sources(run, saved.name))[WEIGHTS].token
    await run.call("DeleteCheckpoint", checkpoint_pb2.DeleteCheckpointRequest(name=saved.name))
    assert (await refusal(_whole(run, saved.name, token))).code.name == "NOT_FOUND"
    missing = sources(run, f"{other.name}/exports/merged")
    assert (await refusal(missing)).reason == "RESOURCE_NOT_FOUND"


# Uploads.


def described(content: bytes, name: str, **changes: Any) -> checkpoint_pb2.CheckpointFile:
    fields = {
        "file": name,
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        **changes,
    }
    return checkpoint_pb2.CheckpointFile(**fields)


async def begin_upload(run: RunClient, files: list[Any], **fields: Any) -> Any:
    fields = {"request_id": new_id(), "checkpoint_id": "imported", **fields}
    request = checkpoint_pb2.CreateCheckpointUploadRequest(parent=run.name, files=files, **fields)
    return await run.call("CreateCheckpointUpload", request)


async def send(run: RunClient, upload: Any, file: str, offset: int, data: bytes) -> Any:
    request = checkpoint_pb2.UploadCheckpointFileRequest(
        upload=upload.name, file=file, offset_bytes=offset, data=data
    )
    return await run.call("UploadCheckpointFile", request)


async def finish(run: RunClient, upload: Any) -> Any:
    request = checkpoint_pb2.ImportCheckpointRequest(upload=upload.name, request_id=new_id())
    return await run.wait(await run.call("ImportCheckpoint", request))


async def imported(run: RunClient, files: dict[str, bytes], **fields: Any) -> Any:
    """Upload and import files; return the operation at its end."""
    upload = await begin_upload(run, [described(c, n) for n, c in files.items()], **fields)
    for name, content in files.items():
        await send(run, upload, name, 0, content)
    return await finish(run, upload)


def files_of(checkpoint: Any) -> dict[str, bytes]:
    return {name: (folder_of(checkpoint) / name).read_bytes() for name in (SETTINGS, WEIGHTS)}


async def test_an_upload_is_continued_where_it_stopped(rig: TrainerRig) -> None:
    run = await rig.new_run("upload")
    await run.step()
    saved = await run.saved("a")
    files = files_of(saved)
    request_id = new_id()
    wanted = [described(content, name) for name, content in files.items()]
    upload = await begin_upload(run, wanted, request_id=request_id, ttl=ttl(600))
    assert upload.checkpoint == f"{run.name}/checkpoints/imported"
    weights = files[WEIGHTS]
    await send(run, upload, WEIGHTS, 0, weights[:1000])
    error = await refusal(send(run, upload, WEIGHTS, 2000, b"x"))
    assert (error.reason, error.metadata["received_bytes"]) == ("UPLOAD_INCOMPLETE", "1000")
    assert (await refusal(finish(run, upload))).reason == "UPLOAD_INCOMPLETE"
    await send(run, upload, WEIGHTS, 0, weights[:1000])  # a repeated piece
    await rig.restart()
    again = await begin_upload(run, wanted, request_id=request_id, ttl=ttl(600))
    progress = {file.file.file: file.received_bytes for file in again.files}
    assert progress == {SETTINGS: 0, WEIGHTS: 1000}
    await send(run, again, WEIGHTS, 500, weights[500:])  # half of it is there
    await send(run, again, SETTINGS, 0, files[SETTINGS])
    made = response_of(await finish(run, again), checkpoint_pb2.Checkpoint())
    assert (made.kind, made.version) == (checkpoint_pb2.Checkpoint.KIND_SAMPLER, 0)
    assert made.HasField("expire_time")
    assert files_of(made)[WEIGHTS] == weights
    assert await reason(finish(run, again)) == "UPLOAD_NOT_FOUND"  # it was used up
    loaded = await run.wait(await run.load(made.name, include_optimizer=False))
    assert not loaded.HasField("error")


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([], id="none"),
        pytest.param([(WEIGHTS, {})], id="no-settings"),
        pytest.param([(SETTINGS, {}), ("adapter_model.bin", {})], id="pickle"),
        pytest.param([(SETTINGS, {}), (f"../{WEIGHTS}", {})], id="traversal"),
        pytest.param([(SETTINGS, {}), (f"/etc/{WEIGHTS}", {})], id="absolute"),
        pytest.param([(SETTINGS, {}), (WEIGHTS, {}), (WEIGHTS, {})], id="twice"),
        pytest.param([(SETTINGS, {}), (WEIGHTS, {}), ("x.py", {})], id="more"),
        pytest.param([(SETTINGS, {}), (WEIGHTS, {"size_bytes": 0})], id="empty"),
        pytest.param([(SETTINGS, {}), (WEIGHTS, {"size_bytes": -1})], id="negative"),
        pytest.param([(SETTINGS, {}), (WEIGHTS, {"size_bytes": 2**62})], id="huge"),
        pytest.param([(SETTINGS, {"size_bytes": 2**20 + 1}), (WEIGHTS, {})], id="large-settings"),
    ],
)
async def test_a_list_of_other_files_is_refused(rig: TrainerRig, files: list[Any]) -> None:
    run = await rig.new_run("lists-of-files")
    wanted = [described(b"abc", name, **changes) for name, changes in files]
    assert await reason(begin_upload(run, wanted)) == "FILE_REFUSED"


async def test_pieces_that_have_no_place_are_refused(rig: TrainerRig) -> None:
    run = await rig.new_run("pieces", project="pieces")
    guest = await rig.new_run("pieces-guest", project="pieces-guest")
    wanted = [described(b"abc", SETTINGS), described(b"x" * 10, WEIGHTS)]
    upload = await begin_upload(run, wanted)
    for file, offset, data, field in [
        ("other", 0, b"x", "file"),
        (f"../{WEIGHTS}", 0, b"x", "file"),
        ("upload.json", 0, b"x", "file"),
        (WEIGHTS, 0, b"x" * 11, "offset_bytes"),
        (WEIGHTS, -1, b"x", "offset_bytes"),
        (WEIGHTS, 2**62, b"x", "offset_bytes"),
        (WEIGHTS, 0, b"", "data"),
    ]:
        error = await refusal(send(run, upload, file, offset, data))
        assert error.metadata["field"] == field
    assert await reason(send(guest, upload, WEIGHTS, 0, b"x")) == "UPLOAD_NOT_FOUND"
    assert await reason(finish(guest, upload)) == "UPLOAD_NOT_FOUND"
    for _ in range(7):
        await begin_upload(run, wanted)
    assert await reason(begin_upload(run, wanted)) == "LIMIT_EXCEEDED"
    rig.passed_s += 24 * 3600 + 60
    await rig.pod.sweep_checkpoints()
    assert await reason(send(run, upload, WEIGHTS, 0, b"x")) == "UPLOAD_NOT_FOUND"
    await begin_upload(run, wanted)


async def test_hostile_and_unfit_adapters_are_refused_by_name(rig: TrainerRig) -> None:
    run = await rig.new_run("hostile")
    good = files_of(await run.saved("a"))
    settings = json.loads(good[SETTINGS])
    tensors = load(good[WEIGHTS])
    name = next(iter(tensors))

    async def error(weights: bytes = good[WEIGHTS], **changes: Any) -> TinsmithError:
        files = {SETTINGS: json.dumps(settings | changes).encode(), WEIGHTS: weights}
        return error_of(await imported(run, files))

    found = await error(b"\x80\x04\x95" + b"x" * 100)
    assert (found.reason, "pickle" in found.message) == ("FILE_REFUSED", True)
    assert (await error((2**60).to_bytes(8, "little") + b"{}")).reason == "FILE_REFUSED"
    assert (await error(good[WEIGHTS][:-4])).reason == "FILE_REFUSED"
    found = await error(modules_to_save=["lm_head"])
    assert (found.reason, found.metadata["setting"]) == ("ADAPTER_UNSUPPORTED", "modules_to_save")
    found = await error(save(tensors | {name: torch.zeros(3, 3)}))
    assert (found.reason, found.metadata["tensor"]) == ("CHECKPOINT_INCOMPATIBLE", name)
    # What was announced is not what was sent.
    upload = await begin_upload(
        run,
        [described(good[SETTINGS], SETTINGS), described(good[WEIGHTS], WEIGHTS, sha256="0" * 64)],
    )
    for file, content in good.items():
        await send(run, upload, file, 0, content)
    assert error_of(await finish(run, upload)).reason == "FILE_REFUSED"
    done = await imported(run, good, checkpoint_id="a")
    assert error_of(done).reason == "CHECKPOINT_ALREADY_EXISTS"
    assert (await imported(run, good)).HasField("response")
    assert not list((rig.config.data_dir / "scratch").iterdir())


async def test_a_task_of_a_fenced_run_leaves_no_row(rig: TrainerRig) -> None:
    run = await rig.new_run("fenced-task")
    saved = await run.saved("a")
    await rig.restart()
    edit_ledger(rig.config.data_dir, "UPDATE leases SET epoch = 9 WHERE run = ?", run.name)
    operation = await copy(run, saved.name, "b")
    await asyncio.gather(*rig.pod._tasks._running.values())
    assert not (await run.wait(operation, 0.01)).done
    query = "SELECT name FROM checkpoints WHERE run = ?"
    assert query_ledger(rig.config.data_dir, query, run.name) == [(saved.name,)]
    edit_ledger(rig.config.data_dir, "UPDATE leases SET epoch = 1 WHERE run = ?", run.name)
