"""The process that holds vLLM, as the sampler sees it: started, spoken to, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tinsmith_runtime.errors import CheckpointIncompatibleError, WorkerUnavailableError
from tinsmith_sampler.vllm.frames import (
    LENGTH_BYTES,
    FrameError,
    event_of,
    length_of,
    to_frame,
)
from tinsmith_sampler.vllm.messages import (
    Abort,
    Command,
    Configure,
    Done,
    Event,
    Generate,
    Ready,
    Stepped,
    Update,
)

logger = logging.getLogger(__name__)

_MODULE = "tinsmith_sampler.vllm.child"
_KEPT_OUT = ("TINSMITH_", "AWS_")
"""Beginnings of variables that hold keys of the deployment: the child needs none of them."""
_CPU_SPACE_UNIT = 2**30
_KILL_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Where vLLM runs.

    Attributes:
        python: Its interpreter.
        num_threads: Threads of one operation; 0 leaves them to vLLM.
        start_timeout_s: Time that loading a model may take.
        is_cpu: Whether there is no GPU.
        restart_waits_s: Time before each attempt to start it again; after the last one it is given
            up.
    """

    python: str
    num_threads: int
    start_timeout_s: float
    is_cpu: bool
    restart_waits_s: tuple[float, ...] = (0.0, 1.0, 5.0, 15.0)


class VllmProcess:
    """One child process; it is started once and not used again after its end.

    Args:
        interpreter: What runs it.
        settings: What it loads.
        on_update: Is told what a step brought for a completion.
        on_end: Is told that the process has ended, unless `stop` ended it.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        settings: Configure,
        *,
        on_update: Callable[[Update], None],
        on_end: Callable[[], None],
    ) -> None:
        self._interpreter = interpreter
        self._settings = settings
        self._on_update = on_update
        self._on_end = on_end
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count(1)
        self._heard_at_s = time.monotonic()
        self._is_stopping = False
        self._has_ended = False

    @property
    def pid(self) -> int:
        """Id of the process; 0 before it was started."""
        return self._process.pid if self._process is not None else 0

    @property
    def num_calls(self) -> int:
        """Calls that have no answer yet."""
        return len(self._calls)

    @property
    def silent_s(self) -> float:
        """Seconds since the process was last heard, or given the first work after a rest."""
        return time.monotonic() - self._heard_at_s

    async def start(self) -> Ready:
        """Start the process and wait until its model is loaded.

        Raises:
            WorkerUnavailableError: If it ends before, or takes too long.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                self._interpreter.python,
                "-m",
                _MODULE,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                # So that its own workers end with it.
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            self._send(self._settings)
            async with asyncio.timeout(self._interpreter.start_timeout_s):
                ready = await _receive(reader)
            if not isinstance(ready, Ready):
                raise FrameError(f"vLLM began with {type(ready).__name__}")
        except (TimeoutError, OSError, EOFError, FrameError) as error:
            await self.stop()
            raise WorkerUnavailableError(
                "vLLM did not start; the log of the pod has its reason"
            ) from error
        except BaseException:
            await self.stop()
            raise
        self.note_work()
        self._reading = asyncio.create_task(self._read(reader))
        return ready

    def generate(self, command: Generate) -> None:
        """Ask for a completion; what comes of it goes to `on_update`."""
        self._send(command)

    def abort(self, samples: list[int]) -> None:
        """Give completions up."""
        self._send(Abort(samples))

    async def call(self, command: Callable[[int], Command]) -> None:
        """Send a command that is answered, and wait for the answer.

        Args:
            command: Makes it from the number of the call.

        Raises:
            CheckpointIncompatibleError: If vLLM refuses what the command names.
            WorkerUnavailableError: If the process ends before.
        """
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(command(number))
            problem = await answer
        finally:
            self._calls.pop(number, None)
        if problem:
            raise CheckpointIncompatibleError(f"vLLM refuses the weights: {problem}")

    def note_work(self) -> None:
        """Count the silence from now on: before, the process had nothing to do."""
        self._heard_at_s = time.monotonic()

    def kill(self) -> None:
        """End the process and all that it started, at once; `on_end` is told."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the process; may be called twice."""
        self._is_stopping = self._has_ended = True
        self.kill()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            async with asyncio.timeout(_KILL_WAIT_S):
                await self._process.wait()
        self._fail_calls()

    def _environment(self) -> Mapping[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_KEPT_OUT)}
        space = max(1, self._settings.cache_bytes // _CPU_SPACE_UNIT)
        num_threads = self._interpreter.num_threads
        threads = {"OMP_NUM_THREADS": str(num_threads)} if num_threads else {}
        return {
            **kept,
            **threads,
            # Its engine steps in the process itself, so that one end is the end of all.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(space),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            # Files were fetched by the pod, under its own settings.
            "HF_HUB_OFFLINE": "1",
            # On a CPU the first request would wait for a compiler.
            **({"TORCH_COMPILE_DISABLE": "1"} if self._interpreter.is_cpu else {}),
        }

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                event = await _receive(reader)
                self._heard_at_s = time.monotonic()
                match event:
                    case Stepped(updates):
                        for update in updates:
                            self._on_update(update)
                    case Done(call, problem):
                        answer = self._calls.get(call)
                        if answer is not None and not answer.done():
                            answer.set_result(problem)
        except (EOFError, OSError):
            logger.debug("the connection to vLLM has ended")
        except Exception:
            logger.exception("what vLLM says is not understood")
        finally:
            self._has_ended = True
            self._fail_calls()
            if not self._is_stopping:
                # What cannot be understood any more is not left running.
                self.kill()
                self._on_end()

    def _fail_calls(self) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(
                    WorkerUnavailableError("vLLM has ended; send the request again")
                )

    def _send(self, command: Command) -> None:
        if self._writer is None or self._has_ended:
            raise WorkerUnavailableError("vLLM has ended; send the request again")
        self._writer.write(to_frame(command))


async def _receive(reader: asyncio.StreamReader) -> Event:
    start = await reader.readexactly(LENGTH_BYTES)
    return event_of(await reader.readexactly(length_of(start)))
