"""Protobuf to and from what concerns checkpoints alone: changes, tasks, exports, uploads."""

from __future__ import annotations

from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.message import Message

from tinsmith import names
from tinsmith.rpc.error_codec import encode_status
from tinsmith.v1 import audit_pb2, checkpoint_pb2
from tinsmith_runtime.errors import InvalidFieldError, TinsmithError
from tinsmith_runtime.ledger import (
    CheckpointChanges,
    CheckpointRecord,
    ExportRecord,
    OperationState,
    StoredFile,
    TaskRecord,
)
from tinsmith_runtime.records import AuditEvent
from tinsmith_runtime.rpc.requests import (
    current_body,
    decode_labels,
    decode_name_part,
    decode_page_size,
    decode_time,
    decode_ttl,
    digest_of,
    encode_time,
    parse_name,
)
from tinsmith_runtime.storage.checkpoint_manifests import manifest_uri
from tinsmith_trainer.checkpoints.audit import EventQuery
from tinsmith_trainer.checkpoints.downloads import Source
from tinsmith_trainer.checkpoints.tasks import TaskProgress
from tinsmith_trainer.checkpoints.transfers import CopyWork, ExportWork, ImportWork, Made, TaskWork
from tinsmith_trainer.checkpoints.uploads import Upload
from tinsmith_trainer.rpc import training_codec

_FORMATS = {
    checkpoint_pb2.CheckpointExport.FORMAT_PEFT: "peft",
    checkpoint_pb2.CheckpointExport.FORMAT_MERGED: "merged",
}
_WIRE_FORMATS = {name: wire for wire, name in _FORMATS.items()}
_REQUESTS: dict[str, type[Message]] = {
    "copy": checkpoint_pb2.CopyCheckpointRequest,
    "export": checkpoint_pb2.ExportCheckpointRequest,
    "import": checkpoint_pb2.ImportCheckpointRequest,
}
_RESPONSES: dict[str, type[Message]] = {
    "copy": checkpoint_pb2.Checkpoint,
    "export": checkpoint_pb2.CheckpointExport,
    "import": checkpoint_pb2.Checkpoint,
}
_MUTABLE = ("labels", "expire_time")
_MAX_FILES = 16


def decode_changes(
    request: checkpoint_pb2.UpdateCheckpointRequest, *, now_s: float
) -> CheckpointChanges:
    """Return what a request changes.

    Raises:
        InvalidFieldError: If it changes nothing or something else, or a value is not valid.
    """
    # A mask may name either field of the expiry.
    paths = {"expire_time" if path == "ttl" else path for path in request.update_mask.paths}
    if not paths or not paths <= set(_MUTABLE):
        raise InvalidFieldError("update_mask", f"must name one or more of {', '.join(_MUTABLE)}")
    expire_time_s: float | None = None
    if "expire_time" in paths and request.WhichOneof("expiration") == "ttl":
        expire_time_s = now_s + (decode_ttl(request) or 0.0)
    elif "expire_time" in paths and request.HasField("expire_time"):
        expire_time_s = decode_time(request.expire_time)
        if expire_time_s <= now_s:
            raise InvalidFieldError(
                "expire_time", "must be in the future; delete the checkpoint instead"
            )
    return CheckpointChanges(
        labels=decode_labels(request.labels) if "labels" in paths else None,
        sets_expiry="expire_time" in paths,
        expire_time_s=expire_time_s,
    )


def decode_event_query(request: checkpoint_pb2.ListCheckpointEventsRequest) -> EventQuery:
    """Return which events a request asks for.

    Raises:
        InvalidFieldError: If the parent is no project, or the page too large.
    """
    return EventQuery(
        project=parse_name(names.ProjectName, request.parent, "parent").project,
        page_size=decode_page_size(request.page_size),
        page_token=request.page_token,
        start_s=decode_time(request.start_time) if request.HasField("start_time") else None,
        end_s=decode_time(request.end_time) if request.HasField("end_time") else None,
    )


def encode_event(event: AuditEvent) -> audit_pb2.AuditEvent:
    """Return the message of a management action."""
    return audit_pb2.AuditEvent(
        time=encode_time(event.time_s),
        action=event.action,
        resource=event.resource,
        key_id=event.key_id,
        checkpoint_kind=event.checkpoint_kind,
    )


def decode_copy(request: checkpoint_pb2.CopyCheckpointRequest) -> CopyWork:
    """Return what a copy asks for.

    Raises:
        InvalidFieldError: If a field is not valid.
    """
    source = parse_name(names.CheckpointName, request.source_checkpoint, "source_checkpoint")
    return CopyWork(
        training_codec.decode_checkpoint_id(request.parent, request.checkpoint_id),
        str(source),
        decode_labels(request.labels),
        decode_ttl(request),
    )


def decode_export(request: checkpoint_pb2.ExportCheckpointRequest) -> ExportWork:
    """Return what an export asks for.

    Raises:
        InvalidFieldError: If the format is not one.
    """
    if request.format not in _FORMATS:
        raise InvalidFieldError("format", "must be FORMAT_PEFT or FORMAT_MERGED")
    return ExportWork(request.name, _FORMATS[request.format])


def new_task(
    kind: str, run: names.RunName, checkpoint: str, request: Any, *, key_id: str, now_s: float
) -> TaskRecord:
    """Return the request that is being served, made with a key, as a task.

    Raises:
        InvalidFieldError: If the request id is not valid.
    """
    payload = current_body()
    return TaskRecord(
        name=f"{run}/operations/{kind}-{decode_name_part(request.request_id)}",
        run=str(run),
        kind=kind,
        checkpoint=checkpoint,
        digest=digest_of(payload),
        payload=payload,
        submit_time_s=now_s,
        key_id=key_id,
    )


def decode_upload(
    run: names.RunName, request: checkpoint_pb2.CreateCheckpointUploadRequest
) -> Upload:
    """Return the upload that a request begins.

    Raises:
        InvalidFieldError: If a field is not valid.
    """
    request_id = decode_name_part(request.request_id)
    if len(request.files) > _MAX_FILES:
        raise InvalidFieldError("files", f"must be at most {_MAX_FILES}, got {len(request.files)}")
    upload = names.CheckpointUploadName(run.project, run.run, request_id)
    return Upload(
        name=str(upload),
        checkpoint=training_codec.decode_checkpoint_id(str(run), request.checkpoint_id),
        files=tuple(
            StoredFile(name=file.file, size_bytes=file.size_bytes, sha256=file.sha256)
            for file in request.files
        ),
        labels=decode_labels(request.labels),
        ttl_s=decode_ttl(request),
        digest=digest_of(current_body()).hex(),
    )


def encode_upload(upload: Upload, received: dict[str, int]) -> checkpoint_pb2.CheckpointUpload:
    """Return the message of an upload."""
    return checkpoint_pb2.CheckpointUpload(
        name=upload.name,
        checkpoint=upload.checkpoint,
        files=[
            checkpoint_pb2.CheckpointUpload.Progress(
                file=training_codec.encode_file(file), received_bytes=received[file.name]
            )
            for file in upload.files
        ],
    )


def encode_download(
    name: str, sources: list[Source], expire_time_s: float
) -> checkpoint_pb2.CheckpointDownload:
    """Return the message that says where files are."""
    return checkpoint_pb2.CheckpointDownload(
        name=name,
        sources=[
            checkpoint_pb2.CheckpointDownload.Source(
                file=training_codec.encode_file(source.file), url=source.url, token=source.token
            )
            for source in sources
        ],
        expire_time=encode_time(expire_time_s),
    )


def encode_export(record: ExportRecord, store_uri: str) -> checkpoint_pb2.CheckpointExport:
    """Return the message of an export in the store of this URI."""
    return checkpoint_pb2.CheckpointExport(
        name=record.name,
        format=_WIRE_FORMATS[record.format],
        files=[training_codec.encode_file(file) for file in record.files],
        size_bytes=record.size_bytes,
        manifest_uri=manifest_uri(store_uri, record.folder),
        create_time=encode_time(record.create_time_s),
        expire_time=encode_time(record.expire_time_s),
    )


def encode_task(record: TaskRecord, progress: TaskProgress) -> operations_pb2.Operation:
    """Return the message of a task as it stands."""
    states = checkpoint_pb2.CheckpointTaskMetadata
    state = {
        OperationState.PENDING: (
            states.STATE_RUNNING if progress.is_running else states.STATE_QUEUED
        ),
        OperationState.SUCCEEDED: states.STATE_SUCCEEDED,
        OperationState.FAILED: states.STATE_FAILED,
    }[record.state]
    operation = operations_pb2.Operation(
        name=record.name, done=record.state is not OperationState.PENDING
    )
    operation.metadata.Pack(
        checkpoint_pb2.CheckpointTaskMetadata(
            checkpoint=record.checkpoint,
            kind=record.kind,
            state=state,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
            submit_time=encode_time(record.submit_time_s),
            finish_time=encode_time(record.finish_time_s) if record.finish_time_s else None,
        )
    )
    training_codec.put_outcome(operation, record, _RESPONSES)
    return operation


class StoredTasks:
    """Tasks and their results as the ledger stores them; implements `TaskCodec`.

    Args:
        store_uri: Of the store that results are written to.
    """

    def __init__(self, store_uri: str) -> None:
        self._store_uri = store_uri

    def decode_task(self, kind: str, checkpoint: str, payload: bytes) -> TaskWork:
        """Return the work of a stored request."""
        request: Any = _REQUESTS[kind]()
        request.ParseFromString(payload)
        match kind:
            case "copy":
                return decode_copy(request)
            case "export":
                return decode_export(request)
            case _:
                return ImportWork(checkpoint, request.upload)

    def encode_made(self, made: Made) -> bytes:
        """Return the serialised response."""
        message = (
            training_codec.encode_checkpoint(made, self._store_uri)
            if isinstance(made, CheckpointRecord)
            else encode_export(made, self._store_uri)
        )
        encoded: bytes = message.SerializeToString(deterministic=True)
        return encoded

    def encode_error(self, error: TinsmithError) -> bytes:
        """Return the serialised status."""
        status = encode_status(error, domain=training_codec.DOMAIN)
        encoded: bytes = status.SerializeToString(deterministic=True)
        return encoded
