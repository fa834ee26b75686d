"""The ordered calls of one run: numbered at once, sent in order, answered as they finish."""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.longrunning import operations_pb2

from tinsmith.errors import (
    ClientClosedError,
    ErrorCode,
    InternalError,
    ResourceExhaustedError,
    RunUndeliverableError,
    TinsmithError,
)
from tinsmith.rpc import codec
from tinsmith.rpc.channels import MAX_MESSAGE_BYTES
from tinsmith.rpc.durations import encode_duration
from tinsmith.rpc.error_codec import decode_status
from tinsmith.rpc.event_loop_thread import BackgroundLoop
from tinsmith.rpc.futures import KnownOutcome, OperationFuture
from tinsmith.rpc.transport import Backoff, Endpoint, Transport, is_away
from tinsmith.v1 import checkpoint_pb2, trainer_pb2

T = TypeVar("T")

OrderedRequest = (
    trainer_pb2.ForwardRequest
    | trainer_pb2.ForwardBackwardRequest
    | trainer_pb2.OptimStepRequest
    | trainer_pb2.SaveCheckpointRequest
    | trainer_pb2.LoadCheckpointRequest
)

_LOG = logging.getLogger(__name__)

_LONG_POLL_S = 20.0
_POLL_PAUSE_S = 0.02
_STRAGGLER_INTERVAL_S = 2.0
_MAX_IN_FLIGHT = 64
_REQUEST_OVERHEAD_BYTES = 4096
EXPIRED_REASON = "OPERATION_EXPIRED"
_CLEARING_REASONS = frozenset({"GRADIENT_INCOMPLETE", "NON_FINITE_LOSS"})


@dataclass(frozen=True, slots=True)
class OrderedCall:
    """What is particular to one kind of operation."""

    kind: str
    method: str
    """Name of the method of `TrainerService`."""
    response: type[Any]
    """The response type."""


FORWARD = OrderedCall("forward", "Forward", trainer_pb2.ForwardResponse)
FORWARD_BACKWARD = OrderedCall(
    "forward_backward", "ForwardBackward", trainer_pb2.ForwardBackwardResponse
)
OPTIM_STEP = OrderedCall("optim_step", "OptimStep", trainer_pb2.OptimStepResponse)
SAVE_CHECKPOINT = OrderedCall("save_checkpoint", "SaveCheckpoint", checkpoint_pb2.Checkpoint)
LOAD_CHECKPOINT = OrderedCall(
    "load_checkpoint", "LoadCheckpoint", trainer_pb2.LoadCheckpointResponse
)
_CALLS = (FORWARD, FORWARD_BACKWARD, OPTIM_STEP, SAVE_CHECKPOINT, LOAD_CHECKPOINT)
_CALL_BY_KIND = {call.kind: call for call in _CALLS}
_CALL_BY_RESPONSE = {call.response.DESCRIPTOR.full_name: call for call in _CALLS}


@dataclass(slots=True)
class _Pending:
    """An operation whose result has not arrived.

    Attributes:
        call: None for one of an earlier client, of which nothing is known but its number.
        request: None for one that an earlier client sent.
    """

    call: OrderedCall | None
    request: OrderedRequest | None
    future: OperationFuture[Any]
    decode: Callable[[Any], Any]
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class _Submitted:
    """An operation with its number, on its way into the background loop."""

    number: int
    pending: _Pending
    call: OrderedCall
    request: OrderedRequest


class OperationStream:
    """Submits the operations of one run and delivers their results.

    `submit`, `resume`, `look_up` and `last_number` may be used from any thread; all else runs in
    the background loop.

    Args:
        background: The client's loop.
        transport: Sends calls.
        endpoint: The trainer of the run.
        run: Name of the run.
        next_sequence_number: Where the run goes on.
        revision: What finished up to this revision is not waited for.
    """

    def __init__(
        self,
        background: BackgroundLoop,
        transport: Transport,
        endpoint: Endpoint,
        run: str,
        *,
        next_sequence_number: int = 1,
        revision: int = 0,
    ) -> None:
        self._background = background
        self._transport = transport
        self._endpoint = endpoint
        self._run = run
        self._lock = threading.Lock()
        self._submitted: collections.deque[_Submitted] = collections.deque()
        self._next_unstarted = next_sequence_number
        # Both are behind the lock: what the caller can know of operations above the mark.
        self._observed_mark = next_sequence_number - 1
        self._outcomes: dict[int, KnownOutcome] = {}
        self._pending: dict[int, _Pending] = {}
        self._looked_up: set[OperationFuture[Any]] = set()
        self._highest_delivered = 0
        self._window = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._resending: set[int] = set()
        self._turn_changed = asyncio.Condition()
        self._broken: TinsmithError | None = None
        self._broken_from = 0
        self._poller: asyncio.Task[None] | None = None
        self._unheard: collections.deque[int] = collections.deque()
        self._hearing: asyncio.Task[None] | None = None
        self._revision = revision
        self._stragglers_at = time.monotonic()

    def submit(
        self, call: OrderedCall, request: OrderedRequest, decode: Callable[[Any], T]
    ) -> OperationFuture[T]:
        """Number an operation and queue it for sending; returns at once.

        Args:
            call: The kind of operation.
            request: Complete but for request id and numbers, which are set here.
            decode: Makes the result from the response message.

        Raises:
            ResourceExhaustedError: If the request is too large to be sent; no number is used.
            ClientClosedError: If the client was closed.
        """
        request.request_id = str(uuid.uuid4())
        size_bytes = request.ByteSize() + _REQUEST_OVERHEAD_BYTES
        if size_bytes > MAX_MESSAGE_BYTES:
            raise ResourceExhaustedError(
                f"the request has {size_bytes} bytes, at most {MAX_MESSAGE_BYTES} can be sent",
                reason="BATCH_TOO_LARGE",
            )
        with self._lock:
            number = self._last_number() + 1
            request.sequence_number = number
            if isinstance(request, trainer_pb2.OptimStepRequest):
                request.observed_sequence_number = self._advance_observed_mark()
            future: OperationFuture[T] = self._new_future(number, call.kind)
            pending = _Pending(call, request, future, decode)
            self._outcomes[number] = future.outcome
            # The one step that uses the number up: a signal's exception (Ctrl-C) strikes before or
            # after it, and in neither case does a number go out twice or not at all.
            self._submitted.append(_Submitted(number, pending, call, request))
        self._background.post(self._start_submitted)
        return future

    @property
    def last_number(self) -> int:
        """Number of the operation that was submitted last, by whatever client; 0 if none was."""
        with self._lock:
            return self._last_number()

    def _last_number(self) -> int:
        return self._submitted[-1].number if self._submitted else self._next_unstarted - 1

    def resume(self, number: int, kind: str, decode: Callable[[Any], T]) -> OperationFuture[T]:
        """Return the future of an operation that an earlier client sent and that has not ended.

        To be called before the first `submit`, in the order of the numbers.

        Args:
            number: Its number.
            kind: Its kind.
            decode: Makes the result from the response message.
        """
        with self._lock:
            # What follows it is not known to the caller either.
            self._observed_mark = min(self._observed_mark, number - 1)
            future: OperationFuture[T] = self._new_future(number, kind)
            self._outcomes[number] = future.outcome
        call = _CALL_BY_KIND.get(kind)
        pending = _Pending(call, None, future, decode, accepted=True)
        self._background.post(lambda: self._await(number, pending))
        return future

    def look_up(self, number: int, decode: Callable[[Any], T]) -> OperationFuture[T]:
        """Return a future of any operation of the run that was sent before.

        Args:
            number: Its number.
            decode: Makes the result from the response message, whatever its type.
        """
        future: OperationFuture[T] = self._new_future(number, "")
        self._background.post(lambda: self._background.spawn(self._look_up(number, future, decode)))
        return future

    async def _look_up(
        self, number: int, future: OperationFuture[Any], decode: Callable[[Any], Any]
    ) -> None:
        request = operations_pb2.WaitOperationRequest(
            name=f"{self._run}/operations/{number}",
            timeout=encode_duration(_LONG_POLL_S),
        )
        pending = _Pending(None, None, future, decode, accepted=True)
        self._looked_up.add(future)
        try:
            while True:
                operation = await self._transport.call(
                    self._endpoint,
                    lambda connection: connection.operations.WaitOperation,
                    request,
                    timeout_s=_LONG_POLL_S + self._transport.settings.call_timeout_s,
                )
                metadata = trainer_pb2.OperationMetadata()
                if operation.metadata.Unpack(metadata):
                    future.deliver_metadata(codec.decode_operation_metadata(metadata))
                if operation.done:
                    break
                # A server that answers at once instead of waiting is not to be flooded.
                await asyncio.sleep(_POLL_PAUSE_S)
        except TinsmithError as error:
            if not future.done():
                future.deliver_error(error, known=False)
            return
        finally:
            self._looked_up.discard(future)
        if not future.done():
            self._deliver(pending, operation)

    def _await(self, number: int, pending: _Pending) -> None:
        """Have the result of an accepted operation delivered."""
        self._pending[number] = pending
        self._unheard.append(number)
        if self._hearing is None or self._hearing.done():
            self._hearing = self._background.spawn(self._hear())
        if self._poller is None or self._poller.done():
            self._poller = self._background.spawn(self._poll())

    async def _hear(self) -> None:
        """Ask how operations stand of which nothing was heard: an earlier client sent them."""
        while self._unheard:
            number = self._unheard.popleft()
            pending = self._pending.get(number)
            if pending is not None and pending.future.metadata is None:
                await self._refresh(number)

    def _new_future(self, number: int, kind: str) -> OperationFuture[Any]:
        return OperationFuture(
            self._background,
            kind=kind,
            sequence_number=number,
            operation_name=f"{self._run}/operations/{number}",
            default_timeout_s=self._transport.settings.operation_timeout_s,
            refresh=lambda: self._refresh(number),
        )

    def close(self) -> None:
        """Fail what is pending. Runs in the background loop."""
        error = ClientClosedError(
            f"the client was closed before the results of {self._run} arrived",
            remedy="continue the run with Client.runs.get(name) of a new Client",
        )
        self._broken, self._broken_from = error, 0
        for number in list(self._pending):
            self._fail(number, error, known=False)
        for future in self._looked_up:
            future.deliver_error(error, known=False)
        self._looked_up.clear()

    def _advance_observed_mark(self) -> int:
        for number, outcome in list(self._outcomes.items()):
            if not outcome.is_observed:
                continue
            if outcome.closes_accumulation or number == self._observed_mark + 1:
                self._observed_mark = number
        for number in [n for n in self._outcomes if n <= self._observed_mark]:
            del self._outcomes[number]
        return self._observed_mark

    def _start_submitted(self) -> None:
        """Start what was submitted, in order; more than one if a caller was interrupted."""
        while True:
            with self._lock:
                if not self._submitted:
                    return
                next_up = self._submitted.popleft()
                self._next_unstarted = next_up.number + 1
            self._start(next_up.number, next_up.pending, next_up.call, next_up.request)

    def _start(
        self, number: int, pending: _Pending, call: OrderedCall, request: OrderedRequest
    ) -> None:
        self._pending[number] = pending
        if self._broken is not None:
            self._fail(number, self._broken, known=False)
        else:
            self._background.spawn(self._send(number, pending, call, request))

    async def _send(
        self, number: int, pending: _Pending, call: OrderedCall, request: OrderedRequest
    ) -> None:
        try:
            async with self._window:
                operation = await self._send_in_turn(number, call, request)
        except TinsmithError as error:
            if is_away(error) or error.retry_after_s is not None:
                self._break(number, error)
            else:
                self._fail(number, error, known=True)
            return
        pending.accepted = True
        self._receive(operation)
        if self._pending and (self._poller is None or self._poller.done()):
            self._poller = self._background.spawn(self._poll())

    async def _send_in_turn(
        self, number: int, call: OrderedCall, request: OrderedRequest
    ) -> operations_pb2.Operation:
        """Send until it is accepted. While a lower number is sent again, higher ones hold back.

        Otherwise the queue of a server that refused number n could fill with numbers that wait
        for n.
        """
        backoff = Backoff(self._transport.settings.retry)
        method: Callable[[Any], grpc.aio.UnaryUnaryMultiCallable[Any, Any]]
        method = lambda connection: getattr(connection.trainer, call.method)  # noqa: E731
        try:
            while True:
                async with self._turn_changed:
                    await self._turn_changed.wait_for(lambda: self._has_turn(number))
                if self._broken is not None and number >= self._broken_from:
                    raise self._broken
                try:
                    return await self._transport.call_once(self._endpoint, method, request)
                except TinsmithError as error:
                    delay_s = backoff.delay_s(error, time.monotonic())
                    if delay_s is None:
                        raise backoff.gave_up(error, time.monotonic()) from error.__cause__
                    self._resending.add(number)
                    await asyncio.sleep(delay_s)
                    if is_away(error):
                        await self._endpoint.relocate()
        finally:
            self._resending.discard(number)
            async with self._turn_changed:
                self._turn_changed.notify_all()

    def _has_turn(self, number: int) -> bool:
        is_lost = self._broken is not None and number >= self._broken_from
        return is_lost or all(number <= other for other in self._resending)

    def _break(self, number: int, error: TinsmithError) -> None:
        """Give up the run: `number` was not accepted, so nothing above it can ever run."""
        if self._broken is None:
            self._broken = RunUndeliverableError(
                f"operation {number} of {self._run} could not be delivered: {error.message}",
                sequence_number=number,
                remedy="check the server, then continue with Client.runs.get(name)",
            )
            self._broken.__cause__ = error
            self._broken_from = number
        for other in [n for n in self._pending if n >= number]:
            self._fail(other, self._broken, known=False)

    def _fail(self, number: int, error: TinsmithError, *, known: bool) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            _deliver_error(pending, error, known=known)

    def _receive(self, operation: operations_pb2.Operation) -> None:
        """Deliver an operation if it is done and awaited, else note how it stands."""
        number = int(operation.name.rpartition("/")[2])
        pending = self._pending.get(number)
        metadata = trainer_pb2.OperationMetadata()
        is_described = operation.HasField("metadata") and operation.metadata.Unpack(metadata)
        if pending is not None and is_described:
            pending.future.deliver_metadata(codec.decode_operation_metadata(metadata))
        if pending is None or not operation.done:
            return
        self._highest_delivered = max(self._highest_delivered, number)
        self._pending.pop(number, None)
        self._deliver(pending, operation)

    def _deliver(self, pending: _Pending, operation: operations_pb2.Operation) -> None:
        """Hand over the outcome of an operation that is done."""
        if operation.HasField("error"):
            _deliver_error(pending, decode_status(operation.error), known=True)
            return
        full_name = operation.response.type_url.rpartition("/")[2]
        call = pending.call or _CALL_BY_RESPONSE.get(full_name)
        try:
            if call is None or full_name != call.response.DESCRIPTOR.full_name:
                raise ValueError(f"the response is a {operation.response.type_url}")
            response = call.response()
            operation.response.Unpack(response)
            value = pending.decode(response)
        except Exception as error:  # Whatever it is belongs to this one future.
            _LOG.exception("response not understood")
            wrapped = InternalError(f"response of {operation.name} not understood: {error}")
            _deliver_error(pending, wrapped, known=True)
            return
        closes = call in (OPTIM_STEP, LOAD_CHECKPOINT)
        pending.future.deliver(value, closes_accumulation=closes)

    async def _poll(self) -> None:
        """Receive results until none is awaited."""
        while any(pending.accepted for pending in self._pending.values()):
            try:
                request = trainer_pb2.WaitOperationsRequest(
                    run=self._run,
                    after_revision=self._revision,
                    timeout=encode_duration(_LONG_POLL_S),
                )
                response = await self._transport.call(
                    self._endpoint,
                    lambda connection: connection.trainer.WaitOperations,
                    request,
                    timeout_s=_LONG_POLL_S + self._transport.settings.call_timeout_s,
                )
            except TinsmithError as error:
                for number in [n for n, pending in self._pending.items() if pending.accepted]:
                    self._fail(number, error, known=False)
                return
            for operation in response.operations:
                self._receive(operation)
            self._revision = max(self._revision, response.revision)
            if not response.operations:
                # A server that answers at once instead of waiting is not to be flooded.
                await asyncio.sleep(_POLL_PAUSE_S)
            await self._ask_for_stragglers(is_idle=not response.operations)

    async def _ask_for_stragglers(self, *, is_idle: bool) -> None:
        """Look up operations that the list may have passed by, one by one."""
        now = time.monotonic()
        if not is_idle and now - self._stragglers_at < _STRAGGLER_INTERVAL_S:
            return
        self._stragglers_at = now
        numbers = sorted(n for n, pending in self._pending.items() if pending.accepted)
        passed = [n for n in numbers if n < self._highest_delivered]
        for number in passed or (numbers[:1] if is_idle else []):
            await self._refresh(number)

    async def _refresh(self, number: int) -> None:
        """Ask the server how one operation stands; deliver it if it is done."""
        request = operations_pb2.GetOperationRequest(name=f"{self._run}/operations/{number}")
        try:
            operation = await self._transport.call_once(
                self._endpoint,
                lambda connection: connection.operations.GetOperation,
                request,
                timeout_s=min(10.0, self._transport.settings.call_timeout_s),
            )
        except TinsmithError as error:
            pending = self._pending.get(number)
            is_lost = error.code is ErrorCode.NOT_FOUND or error.reason == EXPIRED_REASON
            if is_lost and pending is not None and pending.accepted:
                self._fail(number, error, known=False)
            elif is_away(error):
                await self._endpoint.relocate()
            return
        self._receive(operation)


def _deliver_error(pending: _Pending, error: TinsmithError, *, known: bool) -> None:
    clears = pending.call is OPTIM_STEP and error.reason in _CLEARING_REASONS
    pending.future.deliver_error(error, known=known, closes_accumulation=known and clears)
