"""Calls of a model, numbered by its client, as operations of its run.

The SDK has used up a number when a call is refused, and goes on with the next one; the trainer
counts what it refuses for good as a failed operation for that reason. A call without a counterpart
in the contract is sent as a request that the trainer refuses, to consume its number; the real error
is kept here. So a wrong call is a failed future, and nothing waits for it in vain.

A run that was made from a checkpoint has used number 1 for that: the numbers of its client are one
behind.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.longrunning import operations_pb2
from starlette.responses import Response

from tinsmith.rpc.channels import MAX_MESSAGE_BYTES
from tinsmith.v1 import trainer_pb2
from tinsmith_gateway.tinker.promises import futures
from tinsmith_gateway.tinker.promises.future_store import REFUSAL, FutureStore
from tinsmith_gateway.tinker.wire import ids
from tinsmith_gateway.tinker.wire.contract_calls import Native
from tinsmith_gateway.tinker.wire.rendering import future
from tinsmith_runtime.errors import (
    BatchTooLargeError,
    ErrorCode,
    RequestIdReusedError,
    TinsmithError,
)
from tinsmith_runtime.observability.logs import bind_log_fields

OrderedRequest = Any
"""One of the five ordered requests of the trainer's contract."""

_MAX_KNOWN_RUNS = 100_000
_ENVELOPE_BYTES = 1024
"""Room for run, number and request id."""
# These say that no operation exists; every other refusal is one.
_NOT_ACCEPTED = frozenset(
    {
        "RUN_NOT_FOUND",
        "RUN_CLOSED",
        "REQUEST_ID_REUSED",
        "SEQUENCE_NUMBER_REUSED",
        "MALFORMED_REQUEST",
    }
)
_NOT_ACCEPTED_CODES = frozenset(
    {
        ErrorCode.UNAUTHENTICATED,
        ErrorCode.PERMISSION_DENIED,
        ErrorCode.UNAVAILABLE,
        ErrorCode.INTERNAL,
        ErrorCode.DEADLINE_EXCEEDED,
    }
)
_UNKNOWN_OUTCOME = frozenset(
    {ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.INTERNAL}
)
"""After these the trainer may have the operation, so the reason of its refusal is kept."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call in the words of the trainer.

    Attributes:
        request: Without run, number and request id.
        kind: What the client asked for, one of `futures`.
        number: Of the sampling session that is to be made of a save; None for none.
    """

    request: OrderedRequest
    kind: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class _KnownRun:
    """What does not change about a run."""

    offset: int
    """How far its numbers are ahead of those of its client."""
    base_model: str


class OrderedCalls:
    """Submits the calls of models."""

    def __init__(self, store: FutureStore) -> None:
        self._store = store
        self._runs: dict[str, _KnownRun] = {}

    async def submit(
        self,
        native: Native,
        model_id: str,
        seq_id: int,
        empty: Prepared,
        prepare: Callable[[str, int], Awaitable[Prepared]],
    ) -> Response:
        """Accept one call and return its future.

        Args:
            native: Calls on behalf of the client.
            model_id: The model.
            seq_id: Number of the call, from 1.
            empty: A call that the trainer refuses, for one that cannot be prepared.
            prepare: Makes the call, given the name of the run and its number there; what it raises
                is the reason of the refusal, unless it may pass.

        Raises:
            TinsmithError: If nothing was accepted.
        """
        run = ids.run_name(native.project, model_id)
        number = seq_id + (await self._known(native, model_id, run)).offset
        bind_log_fields(resource=run)
        is_refused = False
        try:
            prepared = await prepare(run, number)
            _check_size(prepared.request)
        except TinsmithError as error:
            if error.retry_after_s is not None or error.code in _NOT_ACCEPTED_CODES:
                raise
            prepared, is_refused = empty, True
            await self._store.add_ended(
                native.project, str(_future(run, number, prepared)), REFUSAL, error=error
            )
        request = prepared.request
        setattr(request, request.DESCRIPTOR.fields[0].name, run)
        request.sequence_number = number
        request.request_id = ids.request_id(run, number)
        try:
            await _send(native, request)
        except TinsmithError as error:
            # Accepted before, and sent again because the answer was lost: what has changed since,
            # such as a checkpoint that is deleted by now, does not matter to it any more.
            if not is_refused or error.reason != RequestIdReusedError.reason:
                if is_refused and error.code not in _UNKNOWN_OUTCOME:
                    await self._store.discard(native.project, str(_future(run, number, prepared)))
                raise
        return future(str(_future(run, number, prepared)), model_id)

    def base_model(self, project: str, model_id: str) -> str:
        """Return the base model of a model that was submitted to; empty for another."""
        known = self._runs.get(ids.run_name(project, model_id))
        return "" if known is None else known.base_model

    async def _known(self, native: Native, model_id: str, run: str) -> _KnownRun:
        known = self._runs.get(run)
        if known is None:
            found = await native.run(model_id)
            if len(self._runs) >= _MAX_KNOWN_RUNS:
                self._runs.clear()
            offset = 1 if found.source_checkpoint else 0
            known = self._runs[run] = _KnownRun(offset, found.base_model)
        return known


def _future(run: str, number: int, prepared: Prepared) -> futures.OperationFuture:
    run_id = run.rpartition("/")[2]
    return futures.OperationFuture(run_id, str(number), prepared.kind, prepared.number)


def _check_size(request: OrderedRequest) -> None:
    # What the connection refuses, the trainer never sees, and cannot count as refused.
    if request.ByteSize() > MAX_MESSAGE_BYTES - _ENVELOPE_BYTES:
        raise BatchTooLargeError(
            f"the call is larger than {MAX_MESSAGE_BYTES} bytes; send it in parts",
            limit=MAX_MESSAGE_BYTES,
        )


_METHODS = {
    trainer_pb2.ForwardRequest: "Forward",
    trainer_pb2.ForwardBackwardRequest: "ForwardBackward",
    trainer_pb2.OptimStepRequest: "OptimStep",
    trainer_pb2.SaveCheckpointRequest: "SaveCheckpoint",
    trainer_pb2.LoadCheckpointRequest: "LoadCheckpoint",
}


async def _send(native: Native, request: OrderedRequest) -> None:
    try:
        await native.trainer(_METHODS[type(request)], request, operations_pb2.Operation)
    except TinsmithError as error:
        may_pass = error.retry_after_s is not None or error.code in _NOT_ACCEPTED_CODES
        if may_pass or error.reason in _NOT_ACCEPTED:
            raise
        # Refused for good: the operation exists and is failed, as its future will tell.
