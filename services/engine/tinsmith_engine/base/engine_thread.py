"""One thread that owns the engines of a process.

The engine takes one caller at a time, and an event loop must never compute; so everything that
touches an engine is a job on this thread. A long job comes in parts. Steppers are engines with work
of their own, such as a sampler between tokens.

The thread goes round: the jobs that waited, then one part of the long job that had its turn longest
ago, then a step of each stepper. No side waits for another to run dry, and a short job waits for
one part of the long ones, whatever their length.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from tinsmith_runtime.errors import DrainingError

logger = logging.getLogger(__name__)

_SHARED_S = 1.0
"""Where long jobs took turns, they will soon do so again."""

ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class _LongJob(Generic[ResultT]):
    future: Future[ResultT]
    parts: Parts[ResultT]
    on_part: Callable[[float], object] | None
    left_s: float | None = None
    """None before the first turn."""

    def run_part(self, *, is_shared: bool) -> bool:
        """Run the next part; return whether another follows."""
        if self.left_s is None and not self.future.set_running_or_notify_cancel():
            return False
        try:
            if self.left_s is None:
                self.left_s = next(self.parts)
            if self.on_part is not None:
                self.on_part(self.left_s)
            self.left_s = self.parts.send(is_shared)
        except StopIteration as end:
            self.future.set_result(end.value)
            return False
        except BaseException as error:
            self.future.set_exception(error)
            return False
        return True


@dataclass(slots=True)
class _Stepper:
    step: Callable[[], bool]
    on_error: Callable[[Exception], None] | None
    has_work: bool = True


Parts = Generator[float, bool | None, ResultT]
"""A long job. It yields before each of its parts, about how many seconds it is still to take. What
it is sent in return says whether other long jobs take turns with it: the part had better be short
then."""


def timed(
    parts: Parts[ResultT], *, clock: Callable[[], float] = time.perf_counter
) -> Parts[tuple[ResultT, float]]:
    """Return also how many seconds the parts took, without what came between them.

    Args:
        parts: Of a job.
        clock: Monotonic seconds.
    """
    busy_s = 0.0
    sent: bool | None = None
    while True:
        begin_s = clock()
        try:
            left_s = parts.send(sent)
        except StopIteration as end:
            return end.value, busy_s + clock() - begin_s
        busy_s += clock() - begin_s
        sent = yield left_s


class EngineThread:
    """Runs jobs in the order of their submission, and steppers between them.

    Args:
        num_threads: Threads of one torch operation; None leaves torch's own choice.
    """

    def __init__(self, *, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        # The one that had its turn longest ago is first.
        self._long_jobs: deque[_LongJob[Any]] = deque()
        self._shared_until_s = 0.0
        self._steppers: list[_Stepper] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self, function: Callable[ArgsT, ResultT], *args: ArgsT.args, **kwargs: ArgsT.kwargs
    ) -> Future[ResultT]:
        """Queue a call and return the future of its result or exception.

        Raises:
            DrainingError: The thread was closed.
        """
        future: Future[ResultT] = Future()
        with self._changed:
            if self._is_closing:
                raise DrainingError("the engine is shutting down; send the request again")
            self._jobs.append((future, lambda: function(*args, **kwargs)))
            self._changed.notify()
        return future

    def submit_parts(
        self, parts: Parts[ResultT], on_part: Callable[[float], object] | None = None
    ) -> Future[ResultT]:
        """Queue a long job, whose parts take turns with other work.

        Args:
            parts: The job. What it does before its first part is done within the first turn.
            on_part: Called on the engine's thread before each part, with the seconds that the job
                is still expected to take.

        Returns:
            The future of its result, or of what the generator raises. It cannot be cancelled once
            the first part has begun.

        Raises:
            DrainingError: The thread was closed.
        """
        future: Future[ResultT] = Future()
        with self._changed:
            if self._is_closing:
                raise DrainingError("the engine is shutting down; send the request again")
            self._long_jobs.append(_LongJob(future, parts, on_part))
            self._changed.notify()
        return future

    def add_stepper(
        self,
        step: Callable[[], bool],
        on_error: Callable[[Exception], None] | None = None,
    ) -> None:
        """Call `step` between jobs for as long as it returns True, that is, has work left.

        After a False it rests until `wake` or the next job. An exception is logged and given to
        `on_error`; the stepper then rests likewise.
        """
        with self._changed:
            self._steppers.append(_Stepper(step, on_error))
            self._changed.notify()

    def wake(self) -> None:
        """Ask all steppers again whether they have work."""
        with self._changed:
            self._wake_steppers()
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Finish queued jobs, take no new ones, stop.

        Args:
            timeout_s: How long to wait for the thread to end; jobs that have not begun by then
                are cancelled.

        Returns:
            Whether the thread ended in time.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            while self._jobs:
                self._jobs.popleft()[0].cancel()
            while self._long_jobs:
                self._long_jobs.popleft().future.cancel()
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while True:
            with self._changed:
                while not (self._has_jobs() or self._is_closing or self._is_stepping()):
                    self._changed.wait()
                if self._is_closing and not self._has_jobs():
                    return
                # All that wait now, so that requests which arrive together begin together; what
                # arrives meanwhile waits for a step.
                num_jobs = len(self._jobs)
                is_idle = not self._has_jobs()
                ready = [stepper for stepper in self._steppers if stepper.has_work]
            if not is_idle:
                self._run_jobs(num_jobs)
                self._run_part()
                with self._changed:
                    # A job may have given any stepper something to do.
                    self._wake_steppers()
                    ready = list(self._steppers)
            for stepper in ready:
                self._step(stepper)

    def _run_jobs(self, num_jobs: int) -> None:
        for _ in range(num_jobs):
            with self._changed:
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            _run_job(*job)

    def _run_part(self) -> None:
        with self._changed:
            if not self._long_jobs:
                return
            job = self._long_jobs.popleft()
            if self._long_jobs:
                self._shared_until_s = time.monotonic() + _SHARED_S
        if job.run_part(is_shared=time.monotonic() < self._shared_until_s):
            with self._changed:
                self._long_jobs.append(job)

    def _has_jobs(self) -> bool:
        return bool(self._jobs or self._long_jobs)

    def _is_stepping(self) -> bool:
        return any(stepper.has_work for stepper in self._steppers)

    def _wake_steppers(self) -> None:
        for stepper in self._steppers:
            stepper.has_work = True

    def _step(self, stepper: _Stepper) -> None:
        with self._changed:
            # Before the call, so that a wake during it is not lost.
            stepper.has_work = False
        has_work = False
        try:
            has_work = stepper.step()
        except Exception as error:
            logger.exception("engine stepper failed")
            _notify(stepper, error)
        if has_work:
            with self._changed:
                stepper.has_work = True


def _run_job(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _notify(stepper: _Stepper, error: Exception) -> None:
    if stepper.on_error is None:
        return
    try:
        stepper.on_error(error)
    except Exception:
        logger.exception("the owner of a failed engine stepper failed as well")
