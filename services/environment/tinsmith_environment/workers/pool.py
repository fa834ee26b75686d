"""The pool of worker processes: assigns instances, replaces what is lost.

An instance stays with the worker that created it. Workers get none of the pod's `TINSMITH_*`
variables, which hold its key.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from tinsmith_environment.environment import JsonValue
from tinsmith_environment.metrics import WORKER_RESTARTS
from tinsmith_environment.workers.worker import STOPPED, Worker, WorkerProcess
from tinsmith_runtime.errors import (
    EnvironmentFailedError,
    UnavailableError,
    WorkerUnavailableError,
)

logger = logging.getLogger(__name__)

_MIN_RESTART_DELAY_S = 0.05
_MAX_RESTART_DELAY_S = 5.0


class WorkerPool:
    """Keeps a number of worker processes alive; implements `Workers`.

    Args:
        num_workers: Number of processes.
        step_timeout_s: Longest time of one call.
        start_timeout_s: Longest time that a process takes to start.
        python_path: Folders in which workers look for modules, before the installed ones.
        show_output: Whether workers share the pod's standard error.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 60.0,
        python_path: str = "",
        show_output: bool = False,
    ) -> None:
        self._num_workers = num_workers
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._show_output = show_output
        self._variables = {
            key: value for key, value in os.environ.items() if not key.startswith("TINSMITH_")
        }
        paths = [path for path in (python_path, self._variables.get("PYTHONPATH")) if path]
        self._variables["PYTHONPATH"] = os.pathsep.join(paths)
        self._workers: list[WorkerProcess] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._is_stopping = False

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """The processes that live."""
        return tuple(self._workers)

    async def start(self) -> None:
        """Start all processes.

        Raises:
            EnvironmentFailedError: If they do not come up.
        """
        first = await asyncio.gather(
            *(self._launch() for _ in range(self._num_workers)), return_exceptions=True
        )
        for worker in first:
            if isinstance(worker, BaseException):
                await self.stop()
                raise worker
            self._keepers.append(asyncio.create_task(self._keep(worker)))

    async def stop(self) -> None:
        """End all processes."""
        self._is_stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill(STOPPED, "the environment pod was shut down")
        await asyncio.gather(*(worker.wait_lost() for worker in workers))

    def assign(self) -> Worker:
        """Return the worker with the fewest instances; see `Workers`."""
        alive = [worker for worker in self._workers if worker.loss is None]
        if not alive:
            raise WorkerUnavailableError(
                "all worker processes of the environment pod are being replaced; send the "
                "request again",
                retry_after_s=1.0,
            )
        return min(alive, key=lambda worker: worker.num_instances)

    async def describe(self, class_path: str) -> tuple[str, dict[str, JsonValue]]:
        """Return description and default config of an environment class."""
        worker = next((worker for worker in self._workers if worker.loss is None), None)
        if worker is None:
            raise UnavailableError("no worker process lives")
        return await worker.describe(class_path)

    async def _launch(self) -> WorkerProcess:
        worker = WorkerProcess(
            # -P: the folder that the pod was started in is no place to import from.
            [sys.executable, "-P", "-m", "tinsmith_environment.workers.process"],
            self._variables,
            step_timeout_s=self._step_timeout_s,
            show_output=self._show_output,
        )
        try:
            await worker.start(self._start_timeout_s)
        except BaseException:
            if worker.pid:
                worker.kill(STOPPED, "its worker process did not start")
                await worker.wait_lost()
            raise
        self._workers.append(worker)
        return worker

    async def _keep(self, worker: WorkerProcess) -> None:
        """Replace a worker whenever it is lost."""
        delay_s = _MIN_RESTART_DELAY_S
        while not self._is_stopping:
            loss = await worker.wait_lost()
            self._workers.remove(worker)
            WORKER_RESTARTS.labels(loss.cause).inc()
            logger.warning("worker lost", extra={"cause": loss.cause, "worker_pid": worker.pid})
            # What it started may have outlived it.
            worker.kill(loss.cause, loss.message)
            while True:
                try:
                    worker = await self._launch()
                    delay_s = _MIN_RESTART_DELAY_S
                    break
                except (EnvironmentFailedError, OSError):
                    logger.exception("worker did not start", extra={"retry_in_s": delay_s})
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, _MAX_RESTART_DELAY_S)
