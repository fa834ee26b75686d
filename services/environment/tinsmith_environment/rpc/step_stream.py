"""One stream of steps: many instances, several steps in a message, answers as they are ready.

A step begins when it is read, and waits for no other. Results that are ready together travel in
one message, since a message costs more than a step of a small game.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from tinsmith.v1 import environment_pb2
from tinsmith_environment.environment import StepResult
from tinsmith_environment.instances.clients import Clients
from tinsmith_environment.rpc import codec
from tinsmith_runtime.errors import InvalidFieldError, TinsmithError, internal_error
from tinsmith_runtime.rpc.auth import Caller

logger = logging.getLogger(__name__)

BeginStep = Callable[[environment_pb2.StepInstanceRequest], asyncio.Task[StepResult]]
_Answer = environment_pb2.StepInstancesResponse

# Large observations travel alone, so that a message stays small.
_MAX_ANSWER_BYTES = 2**20


class StepStream:
    """Answers the requests of one stream.

    Args:
        clients: Where it notes which client is there.
        begin_step: Starts a step.
        caller: Whose stream it is.
        max_steps: Steps that run, or whose results wait to be read, at once; the stream is read no
            faster.
    """

    def __init__(
        self, clients: Clients, begin_step: BeginStep, caller: Caller, *, max_steps: int
    ) -> None:
        self._clients = clients
        self._begin_step = begin_step
        self._caller = caller
        # A place is held until its answer was read, so a slow reader slows the stream down.
        self._places = asyncio.Semaphore(max_steps)
        self._answers: deque[_Answer] = deque()
        self._num_running = 0
        self._changed = asyncio.Event()
        self._max_batch = 1
        self._presence = contextlib.ExitStack()

    async def serve(
        self, requests: AsyncIterator[environment_pb2.StepInstancesRequest]
    ) -> AsyncIterator[_Answer]:
        """Yield the answers of all requests; a malformed request ends the stream behind them."""
        with self._presence:
            reader = asyncio.create_task(self._read(requests))
            reader.add_done_callback(lambda _: self._changed.set())
            try:
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    while self._answers:
                        yield self._next_message()
                    if reader.done() and not self._num_running and not self._answers:
                        break
                await reader
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[environment_pb2.StepInstancesRequest]) -> None:
        async for request in requests:
            if request.client_id:
                self._open(request)
                continue
            for step in _steps_of(request):
                await self._places.acquire()
                self._start(step)

    def _open(self, request: environment_pb2.StepInstancesRequest) -> None:
        """Keep the instances of a client for as long as the stream is open.

        Raises:
            InvalidFieldError: If its id is none.
        """
        client_id = codec.decode_client_id(request.client_id)
        if self._max_batch > 1:
            raise InvalidFieldError("client_id", "is sent in the first message alone")
        self._max_batch = codec.MAX_BATCH_STEPS
        self._presence.enter_context(self._clients.present((self._caller.project, client_id)))

    def _start(self, step: environment_pb2.StepInstanceRequest) -> None:
        self._num_running += 1
        answer = _Answer(instance=step.instance, step_index=step.step_index)
        try:
            task = self._begin_step(step)
        except Exception as error:
            self._end(answer, error)
            return
        task.add_done_callback(lambda done: self._finish(answer, done))

    def _finish(self, answer: _Answer, task: asyncio.Task[StepResult]) -> None:
        if task.cancelled():
            # The pod ends.
            self._end(answer, internal_error())
            return
        error = task.exception()
        if error is None:
            answer.step.CopyFrom(codec.encode_step(task.result()))
        self._end(answer, error)

    def _end(self, answer: _Answer, error: BaseException | None) -> None:
        if isinstance(error, TinsmithError):
            answer.failure.CopyFrom(codec.encode_failure(error))
        elif error is not None:
            logger.error("step of a stream failed by a bug", exc_info=error)
            answer.failure.CopyFrom(codec.encode_failure(internal_error()))
        self._num_running -= 1
        self._answers.append(answer)
        self._changed.set()

    def _next_message(self) -> _Answer:
        """Return the oldest answer, with those that fit into its message."""
        message = self._answers.popleft()
        self._places.release()
        num_bytes = message.ByteSize()
        for _ in range(self._max_batch - 1):
            if not self._answers:
                break
            num_bytes += self._answers[0].ByteSize()
            if num_bytes > _MAX_ANSWER_BYTES:
                break
            message.further_results.append(self._answers.popleft())
            self._places.release()
        return message


def _steps_of(
    request: environment_pb2.StepInstancesRequest,
) -> Iterator[environment_pb2.StepInstanceRequest]:
    """Yield the steps of a message.

    Raises:
        InvalidFieldError: If there are too many.
    """
    if len(request.further_steps) >= codec.MAX_BATCH_STEPS:
        raise InvalidFieldError(
            "further_steps", f"must hold fewer than {codec.MAX_BATCH_STEPS} steps"
        )
    yield environment_pb2.StepInstanceRequest(
        instance=request.instance, step_index=request.step_index, action=request.action
    )
    yield from request.further_steps
