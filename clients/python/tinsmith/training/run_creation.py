"""Creating runs and continuing them. Coroutines that run in the background loop."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping

from google.longrunning import operations_pb2
from google.protobuf import field_mask_pb2

from tinsmith.errors import InternalError, OperationTimeoutError
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.durations import encode_duration, encode_optional_duration
from tinsmith.rpc.error_codec import decode_status
from tinsmith.rpc.transport import Endpoint
from tinsmith.text.named_templates import tokenizer_with
from tinsmith.training.run_forms import TrainingRun
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
    history_retention_seconds: float | None = None,
    chat_template: str = "",
) -> TrainingRun:
    """Create a run with initial weights."""
    if chat_template:
        tokenizer = tokenizer_with(await core.get_tokenizer(base_model), chat_template)
        adapter.chat_template = tokenizer.chat_template or ""
        ends = map(tokenizer.token_to_id, tokenizer.turn_ends)
        adapter.stop_token_ids.extend(end for end in ends if end is not None)
    request = scheduler_pb2.CreateTrainingRunRequest(
        parent=core.session.name,
        request_id=str(uuid.uuid4()),
        base_model=base_model,
        adapter=adapter,
        display_name=display_name,
        labels=dict(labels),
        training_run_id=run_id,
        history_retention=encode_optional_duration(history_retention_seconds),
    )
    return TrainingRun(core, await _created(core, request))


async def create_run_from(
    core: ClientCore,
    checkpoint: str,
    *,
    include_optimizer: bool,
    display_name: str,
    labels: Mapping[str, str],
    history_retention_seconds: float | None = None,
) -> TrainingRun:
    """Create a run with the weights of a checkpoint."""
    request = scheduler_pb2.CreateTrainingRunRequest(
        parent=core.session.name,
        request_id=str(uuid.uuid4()),
        source_checkpoint=checkpoint,
        include_optimizer=include_optimizer,
        display_name=display_name,
        labels=dict(labels),
        history_retention=encode_optional_duration(history_retention_seconds),
    )
    # It has an operation already, the load, and a version: it is continued.
    return await continued(core, await _created(core, request))


async def fork_run(
    core: ClientCore,
    source: str,
    step: int,
    *,
    reruns_step: bool = False,
    display_name: str = "",
    labels: Mapping[str, str] | None = None,
    run_id: str = "",
    history_retention_seconds: float | None = None,
) -> scheduler_pb2.TrainingRun:
    """Create a run whose state is that of another one after an optimizer step."""
    request = scheduler_pb2.CreateTrainingRunRequest(
        parent=core.session.name,
        request_id=str(uuid.uuid4()),
        source_run=core.run_name(source),
        source_step=step,
        reruns_step=reruns_step,
        display_name=display_name,
        labels=dict(labels or {}),
        training_run_id=run_id,
        history_retention=encode_optional_duration(history_retention_seconds),
    )
    return await _created(core, request)


async def continue_run(core: ClientCore, name: str) -> TrainingRun:
    """Return a run that exists, by its resource name or id."""
    return await continued(core, await core.get_run(core.run_name(name)))


async def continued(core: ClientCore, message: scheduler_pb2.TrainingRun) -> TrainingRun:
    """Return the handle of a run that may have operations already."""
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
    operation = await wait_done(core, core.scheduler, operation)
    if operation.HasField("error"):
        raise decode_status(operation.error)
    run = scheduler_pb2.TrainingRun()
    if not operation.response.Unpack(run):
        raise InternalError(f"{operation.name} ended with a {operation.response.type_url}")
    return run


async def update_run(
    core: ClientCore, name: str, *, history_retention_seconds: float
) -> scheduler_pb2.TrainingRun:
    """Change how long the past of a run is kept, and return the run."""
    request = scheduler_pb2.UpdateTrainingRunRequest(
        name=name,
        update_mask=field_mask_pb2.FieldMask(paths=["history_retention"]),
        history_retention=encode_duration(history_retention_seconds),
    )
    return await core.transport.call(
        core.scheduler, lambda c: c.scheduler.UpdateTrainingRun, request
    )


async def delete_run(core: ClientCore, name: str) -> None:
    """Delete a run; repeating it succeeds."""
    request = scheduler_pb2.DeleteTrainingRunRequest(name=name)
    await core.transport.call(core.scheduler, lambda c: c.scheduler.DeleteTrainingRun, request)


async def wait_done(
    core: ClientCore, endpoint: Endpoint, operation: operations_pb2.Operation
) -> operations_pb2.Operation:
    """Wait for an operation of a run, or the creation of one, to end.

    Raises:
        OperationTimeoutError: If it takes longer than the client waits; says what it waits for.
    """
    deadline = time.monotonic() + core.settings.operation_timeout_s
    while not operation.done:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            run, waiting_for = _waiting_for(operation)
            raise OperationTimeoutError(
                f"{operation.name} did not finish; the server waits for: {waiting_for}",
                waiting_for=waiting_for,
                remedy=f"it goes on; Client.runs.get({run!r}) continues it",
            )
        # A server that answers at once instead of waiting is not to be flooded.
        await asyncio.sleep(_POLL_PAUSE_S)
        wait_s = min(_LONG_POLL_S, left_s)
        operation = await core.transport.call(
            endpoint,
            lambda c: c.operations.WaitOperation,
            operations_pb2.WaitOperationRequest(
                name=operation.name,
                timeout=encode_duration(wait_s),
            ),
            timeout_s=wait_s + core.settings.call_timeout_s,
        )
    return operation


def _waiting_for(operation: operations_pb2.Operation) -> tuple[str, str]:
    """Return the run of an operation that has not ended, and what it waits for."""
    for message in (scheduler_pb2.CreateTrainingRunMetadata(), trainer_pb2.OperationMetadata()):
        if operation.metadata.Unpack(message):
            return message.run, message.waiting_for or "nothing"
    return operation.name.rpartition("/operations/")[0], "nothing"
