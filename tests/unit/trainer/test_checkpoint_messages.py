"""Requests about checkpoints are held to what they may say; answers tell all of a task."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import field_mask_pb2

from tinsmith.names import RunName
from tinsmith.rpc.durations import encode_duration
from tinsmith.v1 import checkpoint_pb2
from tinsmith_runtime.errors import AbortedError, InvalidFieldError
from tinsmith_runtime.ledger import (
    CheckpointChanges,
    ExportRecord,
    OperationState,
    StoredFile,
    TaskRecord,
)
from tinsmith_runtime.records import AuditEvent
from tinsmith_runtime.rpc.requests import bind_body, digest_of, encode_time
from tinsmith_trainer.checkpoints.downloads import Source
from tinsmith_trainer.checkpoints.tasks import TaskProgress
from tinsmith_trainer.checkpoints.transfers import CopyWork, ExportWork, ImportWork
from tinsmith_trainer.rpc import checkpoint_codec as codec

NOW_S = 1000.0
RUN = RunName("p", "r")
CHECKPOINT = f"{RUN}/checkpoints/c"
FILE = StoredFile(name="a", size_bytes=3, sha256="0" * 64)
STORE = "file:///store"


def changes(*paths: str, **fields: Any) -> CheckpointChanges:
    mask = field_mask_pb2.FieldMask(paths=paths)
    request = checkpoint_pb2.UpdateCheckpointRequest(update_mask=mask, **fields)
    return codec.decode_changes(request, now_s=NOW_S)


def test_a_change_is_of_what_its_mask_names() -> None:
    labelled = changes("labels", labels={"a": "b"}, ttl=encode_duration(60))
    assert labelled == CheckpointChanges(labels={"a": "b"})
    for path in ("ttl", "expire_time"):
        timed = changes(path, labels={"a": "b"}, ttl=encode_duration(60))
        assert timed == CheckpointChanges(sets_expiry=True, expire_time_s=NOW_S + 60)
        kept = changes(path)
        assert kept == CheckpointChanges(sets_expiry=True, expire_time_s=None)
    both = changes("labels", "expire_time", expire_time=encode_time(NOW_S + 0.5))
    assert both == CheckpointChanges(labels={}, sets_expiry=True, expire_time_s=NOW_S + 0.5)


@pytest.mark.parametrize(
    ("paths", "fields", "field"),
    [
        ((), {}, "update_mask"),
        (("labels", "name"), {}, "update_mask"),
        (("expire_time",), {"expire_time": encode_time(NOW_S)}, "expire_time"),
        (("ttl",), {"ttl": encode_duration(0.5)}, "ttl"),
        (("labels",), {"labels": {"": "b"}}, "labels"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(
    paths: tuple[str, ...], fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidFieldError) as refusal:
        changes(*paths, **fields)
    assert refusal.value.metadata["field"] == field


def test_events_are_asked_for_in_a_window_and_told_whole() -> None:
    request = checkpoint_pb2.ListCheckpointEventsRequest(parent="projects/p", page_token="t")
    query = codec.decode_event_query(request)
    assert (query.project, query.page_size, query.page_token) == ("p", 100, "t")
    assert (query.start_s, query.end_s) == (None, None)
    # A time of 0 is one.
    request.start_time.CopyFrom(encode_time(0))
    request.end_time.CopyFrom(encode_time(7))
    query = codec.decode_event_query(request)
    assert (query.start_s, query.end_s) == (0, 7)
    event = AuditEvent(
        time_s=5.0, action="publish", resource=CHECKPOINT, key_id="k", checkpoint_kind="training"
    )
    told = codec.encode_event(event)
    assert (told.time.seconds, told.action, told.resource) == (5, "publish", CHECKPOINT)
    assert (told.key_id, told.checkpoint_kind) == ("k", "training")


def test_a_stored_task_is_the_work_that_was_asked_for() -> None:
    stored = codec.StoredTasks(STORE)
    copy = checkpoint_pb2.CopyCheckpointRequest(
        parent=str(RUN),
        checkpoint_id="d",
        source_checkpoint=CHECKPOINT,
        labels={"a": "b"},
        ttl=encode_duration(60),
    )
    work = stored.decode_task("copy", "", copy.SerializeToString())
    assert work == CopyWork(f"{RUN}/checkpoints/d", CHECKPOINT, {"a": "b"}, 60.0)
    copy.ClearField("ttl")
    assert codec.decode_copy(copy).ttl_s is None
    for wire, name in (("FORMAT_PEFT", "peft"), ("FORMAT_MERGED", "merged")):
        export = checkpoint_pb2.ExportCheckpointRequest(name=CHECKPOINT, format=wire)  # type: ignore[arg-type]
        found = stored.decode_task("export", "", export.SerializeToString())
        assert found == ExportWork(CHECKPOINT, name)
    with pytest.raises(InvalidFieldError, match="format"):
        codec.decode_export(checkpoint_pb2.ExportCheckpointRequest(name=CHECKPOINT))
    given = checkpoint_pb2.ImportCheckpointRequest(upload="u").SerializeToString()
    assert stored.decode_task("import", CHECKPOINT, given) == ImportWork(CHECKPOINT, "u")


def test_an_upload_is_promised_file_by_file() -> None:
    request_id = str(uuid.uuid4())
    request = checkpoint_pb2.CreateCheckpointUploadRequest(
        request_id=request_id, checkpoint_id="c", labels={"a": "b"}, ttl=encode_duration(60)
    )
    for _ in range(16):
        request.files.add(file="a", size_bytes=3, sha256="0" * 64)
    with bind_body(b"body"):
        upload = codec.decode_upload(RUN, request)
        request.files.add(file="b")
        with pytest.raises(InvalidFieldError, match="at most 16, got 17"):
            codec.decode_upload(RUN, request)
    assert upload.name.endswith(request_id)
    assert (upload.checkpoint, upload.files) == (CHECKPOINT, (FILE,) * 16)
    assert (upload.labels, upload.ttl_s) == ({"a": "b"}, 60)
    assert upload.digest == digest_of(b"body").hex()
    told = codec.encode_upload(replace(upload, files=(FILE,)), {"a": 2})
    assert (told.name, told.checkpoint) == (upload.name, CHECKPOINT)
    assert (told.files[0].file.file, told.files[0].received_bytes) == ("a", 2)


def test_a_download_and_an_export_say_where_their_files_are() -> None:
    told = codec.encode_download("n", [Source(FILE, "u", ""), Source(FILE, "", "t")], 9.0)
    assert (told.name, told.expire_time.seconds) == ("n", 9)
    assert [(each.url, each.token) for each in told.sources] == [("u", ""), ("", "t")]
    assert told.sources[0].file.size_bytes == 3
    record = ExportRecord(
        name="e",
        checkpoint=CHECKPOINT,
        run=str(RUN),
        format="merged",
        folder="f",
        sha256="",
        size_bytes=3,
        files=(FILE,),
        create_time_s=5.0,
        expire_time_s=9.0,
    )
    export = codec.encode_export(record, STORE)
    assert export.format == checkpoint_pb2.CheckpointExport.FORMAT_MERGED
    assert (export.name, export.size_bytes, export.files[0].file) == ("e", 3, "a")
    assert (export.create_time.seconds, export.expire_time.seconds) == (5, 9)
    assert export.manifest_uri.startswith(f"{STORE}/f/")
    encoded = codec.StoredTasks(STORE).encode_made(record)
    assert checkpoint_pb2.CheckpointExport.FromString(encoded) == export


Metadata = checkpoint_pb2.CheckpointTaskMetadata


@pytest.mark.parametrize(
    ("state", "is_running", "told", "result"),
    [
        (OperationState.PENDING, False, Metadata.STATE_QUEUED, None),
        (OperationState.PENDING, True, Metadata.STATE_RUNNING, None),
        (OperationState.SUCCEEDED, False, Metadata.STATE_SUCCEEDED, "response"),
        (OperationState.FAILED, False, Metadata.STATE_FAILED, "error"),
    ],
)
def test_a_task_is_an_operation_as_it_stands(
    state: OperationState, is_running: bool, told: Any, result: str | None
) -> None:
    request_id = str(uuid.uuid4())
    request = checkpoint_pb2.ExportCheckpointRequest(request_id=request_id)
    with bind_body(b"body"):
        task = codec.new_task("export", RUN, CHECKPOINT, request, key_id="k", now_s=5.0)
    assert (task.name, task.run) == (f"{RUN}/operations/export-{request_id}", str(RUN))
    assert (task.digest, task.payload, task.key_id) == (digest_of(b"body"), b"body", "k")
    made = checkpoint_pb2.CheckpointExport(name="e")
    task = replace(
        task,
        state=state,
        finish_time_s=9.0 if result else None,
        result=made.SerializeToString(),
        error=codec.StoredTasks(STORE).encode_error(AbortedError("given up")),
    )
    operation = codec.encode_task(task, TaskProgress(is_running, 1, 3))
    metadata = Metadata()
    assert operation.metadata.Unpack(metadata)
    assert (operation.done, operation.WhichOneof("result")) == (result is not None, result)
    assert (metadata.checkpoint, metadata.kind, metadata.state) == (CHECKPOINT, "export", told)
    assert (metadata.done_bytes, metadata.total_bytes) == (1, 3)
    assert (metadata.submit_time.seconds, metadata.finish_time.seconds) == (5, 9 if result else 0)
    assert metadata.HasField("finish_time") is (result is not None)
    if result == "response":
        found = checkpoint_pb2.CheckpointExport()
        assert operation.response.Unpack(found)
        assert found == made
    if result == "error":
        assert operation.error.message == "given up"


def test_a_task_is_no_other_kind_than_it_is() -> None:
    values = {"run": str(RUN), "checkpoint": CHECKPOINT, "digest": b"", "payload": b""}
    for kind in ("copy", "import"):
        task = TaskRecord(
            name="n", kind=kind, submit_time_s=0.0, state=OperationState.SUCCEEDED, **values
        )
        operation = codec.encode_task(task, TaskProgress())
        assert operation.response.Is(checkpoint_pb2.Checkpoint.DESCRIPTOR)
