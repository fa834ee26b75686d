"""The pool of worker processes: binds them to projects, replaces what is lost.

An instance stays with the worker that created it, and a worker serves one project only: what a
program leaves in its process is never seen by another tenant. A project has as many workers as the
pool keeps. When none is free for a project, an idle worker of another one is replaced by a new
process. If none is idle, one more is started, up to a limit. Workers get variables by name alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence

from tinsmith_environment.environment import JsonValue
from tinsmith_environment.metrics import WORKER_RESTARTS
from tinsmith_environment.workers.confinement import ProcessLimits, guard_pod
from tinsmith_environment.workers.descendants import count_descendants, end_orphans
from tinsmith_environment.workers.worker import CRASHED, STOPPED, Worker, WorkerProcess
from tinsmith_runtime.errors import (
    EnvironmentFailedError,
    UnavailableError,
    WorkerUnavailableError,
)
from tinsmith_runtime.variables import allowed_variables

logger = logging.getLogger(__name__)

_MIN_RESTART_DELAY_S = 0.05
_MAX_RESTART_DELAY_S = 5.0
_COUNT_INTERVAL_S = 0.25
_START_POLL_S = 0.02
# Of all pools of this process, whose children they are.
_all_workers: set[WorkerProcess] = set()
_all_starting: set[WorkerProcess] = set()


class WorkerPool:
    """Keeps a number of worker processes alive; implements `Workers`.

    Args:
        num_workers: Processes that are kept, and the most of one project.
        max_workers: Most processes of all projects; at least `num_workers`.
        step_timeout_s: Longest time of one call.
        start_timeout_s: Longest time that a process takes to start.
        python_path: Folders in which workers look for modules, before the installed ones.
        show_output: Whether what workers print goes to the pod's standard error.
        max_output_bytes: Of that, by worker.
        max_reply_bytes: Of one answer.
        limits: Hard limits of each worker.
        variables: Names of further variables of the pod that workers get.
        uid_base: First of the users that workers get, one each; 0 leaves them the pod's.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        max_workers: int = 64,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 60.0,
        python_path: str = "",
        show_output: bool = False,
        max_output_bytes: int = 2**20,
        max_reply_bytes: int = 64 * 2**20,
        limits: ProcessLimits | None = None,
        variables: frozenset[str] = frozenset(),
        uid_base: int = 0,
    ) -> None:
        self._num_workers = num_workers
        self._max_workers = max(max_workers, num_workers)
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._show_output = show_output
        self._max_output_bytes = max_output_bytes
        self._max_reply_bytes = max_reply_bytes
        self._limits = limits or ProcessLimits()
        self._uid_base = uid_base
        self._uids: set[int] = set()
        self._variables = allowed_variables(os.environ, variables)
        paths = [path for path in (python_path, self._variables.get("PYTHONPATH")) if path]
        self._variables["PYTHONPATH"] = os.pathsep.join(paths)
        self._workers: list[WorkerProcess] = []
        self._keepers: set[asyncio.Task[None]] = set()
        self._counter: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
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
        guard_pod(has_own_users=bool(self._uid_base))
        first = await asyncio.gather(
            *(self._launch() for _ in range(self._num_workers)), return_exceptions=True
        )
        for worker in first:
            if isinstance(worker, BaseException):
                await self.stop()
                raise worker
        self._counter = asyncio.create_task(self._count())

    async def stop(self) -> None:
        """End all processes."""
        self._is_stopping = True
        tasks = [*self._keepers, *([self._counter] if self._counter is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill(STOPPED, "the environment pod was shut down")
        await asyncio.gather(*(worker.wait_lost() for worker in workers))
        _all_workers.difference_update(workers)
        while _all_starting:
            await asyncio.sleep(_START_POLL_S)
        end_orphans({each.pid for each in _all_workers})

    async def assign(self, project: str) -> Worker:
        """Return the worker of a project with the fewest instances; see `Workers`."""
        worker = self._find(project)
        if worker is None:
            async with self._turn:
                worker = self._find(project) or await self._make_room()
        worker.project = project
        return worker

    async def describe(self, class_path: str) -> tuple[str, dict[str, JsonValue]]:
        """Return description and default config of an environment class."""
        worker = next((worker for worker in self._workers if worker.loss is None), None)
        if worker is None:
            raise UnavailableError("no worker process lives")
        return await worker.describe(class_path)

    def _find(self, project: str) -> WorkerProcess | None:
        """Return a worker of a project, or of none."""
        alive = [worker for worker in self._workers if worker.loss is None]
        own = [worker for worker in alive if worker.project == project]
        least = min(own, key=lambda worker: worker.num_instances, default=None)
        if least is not None and (not least.num_instances or len(own) >= self._num_workers):
            return least
        return next((worker for worker in alive if worker.project is None), least)

    async def _make_room(self) -> WorkerProcess:
        """Return a new worker, in the place of an idle one if there is one."""
        alive = [worker for worker in self._workers if worker.loss is None]
        if not alive:
            raise WorkerUnavailableError(
                "all worker processes of the environment pod are being replaced; send the "
                "request again",
                retry_after_s=1.0,
            )
        idle = next((worker for worker in alive if not worker.num_instances), None)
        if idle is not None:
            self._workers.remove(idle)
            idle.kill(STOPPED, "its worker process was given to another project")
            await idle.wait_lost()
        elif len(self._workers) >= self._max_workers:
            raise WorkerUnavailableError(
                f"all {self._max_workers} worker processes of the environment pod serve other "
                "projects; retry later",
                retry_after_s=5.0,
            )
        try:
            return await self._launch()
        except (EnvironmentFailedError, OSError) as error:
            raise WorkerUnavailableError(
                "a worker process of the environment pod did not start; send the request again",
                retry_after_s=1.0,
            ) from error

    async def _launch(self) -> WorkerProcess:
        uid = self._take_uid()
        told = {"limits": self._limits.to_json(), "has_own_user": uid is not None}
        worker = WorkerProcess(
            # -P: the folder that the pod was started in is no place to import from.
            [
                *(sys.executable, "-P", "-m", "tinsmith_environment.workers.process"),
                json.dumps(told),
            ],
            self._variables,
            step_timeout_s=self._step_timeout_s,
            show_output=self._show_output,
            max_output_bytes=self._max_output_bytes,
            max_reply_bytes=self._max_reply_bytes,
            uid=uid,
        )
        _all_starting.add(worker)
        try:
            await worker.start(self._start_timeout_s)
        except BaseException:
            if worker.pid:
                worker.kill(STOPPED, "its worker process did not start")
                await worker.wait_lost()
            self._give_uid(worker)
            raise
        finally:
            _all_starting.discard(worker)
        self._workers.append(worker)
        _all_workers.add(worker)
        keeper = asyncio.create_task(self._keep(worker))
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)
        return worker

    async def _keep(self, worker: WorkerProcess) -> None:
        """Clear up after a worker that is lost; replace it if too few are left."""
        loss = await worker.wait_lost()
        is_replaced = worker not in self._workers
        if not is_replaced:
            self._workers.remove(worker)
            WORKER_RESTARTS.labels(loss.cause).inc()
            logger.warning("worker lost", extra={"cause": loss.cause, "worker_pid": worker.pid})
        # What it started may have outlived it.
        worker.kill(loss.cause, loss.message)
        _all_workers.discard(worker)
        while _all_starting:
            # The number of a process that is being started is not known yet.
            await asyncio.sleep(_START_POLL_S)
        end_orphans({each.pid for each in _all_workers})
        self._give_uid(worker)
        delay_s = _MIN_RESTART_DELAY_S
        while not is_replaced and not self._is_stopping:
            async with self._turn:
                if len(self._workers) >= self._num_workers:
                    return
                try:
                    await self._launch()
                    return
                except (EnvironmentFailedError, OSError):
                    logger.exception("worker did not start", extra={"retry_in_s": delay_s})
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_RESTART_DELAY_S)

    async def _count(self) -> None:
        """End workers that started too many processes."""
        while True:
            await asyncio.sleep(_COUNT_INTERVAL_S)
            limit = self._limits.max_processes
            workers = self.workers
            numbers = await asyncio.to_thread(count_descendants, [worker.pid for worker in workers])
            for worker, number in zip(workers, numbers, strict=True):
                if limit and worker.loss is None and number > limit:
                    message = f"it started more than {limit} processes, so they were stopped"
                    worker.kill(CRASHED, message)

    def _take_uid(self) -> int | None:
        if not self._uid_base:
            return None
        uid = self._uid_base
        while uid in self._uids:
            uid += 1
        self._uids.add(uid)
        return uid

    def _give_uid(self, worker: WorkerProcess) -> None:
        if worker.uid is not None:
            self._uids.discard(worker.uid)
