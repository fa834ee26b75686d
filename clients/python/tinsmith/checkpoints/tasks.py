"""Where a checkpoint is answered for, and how the server's work on one is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from google.longrunning import operations_pb2

from tinsmith import names
from tinsmith.errors import InternalError, OperationTimeoutError
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.durations import encode_duration
from tinsmith.rpc.error_codec import decode_status
from tinsmith.rpc.transport import Endpoint
from tinsmith.training.run_catalog import all_runs
from tinsmith.v1 import checkpoint_pb2, scheduler_pb2

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Told how many bytes are done and how many there are, 0 while that is not known."""

_ACTIVE = scheduler_pb2.TrainingRun.STATE_ACTIVE
_MOVING = scheduler_pb2.TrainingRun.STATE_MOVING

_LONG_POLL_S = 20.0
_PROGRESS_POLL_S = 0.5
_POLL_PAUSE_S = 0.02


async def checkpoint_endpoints(core: ClientCore) -> list[Endpoint]:
    """Return where the checkpoints of the project's runs are listed, each address once."""
    endpoints: dict[str, Endpoint] = {}
    for message in await all_runs(core):
        is_known = message.checkpoint_address or message.state == _ACTIVE
        if is_known and message.state in (_ACTIVE, _MOVING):
            endpoint = core.checkpoints_endpoint(message)
            endpoints[endpoint.address] = endpoint
    return list(endpoints.values())


async def endpoint_of(core: ClientCore, checkpoint: str) -> Endpoint:
    """Return where a checkpoint is answered for, of this project or published by another."""
    name = names.CheckpointName.parse(checkpoint)
    if name.project == core.settings.project:
        run = await core.get_run(str(name.run_name))
        if run.trainer_address:
            return core.trainer_endpoint(run)
    # Of another project, or of a run without a holder: trainers that share its ledger know it.
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
        metadata = checkpoint_pb2.CheckpointTaskMetadata()
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
            operations_pb2.WaitOperationRequest(
                name=operation.name, timeout=encode_duration(wait_s)
            ),
            timeout_s=wait_s + core.settings.call_timeout_s,
        )
    if operation.HasField("error"):
        raise decode_status(operation.error)
    result: Any = message
    if not operation.response.Unpack(result):
        raise InternalError(f"{operation.name} ended with a {operation.response.type_url}")
    return message
