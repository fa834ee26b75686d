"""Creating runs and continuing them. Coroutines that run in the background loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping

from google.longrunning import operations_pb2

from tinsmith.errors import InternalError, OperationTimeoutError
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.durations import encode_duration
from tinsmith.rpc.error_codec import decode_status
from tinsmith.training.training_run import TrainingRun
from tinsmith.v1 import models_pb2, scheduler_pb2, trainer_pb2

_LONG_POLL_S = 20.0
_POLL_PAUSE_S = 0.02


async def create_run(
    core: ClientCore,
    base_model: str,
    adapter: models_pb2.AdapterConfig,
    *,
    display_name: str,
    labels: Mapping[str, str],
    run_id: str = "",
) -> TrainingRun:
    """Create a run with initial weights."""
    request = scheduler_pb2.CreateTrainingRunRequest(
        parent=core.session.name,
        request_id=str(uuid.uuid4()),
        base_model=base_model,
        adapter=adapter,
        display_name=display_name,
        labels=dict(labels),
        training_run_id=run_id,
    )
    return TrainingRun(core, await _created(core, request))


async def create_run_from(
    core: ClientCore,
    checkpoint: str,
    *,
    include_optimizer: bool,
    display_name: str,
    labels: Mapping[str, str],
) -> TrainingRun:
    """Create a run with the weights of a checkpoint."""
    request = scheduler_pb2.CreateTrainingRunRequest(
        parent=core.session.name,
        request_id=str(uuid.uuid4()),
        source_checkpoint=checkpoint,
        include_optimizer=include_optimizer,
        display_name=display_name,
        labels=dict(labels),
    )
    # It has an operation already, the load, and a version: it is continued.
    return await _continued(core, await _created(core, request))


async def continue_run(core: ClientCore, name: str) -> TrainingRun:
    """Return a run that exists, by its resource name or id."""
    return await _continued(core, await core.get_run(core.run_name(name)))


async def _continued(core: ClientCore, message: scheduler_pb2.TrainingRun) -> TrainingRun:
    status = await core.transport.call(
        core.trainer_endpoint(message),
        lambda c: c.trainer.GetRunStatus,
        trainer_pb2.GetRunStatusRequest(run=message.name),
    )
    return TrainingRun(core, message, status)


async def _created(
    core: ClientCore, request: scheduler_pb2.CreateTrainingRunRequest
) -> scheduler_pb2.TrainingRun:
    operation = await core.transport.call(
        core.scheduler, lambda c: c.scheduler.CreateTrainingRun, request
    )
    operation = await _wait_created(core, operation)
    if operation.HasField("error"):
        raise decode_status(operation.error)
    run = scheduler_pb2.TrainingRun()
    if not operation.response.Unpack(run):
        raise InternalError(f"{operation.name} ended with a {operation.response.type_url}")
    return run


async def _wait_created(
    core: ClientCore, operation: operations_pb2.Operation
) -> operations_pb2.Operation:
    deadline = time.monotonic() + core.settings.operation_timeout_s
    while not operation.done:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            metadata = scheduler_pb2.CreateTrainingRunMetadata()
            operation.metadata.Unpack(metadata)
            waiting_for = metadata.waiting_for or "nothing"
            raise OperationTimeoutError(
                f"{operation.name} did not finish; the server waits for: {waiting_for}",
                waiting_for=waiting_for,
                remedy=f"it goes on; Client.runs.get({metadata.run!r}) continues it",
            )
        # A server that answers at once instead of waiting is not to be flooded.
        await asyncio.sleep(_POLL_PAUSE_S)
        wait_s = min(_LONG_POLL_S, left_s)
        operation = await core.transport.call(
            core.scheduler,
            lambda c: c.operations.WaitOperation,
            operations_pb2.WaitOperationRequest(
                name=operation.name,
                timeout=encode_duration(wait_s),
            ),
            timeout_s=wait_s + core.settings.call_timeout_s,
        )
    return operation
