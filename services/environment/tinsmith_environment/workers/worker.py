"""One worker process: where the code of environments runs, away from the event loop.

A worker serves one call at a time. The timeout of a step therefore begins with the step and not
while it is queued. A worker that dies or takes too long is lost with all its instances. Each of
them then answers with an `EnvironmentFailedError` that says why. A lost worker object is never
used again, so no reply can reach the wrong call. What an environment started dies with its worker,
in whatever session it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from tinsmith.environments.environment import TEXT_ALONE
from tinsmith_environment.environment import Action, JsonValue, Observation, StepResult
from tinsmith_environment.workers import protocol
from tinsmith_environment.workers.descendants import kill_tree
from tinsmith_environment.workers.frame_channel import ChannelClosedError, FrameChannel
from tinsmith_environment.workers.starters import StartedProcess, WorkerStarter
from tinsmith_runtime.errors import (
    EnvironmentFailedError,
    InvalidFieldError,
)

logger = logging.getLogger(__name__)

RAISED = "raised"
TIMEOUT = "timeout"
CRASHED = "crashed"
STOPPED = "stopped"

_CLOSE_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 1.0
# A reply that takes longer to decode than the event loop may be held up.
_LARGE_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """Why a worker is gone."""

    cause: str
    """`timeout`, `crashed` or `stopped`."""
    message: str


@dataclass(frozen=True, slots=True)
class ClassDescription:
    """What a class of environments says of itself."""

    description: str
    default_config: dict[str, JsonValue]
    action_kinds: frozenset[str]
    """Kinds of actions that its objects understand, unless they say otherwise."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An episode that was reset."""

    observation: Observation
    action_kinds: frozenset[str] = TEXT_ALONE
    """Kinds of actions that its object understands."""


class Worker(Protocol):
    """What the domain needs of a worker."""

    num_instances: int
    """Instances that live in it; kept by the owner of the instances."""

    @property
    def loss(self) -> WorkerLoss | None:
        """Why it is gone; None while it lives."""
        ...

    async def create(
        self,
        instance: str,
        class_path: str,
        settings: Mapping[str, JsonValue],
        seed: int,
        config: Mapping[str, JsonValue],
    ) -> Begun:
        """Build and reset an environment."""
        ...

    async def step(self, instance: str, action: Action) -> StepResult:
        """Apply an action."""
        ...

    async def close(self, instance: str) -> None:
        """Release an environment; never raises."""
        ...


class Workers(Protocol):
    """Where the domain gets workers from."""

    async def assign(self, project: str) -> Worker:
        """Return a worker that serves this project alone.

        Raises:
            WorkerUnavailableError: If none can be had at the moment.
        """
        ...


class WorkerProcess:
    """One process; implements `Worker`.

    Args:
        starter: Starts it.
        step_timeout_s: Longest time of one call.
        show_output: Whether what it prints goes to the pod's standard error.
        max_output_bytes: Of that; the rest is read and dropped.
        max_reply_bytes: Of one answer.
        uid: User and group of the process; None for those of the pod.
    """

    def __init__(
        self,
        starter: WorkerStarter,
        *,
        step_timeout_s: float,
        show_output: bool,
        max_output_bytes: int = 2**20,
        max_reply_bytes: int = protocol.MAX_FRAME_BYTES,
        uid: int | None = None,
    ) -> None:
        self.project: str | None = None
        """The one project that it serves, from the first instance on."""
        self.num_instances = 0
        self._starter = starter
        self._step_timeout_s = step_timeout_s
        self._show_output = show_output
        self._max_output_bytes = max_output_bytes
        self._uid = uid
        self._output: asyncio.Task[None] | None = None
        self._loss: WorkerLoss | None = None
        self._process: StartedProcess | None = None
        self._channel = FrameChannel(
            max_reply_bytes=max_reply_bytes,
            on_overdue=self._stop_overdue,
            on_malformed=self._stop_malformed,
            on_closed=self._expect_end,
        )

    @property
    def loss(self) -> WorkerLoss | None:
        """Why it is gone; None while it lives."""
        return self._loss

    @property
    def uid(self) -> int | None:
        """User of the process; None for that of the pod."""
        return self._uid

    @property
    def pid(self) -> int:
        """Process id; 0 before `start`."""
        return self._process.pid if self._process else 0

    async def start(self, timeout_s: float) -> None:
        """Start the process and wait until it listens.

        Raises:
            EnvironmentFailedError: If it does not come up.
            OSError: If the system refuses.
        """
        own, other = socket.socketpair()
        output = await self._open_output()
        started = self._channel.call(b"", timeout_s, "its start")
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: self._channel, own)
            self._process = await self._starter.start(other.fileno(), output, self._uid)
        finally:
            os.close(output)
            other.close()
        if self._loss is not None:
            # It sent nonsense before its number was known.
            kill_tree(self._process.pid)
        await self._receive(started)

    async def wait_lost(self) -> WorkerLoss:
        """Wait for the end of the process and return why it ended."""
        code = await self._started().wait()
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        loss = self._lose(CRASHED, f"its worker process died with {ending}")
        self._channel.close()
        return loss

    def kill(self, cause: str, message: str) -> None:
        """End the process and what it started; of several reasons, the first is told."""
        self._lose(cause, message)
        self._channel.close()
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            kill_tree(process.pid)
        else:
            # The number may be another process's by now; a group of it is only ours.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    async def describe(self, class_path: str) -> ClassDescription:
        """Return what a class of environments says of itself."""
        reply = await self._call({"op": "describe", "class_path": class_path}, what=class_path)
        return ClassDescription(
            reply["description"], reply["default_config"], protocol.decode_action_kinds(reply)
        )

    async def create(
        self,
        instance: str,
        class_path: str,
        settings: Mapping[str, JsonValue],
        seed: int,
        config: Mapping[str, JsonValue],
    ) -> Begun:
        """Build and reset an environment; see `Worker`."""
        request = {
            "op": "create",
            "instance": instance,
            "class_path": class_path,
            "settings": settings,
            "seed": seed,
            "config": config,
        }
        reply = await self._call(request, what="the reset of an instance")
        return Begun(
            protocol.decode_observation(reply["observation"]), protocol.decode_action_kinds(reply)
        )

    async def step(self, instance: str, action: Action) -> StepResult:
        """Apply an action; see `Worker`."""
        request = {
            "op": "step",
            "instance": instance,
            "action": protocol.encode_action(action),
        }
        reply = await self._call(request, what="a step")
        return protocol.decode_result(reply["result"])

    async def close(self, instance: str) -> None:
        """Release an environment; see `Worker`."""
        try:
            await self._call({"op": "close", "instance": instance}, what="the end of an episode")
        except EnvironmentFailedError as error:
            logger.warning("environment did not close", extra={"problem_type": error.reason})

    async def _call(self, request: Mapping[str, Any], *, what: str) -> dict[str, Any]:
        self._raise_if_lost()
        timeout_s = _CLOSE_TIMEOUT_S if request["op"] == "close" else self._step_timeout_s
        try:
            frame = protocol.encode_frame(request)
        except protocol.FrameError as error:
            raise InvalidFieldError("action", f"cannot be sent: {error}") from error
        reply = await self._receive(self._channel.call(frame, timeout_s, what))
        if reply.get("ok"):
            return reply
        if reply.get("kind") == "invalid":
            raise InvalidFieldError(str(reply["field"]), str(reply["problem"]))
        where = f" ({reply['where']})" if reply.get("where") else ""
        raise EnvironmentFailedError(
            f"the environment failed: {reply.get('message')}{where}", cause=RAISED
        )

    async def _receive(self, reply: asyncio.Future[bytes]) -> dict[str, Any]:
        try:
            body = await reply
        except ChannelClosedError:
            # The socket closes before the end of the process is known.
            loss = self._loss or await self.wait_lost()
            raise_lost(loss)
        try:
            if len(body) > _LARGE_BYTES:
                return await asyncio.to_thread(protocol.decode_body, body)
            return protocol.decode_body(body)
        except protocol.FrameError as error:
            self._stop_malformed(str(error))
            self._raise_if_lost()
            raise AssertionError("a lost worker has a loss") from error

    def _stop_overdue(self, what: str, timeout_s: float) -> None:
        self.kill(
            TIMEOUT,
            f"{what} in its worker process did not finish within {timeout_s:g} s, so the process "
            "was stopped",
        )

    def _stop_malformed(self, problem: str) -> None:
        self.kill(CRASHED, f"its worker process sent a malformed reply: {problem}")

    def _expect_end(self) -> None:
        """Stop a process that has closed its socket, unless it is about to end."""
        asyncio.get_running_loop().call_later(
            _END_TIMEOUT_S, self.kill, CRASHED, "its worker process closed its socket"
        )

    async def _open_output(self) -> int:
        """Return the descriptor of what the process prints to; to be closed after its start."""
        if not self._show_output:
            return os.open(os.devnull, os.O_WRONLY)
        read, write = os.pipe()
        reader = asyncio.StreamReader()
        protocol_of_reader = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: protocol_of_reader, os.fdopen(read, "rb", 0)
        )
        self._output = asyncio.create_task(self._forward(reader))
        return write

    async def _forward(self, stream: asyncio.StreamReader) -> None:
        """Print what the worker prints, up to the limit; read on, so that it is never held up.

        Each line begins with the worker's number, so that none passes for one of the pod's log.
        """
        num_left = self._max_output_bytes
        begins_line = True
        while chunk := await stream.read(2**16):
            if num_left > 0:
                text = chunk[:num_left].decode(errors="replace")
                shown = _marked(text, f"worker {self.pid}: ", begins_line=begins_line)
                sys.stderr.write(shown)
                begins_line = text.endswith("\n")
                num_left -= len(chunk)
                if num_left <= 0:
                    logger.warning("output of a worker dropped", extra={"worker_pid": self.pid})

    def _lose(self, cause: str, message: str) -> WorkerLoss:
        if self._loss is None:
            self._loss = WorkerLoss(cause, message)
        return self._loss

    def _raise_if_lost(self) -> None:
        if self._loss is not None:
            raise_lost(self._loss)

    def _started(self) -> StartedProcess:
        if self._process is None:
            raise RuntimeError("the worker was not started")
        return self._process


def raise_lost(loss: WorkerLoss) -> NoReturn:
    """Raise what the instances of a lost worker answer."""
    raise EnvironmentFailedError(
        f"the episode is lost: {loss.message}; create a new instance", cause=loss.cause
    )


def _marked(text: str, mark: str, *, begins_line: bool) -> str:
    """Return text with a mark before each line, and without other characters of control."""
    lines = "".join(each if each in "\n\t" or each.isprintable() else "?" for each in text)
    marked = lines.removesuffix("\n").replace("\n", f"\n{mark}")
    return (mark if begins_line else "") + marked + ("\n" if lines.endswith("\n") else "")
