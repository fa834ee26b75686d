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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from tinsmith_environment.environment import Action, JsonValue, Observation, StepResult
from tinsmith_environment.workers import protocol
from tinsmith_environment.workers.descendants import kill_tree
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


@dataclass(frozen=True, slots=True)
class WorkerLoss:
    """Why a worker is gone."""

    cause: str
    """`timeout`, `crashed` or `stopped`."""
    message: str


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
    ) -> Observation:
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
        command: Program and arguments.
        variables: Its environment variables.
        step_timeout_s: Longest time of one call.
        show_output: Whether what it prints goes to the pod's standard error.
        max_output_bytes: Of that; the rest is read and dropped.
        max_reply_bytes: Of one answer.
        uid: User and group of the process; None for those of the pod.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        *,
        step_timeout_s: float,
        show_output: bool,
        max_output_bytes: int = 2**20,
        max_reply_bytes: int = protocol.MAX_FRAME_BYTES,
        uid: int | None = None,
    ) -> None:
        self.project: str | None = None
        """The one project that it serves, from the first instance on."""
        self._max_output_bytes = max_output_bytes
        self._max_reply_bytes = max_reply_bytes
        self._uid = uid
        self._output: asyncio.Task[None] | None = None
        self.num_instances = 0
        self._command = command
        self._variables = variables
        self._step_timeout_s = step_timeout_s
        self._show_output = show_output
        self._loss: WorkerLoss | None = None
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

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
        """
        users: dict[str, Any] = {}
        if self._uid is not None:
            users = {"user": self._uid, "group": self._uid, "extra_groups": []}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE if self._show_output else asyncio.subprocess.DEVNULL,
            env=dict(self._variables),
            start_new_session=True,
            limit=2**20,
            close_fds=True,
            **users,
        )
        if self._process.stderr is not None:
            self._output = asyncio.create_task(self._forward(self._process.stderr))
        async with self._turn:
            await self._receive(timeout_s, what="its start")

    async def wait_lost(self) -> WorkerLoss:
        """Wait for the end of the process and return why it ended."""
        process = self._started()
        code = await process.wait()
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        loss = self._lose(CRASHED, f"its worker process died with {ending}")
        with contextlib.suppress(OSError, RuntimeError):
            if process.stdin is not None:
                process.stdin.close()
        return loss

    def kill(self, cause: str, message: str) -> None:
        """End the process and what it started."""
        self._lose(cause, message)
        process = self._started()
        if process.returncode is None:
            kill_tree(process.pid)
        else:
            # The number may be another process's by now; a group of it is only ours.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    async def describe(self, class_path: str) -> tuple[str, dict[str, JsonValue]]:
        """Return description and default config of an environment class."""
        reply = await self._call({"op": "describe", "class_path": class_path}, what=class_path)
        return reply["description"], reply["default_config"]

    async def create(
        self,
        instance: str,
        class_path: str,
        settings: Mapping[str, JsonValue],
        seed: int,
        config: Mapping[str, JsonValue],
    ) -> Observation:
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
        return protocol.decode_observation(reply["observation"])

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
        async with self._turn:
            self._raise_if_lost()
            timeout_s = _CLOSE_TIMEOUT_S if request["op"] == "close" else self._step_timeout_s
            stdin = self._started().stdin
            assert stdin is not None
            try:
                frame = protocol.encode_frame(request)
            except protocol.FrameError as error:
                raise InvalidFieldError("action", f"cannot be sent: {error}") from error
            try:
                stdin.write(frame)
                reply = await self._receive(timeout_s, what=what)
            except asyncio.CancelledError:
                # Its reply would be read by the next call.
                self.kill(STOPPED, "its worker process was stopped")
                raise
        if reply.get("ok"):
            return reply
        if reply.get("kind") == "invalid":
            raise InvalidFieldError(str(reply["field"]), str(reply["problem"]))
        where = f" ({reply['where']})" if reply.get("where") else ""
        raise EnvironmentFailedError(
            f"the environment failed: {reply.get('message')}{where}", cause=RAISED
        )

    async def _receive(self, timeout_s: float, *, what: str) -> dict[str, Any]:
        stdout = self._started().stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                length = protocol.decode_length(await stdout.readexactly(protocol.HEADER.size))
                if length > self._max_reply_bytes:
                    raise protocol.FrameError(
                        f"{length} bytes exceed the limit of {self._max_reply_bytes}"
                    )
                return protocol.decode_body(await stdout.readexactly(length))
        except TimeoutError:
            self.kill(
                TIMEOUT,
                f"{what} in its worker process did not finish within {timeout_s:g} s, so the "
                "process was stopped",
            )
        except protocol.FrameError as error:
            self.kill(CRASHED, f"its worker process sent a malformed reply: {error}")
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.wait_lost()
        self._raise_if_lost()
        raise AssertionError("a lost worker has a loss")

    async def _forward(self, stream: asyncio.StreamReader) -> None:
        """Print what the worker prints, up to the limit; read on, so that it is never held up."""
        num_left = self._max_output_bytes
        while chunk := await stream.read(2**16):
            if num_left > 0:
                sys.stderr.write(chunk[:num_left].decode(errors="replace"))
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

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the worker was not started")
        return self._process


def raise_lost(loss: WorkerLoss) -> NoReturn:
    """Raise what the instances of a lost worker answer."""
    raise EnvironmentFailedError(
        f"the episode is lost: {loss.message}; create a new instance", cause=loss.cause
    )
