"""A process that runs what a stranger wrote: it answers in time, within its memory, or is ended.

Requests and answers are JSON with their length before them, over pipes. Nothing that the process
writes is executed here. It has no variables of this one, so no keys. Time is bounded twice: its own
processor time by the kernel, and the wall time of each request from here. What ended begins anew
with the next request, after a pause that grows while it fails again and again.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith_runtime.confined.framing import HEAD_BYTES, framed
from tinsmith_runtime.errors import RateLimitedError, WorkerUnavailableError
from tinsmith_runtime.observability.metrics import CONFINED_ENDS

MAX_ANSWER_BYTES = 64 * 2**20
"""Largest answer of a confined process."""
_READ_BYTES = 2**16
_FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 60.0
"""Longest pause before a process that fails again and again begins anew."""
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")


@dataclass(frozen=True, kw_only=True, slots=True)
class Confinement:
    """Bounds of confined processes.

    Attributes:
        timeout_s: Wall and processor time of one request.
        start_timeout_s: The same for the first, which imports and reads files.
        memory_bytes: Address space of a process.
        max_processes: How many there are at once.
    """

    timeout_s: float
    start_timeout_s: float
    memory_bytes: int
    max_processes: int


class RefusedByWorkError(Exception):
    """The work itself refused the request, and the process goes on."""


class WorkEndedError(Exception):
    """The process was ended for its time or memory, or crashed; the text says so."""


class NotBegunError(Exception):
    """The process did not come up, so nothing was found out about the request."""


class ConfinedProcesses:
    """Keeps the number of confined processes: the one used longest ago gives way."""

    def __init__(self, confinement: Confinement) -> None:
        self.confinement = confinement
        self._lock = threading.Lock()
        self._running: OrderedDict[ConfinedProcess, None] = OrderedDict()

    def enter(self, process: ConfinedProcess) -> None:
        """Make room for a process that begins.

        Raises:
            RateLimitedError: If all that there may be are at work.
        """
        with self._lock:
            for other in list(self._running):
                if len(self._running) < self.confinement.max_processes:
                    break
                if other.end_idle():
                    del self._running[other]
            if len(self._running) >= self.confinement.max_processes:
                raise RateLimitedError(
                    "all confined processes of the pod are at work; send the request again",
                    what="confined processes",
                    limit=self.confinement.max_processes,
                )
            self._running[process] = None

    def use(self, process: ConfinedProcess) -> None:
        """Take note that a process was used."""
        with self._lock:
            if process in self._running:
                self._running.move_to_end(process)

    def leave(self, process: ConfinedProcess) -> None:
        """Take note that a process ended."""
        with self._lock:
            self._running.pop(process, None)

    def close(self) -> None:
        """End all of them."""
        for process in list(self._running):
            process.close()


class ConfinedProcess:
    """One process, begun when it is needed. Its methods block: not for the event loop.

    Args:
        module: Runs `worker.serve`.
        first: The first request, which each new process is sent.
        processes: Bounds the number of processes.
        work: What it does, for the metric of those that ended.
        max_pause_s: Longest pause before it begins anew; 0 for none, where a failure is the fault
            of one request and says nothing of the next.
    """

    def __init__(
        self,
        module: str,
        first: Mapping[str, Any],
        processes: ConfinedProcesses,
        *,
        work: str,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self._module = module
        self._first = json.dumps(first).encode()
        self._processes = processes
        self._work = work
        self._max_pause_s = max_pause_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._num_failures = 0
        self._not_before_s = 0.0

    def call(self, request: Mapping[str, Any]) -> Any:
        """Return the answer to a request.

        Raises:
            RefusedByWorkError: If the work itself refuses it.
            WorkEndedError: If it took too much time or memory, or crashed.
            NotBegunError: If the process itself did not come up.
            RateLimitedError: If too many processes are at work.
            WorkerUnavailableError: If it failed a moment ago.
        """
        with self._lock:
            confinement = self._processes.confinement
            if self._process is None or self._process.poll() is not None:
                self._begin()
                try:
                    self._exchange(self._first, confinement.start_timeout_s)
                except (RefusedByWorkError, WorkEndedError) as error:
                    raise NotBegunError(str(error)) from error
            answer = self._exchange(json.dumps(request).encode(), confinement.timeout_s)
            self._num_failures = 0
        self._processes.use(self)
        return answer

    def end_idle(self) -> bool:
        """End the process unless it is at work; return whether it has ended."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._end()
        finally:
            self._lock.release()
        return True

    def close(self) -> None:
        """End the process, whatever it does."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()
        self._processes.leave(self)

    def _begin(self) -> None:
        if time.monotonic() < self._not_before_s:
            raise WorkerUnavailableError(
                f"the {self._work} has just failed; send the request again later",
                retry_after_s=self._not_before_s - time.monotonic(),
            )
        self._end()
        self._processes.leave(self)
        self._processes.enter(self)
        confinement = self._processes.confinement
        command = [sys.executable, "-m", self._module]
        command += [str(confinement.memory_bytes), str(confinement.timeout_s)]
        command += [str(confinement.start_timeout_s)]
        variables = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=variables | {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
            bufsize=0,
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def _exchange(self, request: bytes, timeout_s: float) -> Any:
        try:
            answer = self._answer_to(request, time.monotonic() + timeout_s)
        except (OSError, EOFError, ValueError, KeyError) as error:
            self._end()
            self._processes.leave(self)
            self._num_failures += 1
            pause_s = min(_FIRST_PAUSE_S * 2 ** (self._num_failures - 1), self._max_pause_s)
            self._not_before_s = time.monotonic() + pause_s
            CONFINED_ENDS.labels(self._work).inc()
            raise WorkEndedError(
                f"took more than {timeout_s:g} s or {self._processes.confinement.memory_bytes} "
                "bytes, or it crashed"
            ) from error
        if "refusal" in answer:
            raise RefusedByWorkError(str(answer["refusal"]))
        return answer["answer"]

    def _answer_to(self, request: bytes, deadline_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        left = memoryview(framed(request))
        while left:
            self._wait(process.stdin.fileno(), select.POLLOUT, deadline_s)
            left = left[os.write(process.stdin.fileno(), left[:_READ_BYTES]) :]
        received = bytearray()
        size = HEAD_BYTES
        while len(received) < size:
            self._wait(process.stdout.fileno(), select.POLLIN, deadline_s)
            chunk = os.read(process.stdout.fileno(), _READ_BYTES)
            if not chunk:
                raise EOFError("the process has ended")
            received += chunk
            if len(received) >= HEAD_BYTES:
                size = HEAD_BYTES + int.from_bytes(received[:HEAD_BYTES], "big")
                if size > MAX_ANSWER_BYTES:
                    raise ValueError("the answer is too large")
        answer = json.loads(received[HEAD_BYTES:])
        if not isinstance(answer, dict):
            raise ValueError("the answer is no object")
        return answer

    def _wait(self, descriptor: int, event: int, deadline_s: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError("the process does not answer")

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
