"""Steps of all instances of a client, over one long-lived stream for each server.

A step is sent with whatever others wait, and answered when it is ready. A stream that breaks is
opened again, and what was not answered is sent again: `step_index` tells the server a repeat from a
new step. While it is open the server keeps the client's instances; it removes them a short while
after the client has gone, however that went. Servers that take one step in a message are of earlier
releases: their steps are unary calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from tinsmith.errors import (
    ClientClosedError,
    DeadlineExceededError,
    TinsmithError,
    UnavailableError,
)
from tinsmith.names import InstanceName
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.error_codec import decode_rpc_error, decode_status
from tinsmith.rpc.transport import PASSING_CODES, Backoff, Endpoint, is_away
from tinsmith.v1 import environment_pb2

_LOG = logging.getLogger(__name__)

# A stream that was open for longer has not failed in a series.
_SERIES_S = 30.0
# The next episode often begins soon after the last one.
_LINGER_S = 1.0


class StepStreams:
    """The streams of one client. Used inside the background loop only."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self.client_id = str(uuid.uuid4())
        """Which instances go with this client."""
        self._streams: dict[tuple[int, str], _StepStream] = {}

    def hold(self, endpoint: Endpoint, instance: environment_pb2.EnvironmentInstance) -> None:
        """Keep an instance until it is released."""
        if instance.max_batch_steps > 0:
            self._stream_of(endpoint, instance.name).hold(instance.name, instance.max_batch_steps)

    def release(self, endpoint: Endpoint, name: str) -> None:
        """Keep an instance no longer; repeating it changes nothing."""
        self._stream_of(endpoint, name).release(name)

    async def step(
        self, endpoint: Endpoint, request: environment_pb2.StepInstanceRequest
    ) -> environment_pb2.StepInstanceResponse:
        """Apply a step.

        Raises:
            TinsmithError: If it fails, or is not answered within `operation_timeout_s`.
        """
        stream = self._stream_of(endpoint, request.instance)
        if stream.holds(request.instance):
            answer = await stream.step(request)
            if answer is not None:
                return answer
        return await self._core.transport.call(
            endpoint,
            lambda c: c.environment.StepInstance,
            request,
            timeout_s=self._core.settings.operation_timeout_s,
        )

    def _stream_of(self, endpoint: Endpoint, name: str) -> _StepStream:
        # The ids of one server's instances begin alike, and a gateway sends a stream to one server.
        key = (id(endpoint), InstanceName.parse(name).instance.rpartition("-")[0])
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _StepStream(self._core, endpoint, self.client_id)
        return stream


class _Step:
    """A step that was not answered yet."""

    __slots__ = ("answer", "request")

    def __init__(self, request: environment_pb2.StepInstanceRequest) -> None:
        self.request = request
        self.answer: asyncio.Future[environment_pb2.StepInstanceResponse | None]
        self.answer = asyncio.get_running_loop().create_future()


class _StepStream:
    """The stream to one server, opened when there is something to keep or to send."""

    def __init__(self, core: ClientCore, endpoint: Endpoint, client_id: str) -> None:
        self._core = core
        self._endpoint = endpoint
        self._client_id = client_id
        self._max_batch = 1
        self._held: set[str] = set()
        self._steps: dict[str, _Step] = {}
        """By instance, which has one at a time."""
        self._unsent: deque[_Step] = deque()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def holds(self, name: str) -> bool:
        """Whether steps of an instance go over this stream."""
        return name in self._held

    def hold(self, name: str, max_batch: int) -> None:
        """Keep an instance."""
        self._held.add(name)
        self._max_batch = max_batch
        self._open()

    def release(self, name: str) -> None:
        """Keep an instance no longer."""
        self._held.discard(name)
        self._changed.set()

    async def step(
        self, request: environment_pb2.StepInstanceRequest
    ) -> environment_pb2.StepInstanceResponse | None:
        """Apply a step; None if it is to be sent in another way."""
        step = self._steps[request.instance] = _Step(request)
        self._unsent.append(step)
        self._changed.set()
        self._open()
        timeout_s = self._core.settings.operation_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await step.answer
        except TimeoutError:
            raise DeadlineExceededError(
                f"step {request.step_index} of {request.instance} was not answered within "
                f"{timeout_s:g} s"
            ) from None
        finally:
            if self._steps.get(request.instance) is step:
                del self._steps[request.instance]

    def _open(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._core.background.spawn(self._run())

    async def _run(self) -> None:
        """Keep the stream open for as long as there is a use for it."""
        backoff = Backoff(self._core.settings.retry)
        while self._held or self._steps:
            begin_s = time.monotonic()
            try:
                await self._serve()
                continue
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    self._give_back()
                    return
                failure = decode_rpc_error(error, address=self._endpoint.address)
            except grpc.aio.UsageError:
                failure = ClientClosedError("the client is closed", remedy="open a new Client")
            except TinsmithError as error:
                failure = error
            now_s = time.monotonic()
            if now_s - begin_s > _SERIES_S:
                backoff = Backoff(self._core.settings.retry)
            delay_s = backoff.delay_s(failure, now_s)
            if delay_s is None:
                self._fail(backoff.gave_up(failure, now_s))
                return
            _LOG.debug("stream of steps is opened again", extra={"error": str(failure)})
            await asyncio.sleep(delay_s)
            if is_away(failure):
                await self._core.transport.relocate(self._endpoint)

    async def _serve(self) -> None:
        """Open a stream, send what is not answered, and go on until it ends."""
        call = self._core.transport.open_stream(
            self._endpoint, lambda c: c.environment.StepInstances
        )
        reading = asyncio.create_task(self._read(call))
        reading.add_done_callback(lambda _: self._changed.set())
        try:
            name = next(iter(self._held or self._steps))
            await call.write(
                environment_pb2.StepInstancesRequest(instance=name, client_id=self._client_id)
            )
            self._unsent = deque(self._steps.values())
            while not reading.done():
                while self._unsent:
                    await call.write(self._next_message())
                self._changed.clear()
                if not await self._is_used():
                    await call.done_writing()
                    await reading
                    return
            await reading
            raise UnavailableError(f"{self._endpoint.address} has ended the stream of steps")
        except asyncio.InvalidStateError:
            # It ended while it was written to; its status says why.
            await reading
        finally:
            reading.cancel()
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _is_used(self) -> bool:
        """Wait until something has changed; return False once nothing was held for a while."""
        if self._held or self._steps:
            await self._changed.wait()
            return True
        try:
            async with asyncio.timeout(_LINGER_S):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _next_message(self) -> environment_pb2.StepInstancesRequest:
        first = self._unsent.popleft().request
        message = environment_pb2.StepInstancesRequest(
            instance=first.instance, step_index=first.step_index, action=first.action
        )
        num_further = min(len(self._unsent), self._max_batch - 1)
        message.further_steps.extend(self._unsent.popleft().request for _ in range(num_further))
        return message

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            self._deliver(message)
            for result in message.further_results:
                self._deliver(result)

    def _deliver(self, result: environment_pb2.StepInstancesResponse) -> None:
        step = self._steps.get(result.instance)
        if step is None or step.request.step_index != result.step_index or step.answer.done():
            return
        if result.HasField("step"):
            step.answer.set_result(result.step)
            return
        error = _decode_failure(result.failure)
        if error.code in PASSING_CODES:
            # Sent again by itself, with the pauses of such a call.
            step.answer.set_result(None)
        else:
            step.answer.set_exception(error)

    def _give_back(self) -> None:
        """Let all steps be sent in another way from now on."""
        self._held.clear()
        for step in self._steps.values():
            if not step.answer.done():
                step.answer.set_result(None)

    def _fail(self, error: TinsmithError) -> None:
        for step in self._steps.values():
            if not step.answer.done():
                step.answer.set_exception(error)


def _decode_failure(failure: environment_pb2.StepFailure) -> TinsmithError:
    status = status_pb2.Status(code=failure.code, message=failure.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=failure.reason))
    return decode_status(status)
