"""Calls on checkpoints that return at once, or wait for the server's own work on them.

Coroutines that run in the background loop. Files go through `tinsmith.checkpoints.files`.
"""

from __future__ import annotations

import asyncio
import datetime
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from google.longrunning import operations_pb2
from google.protobuf import duration_pb2

from tinsmith import names
from tinsmith.errors import (
    ConfigurationError,
    InternalError,
    OperationTimeoutError,
    decode_status,
)
from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.transport import Endpoint
from tinsmith.types import Checkpoint, CheckpointExport
from tinsmith.v1 import scheduler_pb2, trainer_pb2

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Told how many bytes are done and how many there are, 0 while that is not known."""

EXPORT_FORMATS = {
    "peft": trainer_pb2.CheckpointExport.FORMAT_PEFT,
    "merged": trainer_pb2.CheckpointExport.FORMAT_MERGED,
}
_LONG_POLL_S = 20.0
_PROGRESS_POLL_S = 0.5
_POLL_PAUSE_S = 0.02


async def endpoint_of(core: ClientCore, checkpoint: str) -> Endpoint:
    """Return where a checkpoint is answered for, of this project or published by another."""
    name = names.CheckpointName.parse(checkpoint)
    if name.project == core.settings.project:
        run = await core.get_run(str(name.run_name))
        if run.trainer_address:
            return core.trainer_endpoint(run)
    # Of another project, or of a run that nobody holds: who shares its ledger knows it too.
    request = scheduler_pb2.LocateCheckpointRequest(checkpoint=checkpoint)

    async def locate() -> str:
        found = await core.transport.call_once(
            core.scheduler, lambda c: c.scheduler.LocateCheckpoint, request, timeout_s=10
        )
        return found.trainer_address

    found = await core.transport.call(
        core.scheduler, lambda c: c.scheduler.LocateCheckpoint, request
    )
    return Endpoint(found.trainer_address or core.settings.address, locate)


async def get_checkpoint(core: ClientCore, name: str) -> Checkpoint:
    """Return a checkpoint."""
    endpoint = await endpoint_of(core, name)
    request = trainer_pb2.GetCheckpointRequest(name=name)
    answer = await core.transport.call(endpoint, lambda c: c.trainer.GetCheckpoint, request)
    return codec.decode_checkpoint(answer)


async def delete_checkpoint(core: ClientCore, name: str) -> None:
    """Delete a checkpoint and its files."""
    endpoint = await endpoint_of(core, name)
    request = trainer_pb2.DeleteCheckpointRequest(name=name)
    await core.transport.call(endpoint, lambda c: c.trainer.DeleteCheckpoint, request)


async def update_checkpoint(
    core: ClientCore,
    name: str,
    *,
    labels: Mapping[str, str] | None,
    ttl_s: float | None,
    keep: bool,
) -> Checkpoint:
    """Change labels or expiry."""
    if ttl_s is not None and keep:
        raise ConfigurationError("ttl_s and keep exclude each other", remedy="give one of them")
    request = trainer_pb2.UpdateCheckpointRequest(name=name)
    if labels is not None:
        request.update_mask.paths.append("labels")
        request.labels.update(labels)
    if ttl_s is not None or keep:
        request.update_mask.paths.append("expire_time")
    if ttl_s is not None:
        request.ttl.CopyFrom(encode_ttl(ttl_s))
    endpoint = await endpoint_of(core, name)
    answer = await core.transport.call(endpoint, lambda c: c.trainer.UpdateCheckpoint, request)
    return codec.decode_checkpoint(answer)


async def publish_checkpoint(core: ClientCore, name: str) -> Checkpoint:
    """Let every project read a checkpoint by its name."""
    endpoint = await endpoint_of(core, name)
    request = trainer_pb2.PublishCheckpointRequest(name=name)
    answer = await core.transport.call(endpoint, lambda c: c.trainer.PublishCheckpoint, request)
    return codec.decode_checkpoint(answer)


async def unpublish_checkpoint(core: ClientCore, name: str) -> Checkpoint:
    """Take the grant back."""
    endpoint = await endpoint_of(core, name)
    request = trainer_pb2.UnpublishCheckpointRequest(name=name)
    answer = await core.transport.call(endpoint, lambda c: c.trainer.UnpublishCheckpoint, request)
    return codec.decode_checkpoint(answer)


async def copy_checkpoint(
    core: ClientCore,
    source: str,
    run: str,
    name: str,
    *,
    labels: Mapping[str, str],
    ttl_s: float | None,
    progress: Progress | None,
) -> Checkpoint:
    """Copy a checkpoint into a run of this project."""
    parent = await core.get_run(core.run_name(run))
    endpoint = core.trainer_endpoint(parent)
    request = trainer_pb2.CopyCheckpointRequest(
        parent=parent.name,
        request_id=str(uuid.uuid4()),
        source_checkpoint=source,
        checkpoint_id=name,
        labels=dict(labels),
        ttl=None if ttl_s is None else encode_ttl(ttl_s),
    )
    operation = await core.transport.call(endpoint, lambda c: c.trainer.CopyCheckpoint, request)
    message = await wait_task(core, endpoint, operation, trainer_pb2.Checkpoint(), progress)
    return codec.decode_checkpoint(message)


async def export_checkpoint(
    core: ClientCore, name: str, export_format: str, *, progress: Progress | None
) -> CheckpointExport:
    """Write a checkpoint in the layout of other tools."""
    if export_format not in EXPORT_FORMATS:
        raise ConfigurationError(
            f"there is no export format {export_format!r}",
            remedy=f"use one of {', '.join(EXPORT_FORMATS)}",
        )
    endpoint = await endpoint_of(core, name)
    request = trainer_pb2.ExportCheckpointRequest(
        name=name, request_id=str(uuid.uuid4()), format=EXPORT_FORMATS[export_format]
    )
    operation = await core.transport.call(endpoint, lambda c: c.trainer.ExportCheckpoint, request)
    message = await wait_task(core, endpoint, operation, trainer_pb2.CheckpointExport(), progress)
    return codec.decode_export(message)


async def wait_task(
    core: ClientCore,
    endpoint: Endpoint,
    operation: operations_pb2.Operation,
    message: T,
    progress: Progress | None,
) -> T:
    """Wait for a copy, export or import to end, and return its result in `message`."""
    deadline = time.monotonic() + core.settings.operation_timeout_s
    while True:
        metadata = trainer_pb2.CheckpointTaskMetadata()
        operation.metadata.Unpack(metadata)
        if progress is not None and metadata.total_bytes:
            progress(metadata.done_bytes, metadata.total_bytes)
        if operation.done:
            break
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise OperationTimeoutError(
                f"{operation.name} did not finish; it wrote {metadata.done_bytes} of "
                f"{metadata.total_bytes or '?'} bytes",
                remedy="it goes on; look for its checkpoint later",
            )
        # A server that answers at once instead of waiting is not to be flooded.
        await asyncio.sleep(_POLL_PAUSE_S)
        wait_s = min(_LONG_POLL_S if progress is None else _PROGRESS_POLL_S, left_s)
        operation = await core.transport.call(
            endpoint,
            lambda c: c.operations.WaitOperation,
            operations_pb2.WaitOperationRequest(name=operation.name, timeout=encode_ttl(wait_s)),
            timeout_s=wait_s + core.settings.call_timeout_s,
        )
    if operation.HasField("error"):
        raise decode_status(operation.error)
    result: Any = message
    if not operation.response.Unpack(result):
        raise InternalError(f"{operation.name} ended with a {operation.response.type_url}")
    return message


def encode_ttl(seconds: float) -> duration_pb2.Duration:
    """Return a time span."""
    duration = duration_pb2.Duration()
    duration.FromTimedelta(datetime.timedelta(seconds=seconds))
    return duration
