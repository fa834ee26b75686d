"""What became of a future.

A future of an operation is waited for at the trainer that keeps it. Some ends need one more step,
which is done on the first retrieval and may be repeated. A sampling client gets a handle on what
was saved for it; weights for other tools are exported; what was overwritten is removed.
"""

from __future__ import annotations

import logging
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.message import Message
from google.rpc import status_pb2
from starlette.responses import JSONResponse, Response

from tinsmith.names import CheckpointName
from tinsmith.rpc.error_codec import decode_status
from tinsmith.v1 import checkpoint_pb2, scheduler_pb2, trainer_pb2
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.tinker.account import downloads
from tinsmith_gateway.tinker.promises import futures
from tinsmith_gateway.tinker.promises.future_store import FutureRecord, FutureStore
from tinsmith_gateway.tinker.promises.futures import OperationFuture
from tinsmith_gateway.tinker.sampling.sample_futures import Samples
from tinsmith_gateway.tinker.sampling.sample_routes import create_sampling_session
from tinsmith_gateway.tinker.wire import bodies, ids, rendering, training_codec
from tinsmith_gateway.tinker.wire.contract_calls import Native, user_native
from tinsmith_runtime.errors import ErrorCode, InternalError, InvalidFieldError, TinsmithError

logger = logging.getLogger(__name__)

_INLINE_BYTES = 2**20
"""A larger result is announced by its size first, for a client that wants to make room."""
_WAITING_STATES = frozenset(
    {trainer_pb2.OperationMetadata.STATE_HELD, trainer_pb2.OperationMetadata.STATE_QUEUED}
)


class Retrieval:
    """The endpoint of results.

    Args:
        store: Futures that no other pod keeps.
        samples: Draws in the background.
        long_poll_s: How long a future is waited for.
    """

    def __init__(
        self,
        store: FutureStore,
        samples: Samples,
        *,
        long_poll_s: float,
    ) -> None:
        self._store = store
        self._samples = samples
        self._long_poll_s = long_poll_s

    async def retrieve(self, call: Call) -> Response:
        """Return the result of a future, its failure, or what it waits for."""
        body = await call.parse(bodies.RetrieveFuture)
        native = user_native(call)
        operation = OperationFuture.parse(body.request_id)
        if operation is None:
            return await self._retrieve_kept(native, body)
        return await self._retrieve_operation(native, operation, body)

    async def _retrieve_kept(self, native: Native, body: bodies.RetrieveFuture) -> Response:
        found = await self._samples.wait(native.project, body.request_id, self._long_poll_s)
        if isinstance(found, str):
            return rendering.try_again(body.request_id, waiting_for=found, is_queued=bool(found))
        if found is None:
            return rendering.gone(
                f"the future {body.request_id} is not known: its result was kept as long as "
                "promised, or it was never given out"
            )
        return self._render_kept(found, body)

    def _render_kept(self, record: FutureRecord, body: bodies.RetrieveFuture) -> Response:
        if record.error is not None:
            self._store.note_retrieved(record.project, record.future)
            return rendering.failed(record.error)
        result = record.result or b""
        if body.allow_metadata_only and len(result) > _INLINE_BYTES:
            return rendering.metadata_only(len(result))
        self._store.note_retrieved(record.project, record.future)
        return rendering.protobuf(result)

    async def _retrieve_operation(
        self, native: Native, future: OperationFuture, body: bodies.RetrieveFuture
    ) -> Response:
        try:
            operation = await native.wait(future.name(native.project), self._long_poll_s)
        except TinsmithError as error:
            if error.reason == "OPERATION_EXPIRED":
                return rendering.gone(error.message)
            if error.code is ErrorCode.UNAVAILABLE:
                # The run is on its way to another trainer; it is still promised.
                return rendering.try_again(
                    body.request_id, waiting_for=error.message, is_queued=True
                )
            raise
        if not operation.done:
            waiting_for, is_queued = _waiting(operation)
            return rendering.try_again(
                body.request_id, waiting_for=waiting_for, is_queued=is_queued
            )
        if operation.HasField("error"):
            return await self._fail(native, body.request_id, operation.error)
        answer = await self._answer(native, future, operation)
        if isinstance(answer, bytes):
            if body.allow_metadata_only and len(answer) > _INLINE_BYTES:
                return rendering.metadata_only(len(answer))
            return rendering.protobuf(answer)
        if answer is None:
            return rendering.try_again(
                body.request_id, waiting_for="the export of what was saved", is_queued=False
            )
        return JSONResponse(answer)

    async def _fail(self, native: Native, request_id: str, status: status_pb2.Status) -> Response:
        error = decode_status(status)
        if error.code is ErrorCode.INVALID_ARGUMENT:
            # It may be a request that only used up the number of one that was refused before.
            refusal = await self._store.get(native.project, request_id)
            if refusal is not None and refusal.error is not None:
                error = refusal.error
        return rendering.failed(error)

    async def _answer(
        self, native: Native, future: OperationFuture, operation: operations_pb2.Operation
    ) -> bytes | dict[str, Any] | None:
        """Return protobuf or JSON of what an operation gave; None while a further step lasts."""
        model_id = ids.model_id_of(future.run_id)
        match future.kind:
            case futures.FORWARD_BACKWARD:
                return await native.aside(_encode_output, operation)
            case futures.OPTIM_STEP:
                step = trainer_pb2.OptimStepResponse()
                _unpack(operation, step)
                return {"metrics": dict(step.metrics), "type": "optim_step"}
            case futures.LOAD_WEIGHTS:
                _unpack(operation, trainer_pb2.LoadCheckpointResponse())
                return {"type": "load_weights", "model_id": model_id}
            case futures.CREATE_MODEL:
                _unpack(operation, scheduler_pb2.TrainingRun())
                return {"type": "create_model", "model_id": model_id}
            case futures.CREATE_FROM_WEIGHTS:
                _unpack(operation, scheduler_pb2.TrainingRun())
                return {"type": "load_weights", "model_id": model_id}
        checkpoint = checkpoint_pb2.Checkpoint()
        _unpack(operation, checkpoint)
        return await self._saved(native, future, checkpoint)

    async def _saved(
        self, native: Native, future: OperationFuture, checkpoint: checkpoint_pb2.Checkpoint
    ) -> dict[str, Any] | None:
        path = ids.path_of(checkpoint)
        match future.kind:
            case futures.SAVE_WEIGHTS:
                await _remove_older(native, path, checkpoint)
                return {"type": "save_weights", "path": str(path)}
            case futures.SAVE_FOR_SAMPLER:
                return {"type": "save_weights_for_sampler", "path": str(path)}
            case futures.SNAPSHOT_CLIENT | futures.INFLIGHT_CLIENT:
                handle = await _client_handle(native, future, checkpoint)
                return {"type": "save_weights_for_sampler", "sampling_session_id": handle}
            case futures.SAVE_EXTERNAL:
                export = await downloads.export(native, checkpoint, self._long_poll_s)
                if export is None:
                    return None
                return {
                    "type": "save_weights_external",
                    "path": str(path),
                    "size_bytes": export.size_bytes,
                }
        raise InternalError(f"{future.kind} is no save")


def _unpack(operation: operations_pb2.Operation, response: Message) -> None:
    """Read the response of an operation.

    Raises:
        InvalidFieldError: If it is of another kind, as that of a future which was made up.
    """
    if not operation.response.Unpack(response):
        raise InvalidFieldError("request_id", "was not given out here: it is of another kind")


def _encode_output(operation: operations_pb2.Operation) -> bytes:
    # Both responses have the same fields.
    response: trainer_pb2.ForwardResponse | trainer_pb2.ForwardBackwardResponse
    response = trainer_pb2.ForwardBackwardResponse()
    if not operation.response.Unpack(response):
        response = trainer_pb2.ForwardResponse()
        _unpack(operation, response)
    output = training_codec.encode_output(response.outputs, dict(response.metrics))
    return output.SerializeToString()


def _waiting(operation: operations_pb2.Operation) -> tuple[str, bool]:
    """Return what an operation waits for, and whether something stands in its way."""
    metadata = trainer_pb2.OperationMetadata()
    if operation.metadata.Unpack(metadata):
        return metadata.waiting_for, metadata.state in _WAITING_STATES
    creation = scheduler_pb2.CreateTrainingRunMetadata()
    if operation.metadata.Unpack(creation):
        return creation.waiting_for, bool(creation.waiting_for)
    return "", False


async def _client_handle(
    native: Native, future: OperationFuture, checkpoint: checkpoint_pb2.Checkpoint
) -> str:
    """Open the handle of a sampling client: on what was saved, or on the live run behind it."""
    run = await native.run(ids.model_id_of(future.run_id))
    request = scheduler_pb2.CreateSamplingSessionRequest()
    if future.kind == futures.INFLIGHT_CLIENT:
        # The save put the handle behind every call before it: the run is at least as new.
        request.run = run.name
    else:
        request.checkpoint = checkpoint.name
    session_id = run.session.rpartition("/")[2]
    number = future.number if future.number is not None else int(future.operation)
    name = await create_sampling_session(native, session_id, number, request)
    return name.rpartition("/")[2]


async def _remove_older(
    native: Native, path: ids.TinkerPath, checkpoint: checkpoint_pb2.Checkpoint
) -> None:
    """Delete what a save under the same name made before, now that the new one is there."""
    run = str(CheckpointName.parse(checkpoint.name).run_name)
    if not ids.is_overwriting(checkpoint.name):
        return
    for older in ids.all_matches(path, await native.checkpoints(run)):
        if older.sequence_number < checkpoint.sequence_number:
            request = checkpoint_pb2.DeleteCheckpointRequest(name=older.name)
            try:
                await native.checkpoint_service(
                    "DeleteCheckpoint", request, checkpoint_pb2.DeleteCheckpointResponse
                )
            except TinsmithError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
