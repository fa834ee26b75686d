"""The pool of worker processes: binds them to projects, replaces what is lost.

An instance stays with the worker that created it, and a worker serves one project only: what a
program leaves in its process is never seen by another tenant. An instance gets a process of its
own for as long as the limits allow. One that hangs or crashes then takes no other along. Beyond
the limits, instances of a project share its processes. In a full pool an idle worker of
another project is replaced. Workers get variables by name alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence

from tinsmith_environment.metrics import WORKER_RESTARTS, WORKER_START_SECONDS
from tinsmith_environment.workers.confinement import ProcessLimits, allow_open_files, guard_pod
from tinsmith_environment.workers.descendants import (
    count_descendants,
    end_orphans,
    num_threads_of_system,
)
from tinsmith_environment.workers.starters import ProcessSettings, WorkerStarter, worker_starter
from tinsmith_environment.workers.worker import (
    CRASHED,
    STOPPED,
    ClassDescription,
    Worker,
    WorkerProcess,
)
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
# A look at so many workers takes a few milliseconds.
_NUM_COUNTED_AT_ONCE = 64
_START_POLL_S = 0.02
_NUM_OTHER_FILES, _NUM_FILES_OF_WORKER = 1024, 2
# There are more processes than cores, and a process with threads cannot be forked.
_FEW_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Of all pools of this process, whose children they are.
_all_starters: set[WorkerStarter] = set()
_all_starting: set[WorkerStarter] = set()


class WorkerPool:
    """Keeps a number of worker processes alive; implements `Workers`.

    Args:
        num_workers: Processes that are kept, in use or not.
        max_workers: Most processes of all projects; at least `num_workers`.
        max_project_workers: Most processes of one project; at least `num_workers`.
        idle_s: Time after which an idle process that is not kept ends.
        modules: What is imported before workers are forked, which each of them needs.
        step_timeout_s: Longest time of one call.
        start_timeout_s: Longest time that a process takes to start.
        python_path: Folders in which workers look for modules, before the installed ones.
        show_output: Whether what workers print goes to the pod's standard error.
        max_output_bytes: Of that, by worker.
        max_reply_bytes: Of one answer.
        limits: Hard limits of each worker.
        variables: Names of further variables of the pod that workers get.
        closed_folders: What workers find empty, where they have the pod's user.
        uid_base: First of the users that workers get, one each; 0 leaves them the pod's.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        max_workers: int = 64,
        max_project_workers: int = 64,
        idle_s: float = 60.0,
        modules: Sequence[str] = (),
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 60.0,
        python_path: str = "",
        show_output: bool = False,
        max_output_bytes: int = 2**20,
        max_reply_bytes: int = 64 * 2**20,
        limits: ProcessLimits | None = None,
        variables: frozenset[str] = frozenset(),
        closed_folders: Sequence[str] = (),
        uid_base: int = 0,
    ) -> None:
        self._num_workers = num_workers
        self._max_workers = max(max_workers, num_workers)
        self._max_project_workers = max(max_project_workers, num_workers)
        self._idle_s = idle_s
        self._step_timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._show_output = show_output
        self._max_output_bytes = max_output_bytes
        self._max_reply_bytes = max_reply_bytes
        self._limits = limits or ProcessLimits()
        self._uid_base = uid_base
        self._uids: set[int] = set()
        own = allowed_variables(os.environ, variables)
        paths = [path for path in (python_path, own.get("PYTHONPATH")) if path]
        self._starter = worker_starter(
            ProcessSettings(
                limits=self._limits,
                variables={**_FEW_THREADS, **own, "PYTHONPATH": os.pathsep.join(paths)},
                max_reply_bytes=max_reply_bytes,
                has_own_user=bool(uid_base),
                closed_folders=closed_folders,
                modules=modules,
                shows_output=show_output,
                start_timeout_s=start_timeout_s,
            )
        )
        self._workers: list[WorkerProcess] = []
        self._idle_since_s: dict[WorkerProcess, float] = {}
        self._keepers: set[asyncio.Task[None]] = set()
        self._counter: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._is_stopping = False

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """The processes that live."""
        return tuple(self._workers)

    @property
    def fork_servers(self) -> Sequence[int]:
        """Numbers of the processes that workers are forked from."""
        return self._starter.pids

    async def start(self) -> None:
        """Start all processes.

        Raises:
            EnvironmentFailedError: If they do not come up.
        """
        guard_pod(has_own_users=bool(self._uid_base))
        allow_open_files(_NUM_OTHER_FILES + _NUM_FILES_OF_WORKER * self._max_workers)
        await self._open_starter()
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
        await self._starter.close()
        _all_starters.discard(self._starter)
        await _end_orphans()

    async def assign(self, project: str) -> Worker:
        """Return the worker of a project with the fewest instances; see `Workers`."""
        worker = self._find(project)
        if worker is None:
            async with self._turn:
                worker = self._find(project) or await self._make_room()
        worker.project = project
        return worker

    async def describe(self, class_path: str) -> ClassDescription:
        """Return what a class of environments says of itself."""
        worker = next((worker for worker in self._workers if worker.loss is None), None)
        if worker is None:
            raise UnavailableError("no worker process lives")
        return await worker.describe(class_path)

    def _find(self, project: str) -> WorkerProcess | None:
        """Return a worker that a project can have at once; None if one is to be started."""
        alive = [worker for worker in self._workers if worker.loss is None]
        own = [worker for worker in alive if worker.project == project]
        least = min(own, key=lambda worker: worker.num_instances, default=None)
        if least is not None and not least.num_instances:
            return least
        if len(own) < self._max_project_workers:
            unused = next((worker for worker in alive if worker.project is None), None)
            if unused is not None or len(alive) < self._max_workers:
                return unused
        return least

    async def _make_room(self) -> WorkerProcess:
        """Return a new worker, in the place of an idle one if the pool is full."""
        if len(self._workers) >= self._max_workers:
            idle = next((w for w in self._workers if w.loss is None and not w.num_instances), None)
            if idle is None:
                raise WorkerUnavailableError(
                    f"all {self._max_workers} worker processes of the environment pod serve other "
                    "projects; retry later",
                    retry_after_s=5.0,
                )
            self._workers.remove(idle)
            idle.kill(STOPPED, "its worker process was given to another project")
            await idle.wait_lost()
        try:
            return await self._launch()
        except (EnvironmentFailedError, OSError) as error:
            raise WorkerUnavailableError(
                "a worker process of the environment pod did not start; send the request again",
                retry_after_s=1.0,
            ) from error

    async def _launch(self) -> WorkerProcess:
        await self._open_starter()
        uid = self._take_uid()
        worker = WorkerProcess(
            self._starter,
            step_timeout_s=self._step_timeout_s,
            show_output=self._show_output,
            max_output_bytes=self._max_output_bytes,
            max_reply_bytes=self._max_reply_bytes,
            uid=uid,
        )
        begin_s = time.perf_counter()
        try:
            await worker.start(self._start_timeout_s)
        except BaseException:
            if worker.pid:
                worker.kill(STOPPED, "its worker process did not start")
                await worker.wait_lost()
            self._give_uid(worker)
            raise
        WORKER_START_SECONDS.observe(time.perf_counter() - begin_s)
        self._workers.append(worker)
        keeper = asyncio.create_task(self._keep(worker))
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)
        return worker

    async def _open_starter(self) -> None:
        _all_starting.add(self._starter)
        try:
            await self._starter.open()
            _all_starters.add(self._starter)
        finally:
            _all_starting.discard(self._starter)

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
        await _end_orphans()
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
        """End workers that started too many processes, and those that are idle for long."""
        num_threads, counted_s = 0, 0.0
        while True:
            await asyncio.sleep(_COUNT_INTERVAL_S)
            self._end_idle()
            limit, now_s = self._limits.max_processes, time.monotonic()
            workers = self.workers
            # One that grows past the limit shows in the number of all; a look at each takes time.
            has_grown = num_threads_of_system() > num_threads + limit // 4
            interval_s = _COUNT_INTERVAL_S * len(workers) / _NUM_COUNTED_AT_ONCE
            if not limit or not (has_grown or now_s - counted_s >= interval_s):
                continue
            num_threads, counted_s = num_threads_of_system(), now_s
            numbers = await asyncio.to_thread(count_descendants, [worker.pid for worker in workers])
            for worker, number in zip(workers, numbers, strict=True):
                if worker.loss is None and number > limit:
                    message = f"it started more than {limit} processes, so they were stopped"
                    worker.kill(CRASHED, message)

    def _end_idle(self) -> None:
        now_s = time.monotonic()
        idle = {
            worker for worker in self._workers if worker.loss is None and not worker.num_instances
        }
        self._idle_since_s = {
            worker: self._idle_since_s.get(worker, now_s)
            for worker in self._workers
            if worker in idle
        }
        for worker, since_s in list(self._idle_since_s.items()):
            if len(self._workers) > self._num_workers and now_s - since_s >= self._idle_s:
                self._workers.remove(worker)
                worker.kill(STOPPED, "its worker process was idle")

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


async def _end_orphans() -> None:
    """End what dead workers of all pools left to this process."""
    while _all_starting:
        # The number of a process that is being started is not known yet.
        await asyncio.sleep(_START_POLL_S)
    end_orphans({pid for starter in _all_starters for pid in starter.pids})
