"""The thread that owns the engines: jobs from others, and steps of its own, in turn.

Torch sees a single caller, so order is kept and nothing needs a lock. A job is a function that
somebody waits for. A stepper is a source of endless small work, such as decoding: it is called
between jobs for as long as it says that there is more, so neither can starve the other.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)

ParametersT = ParamSpec("ParametersT")
ResultT = TypeVar("ResultT")
Stepper = Callable[[], bool]
FailureHandler = Callable[[Exception], None]


class EngineThread:
    """One daemon thread.

    Args:
        num_threads: Threads that torch uses inside an operation; None leaves torch's own choice.
    """

    def __init__(self, *, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._steppers: list[tuple[Stepper, FailureHandler]] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        function: Callable[ParametersT, ResultT],
        *args: ParametersT.args,
        **kwargs: ParametersT.kwargs,
    ) -> Future[ResultT]:
        """Run a function on the thread, after the jobs that wait already.

        Raises:
            RuntimeError: If the thread was closed.
        """
        if self._is_closed:
            raise RuntimeError("the engine thread is closed")
        future: Future[ResultT] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._jobs.put(job)
        return future

    def add_stepper(self, step: Stepper, on_failure: FailureHandler) -> None:
        """Call `step` between jobs while it returns True; `wake` makes it be asked again.

        Args:
            step: Does a little work; returns whether there is more.
            on_failure: Told of an exception of `step`, on this thread; stepping goes on.
        """
        self.submit(self._steppers.append, (step, on_failure)).result()

    def wake(self) -> None:
        """Have the steppers asked whether they have work."""
        self._jobs.put(_nothing)

    def close(self, timeout_s: float) -> None:
        """Finish the jobs that wait, and end.

        Raises:
            TimeoutError: If a job runs longer than this.
        """
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine thread still runs a job after {timeout_s:g} s")

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        has_more = False
        while True:
            try:
                job = self._jobs.get(block=not has_more)
            except queue.Empty:
                job = _nothing
            if job is None:
                return
            job()
            has_more = self._step_all()

    def _step_all(self) -> bool:
        has_more = False
        for step, on_failure in self._steppers:
            try:
                has_more = step() or has_more
            except Exception as error:
                logger.exception("a step on the engine thread failed")
                self._tell(on_failure, error)
        return has_more

    @staticmethod
    def _tell(on_failure: FailureHandler, error: Exception) -> None:
        try:
            on_failure(error)
        except Exception:
            logger.exception("the handler of a failed step failed")


def _nothing() -> Any:
    return None
