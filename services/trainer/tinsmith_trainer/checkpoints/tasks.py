"""Copies, exports and imports as operations: accepted durably, done in the background, waited for.

They are in no run's order and do not use the engine's thread. A task that a restart cut off is done
again. Its end and the row that it makes are one commit, under the fence of its run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tinsmith.names import RunName
from tinsmith_runtime.errors import (
    OperationNotFoundError,
    OutcomeUnknownError,
    StorageBusyError,
    StorageFullError,
    StorageUnavailableError,
    TinsmithError,
    internal_error,
)
from tinsmith_runtime.fairness.fair_slots import FairSlots
from tinsmith_runtime.ledger import (
    CheckpointRecord,
    ExportRecord,
    Ledger,
    OperationState,
    TaskRecord,
)
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.shielded import start
from tinsmith_trainer.checkpoints.transfers import CheckpointWork, ImportWork, Made, TaskWork
from tinsmith_trainer.metrics import CHECKPOINT_TASKS
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.storage_retry import STORAGE_RETRY_S

logger = logging.getLogger(__name__)

_NUM_AT_ONCE, _NUM_OF_PROJECT = 6, 2
"""Tasks that run at once; those of one project leave the others theirs."""
_MAX_PENDING = 64
_PASSING = (StorageFullError, StorageBusyError, StorageUnavailableError, OutcomeUnknownError)


class TaskCodec(Protocol):
    """The stored form of tasks and their results."""

    def decode_task(self, kind: str, checkpoint: str, payload: bytes) -> TaskWork:
        """Return the work of a stored request."""
        ...

    def encode_made(self, made: Made) -> bytes:
        """Return the serialised response."""
        ...

    def encode_error(self, error: TinsmithError) -> bytes:
        """Return the serialised `google.rpc.Status`."""
        ...


@dataclass(slots=True)
class TaskProgress:
    """How far a task is."""

    is_running: bool = False
    done_bytes: int = 0
    total_bytes: int = 0

    def note(self, done_bytes: int, total_bytes: int) -> None:
        """Note what is written."""
        self.done_bytes, self.total_bytes = done_bytes, total_bytes


class CheckpointTasks:
    """The tasks of the runs that this trainer holds.

    Args:
        ledger: Where they are durable.
        work: Does them.
        codec: Their stored form.
        find_run: Returns a run that this trainer holds, asleep or not, or None.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        ledger: Ledger,
        work: CheckpointWork,
        codec: TaskCodec,
        *,
        find_run: Callable[[str], Awaitable[LiveRun | None]],
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._work = work
        self._codec = codec
        self._find_run = find_run
        self._clock = clock
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tidying: set[asyncio.Task[None]] = set()
        self._progress: dict[str, TaskProgress] = {}
        self._turns = FairSlots(_NUM_AT_ONCE, _NUM_OF_PROJECT)

    async def recover(self) -> None:
        """Go on with what another process left of the runs that this trainer holds.

        Repeating it changes nothing.
        """
        for task in await self._ledger.list_pending_tasks():
            if task.name in self._running or await self._find_run(task.run) is None:
                continue
            # It may have begun while the run was looked up.
            if task.name not in self._running:
                self._begin(task)

    async def stop(self) -> None:
        """Stop what runs; it is done again after the restart."""
        tasks = [*self._running.values(), *self._tidying]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, task: TaskRecord) -> TaskRecord:
        """Accept a task, or return the one that the same request made before.

        Raises:
            RunNotFoundError: If the run was deleted.
            RequestIdReusedError: If the request id has another digest.
            QueueFullError: If too many tasks of the project wait.
        """
        record = await self._ledger.submit_task(task, max_pending=_MAX_PENDING)
        if record.state is OperationState.PENDING and record.name not in self._running:
            self._begin(record)
        return record

    async def find(self, name: str) -> TaskRecord | None:
        """Return a task that was accepted before, or None."""
        return await self._ledger.get_task(name)

    async def get(self, name: str) -> TaskRecord:
        """Return a task as it stands.

        Raises:
            OperationNotFoundError: If there is none of this name.
        """
        record = await self._ledger.get_task(name)
        if record is None:
            raise OperationNotFoundError(
                f"operation {name} does not exist; it was not accepted, or ended over a week ago",
                operation=name,
            )
        return record

    async def wait(self, name: str, timeout_s: float) -> TaskRecord:
        """Return a task once it ended, or as it stands when the time is over."""
        running = self._running.get(name)
        if running is not None:
            await asyncio.wait({running}, timeout=timeout_s)
        return await self.get(name)

    async def uploads_in_use(self, project: str) -> frozenset[str]:
        """Return the uploads of a project whose imports have not ended."""
        works = [
            self._codec.decode_task(task.kind, task.checkpoint, task.payload)
            for task in await self._ledger.list_pending_tasks()
            if RunName.parse(task.run).project == project
        ]
        return frozenset(work.upload for work in works if isinstance(work, ImportWork))

    def progress(self, name: str) -> TaskProgress:
        """Return how far a task is."""
        return self._progress.get(name, TaskProgress())

    def _begin(self, task: TaskRecord) -> None:
        progress = self._progress[task.name] = TaskProgress()
        running = asyncio.create_task(self._execute(task, progress))
        self._running[task.name] = running
        running.add_done_callback(lambda _: self._forget(task.name))

    def _forget(self, name: str) -> None:
        self._running.pop(name, None)
        self._progress.pop(name, None)

    async def _execute(self, task: TaskRecord, progress: TaskProgress) -> None:
        async with self._turns.hold(RunName.parse(task.run).project):
            progress.is_running = True
            run = await self._find_run(task.run)
            if run is None:
                return
            # It may have ended since it was listed: done again, it would take its own files away.
            record = await self._ledger.get_task(task.name)
            if record is None or record.state is not OperationState.PENDING:
                return
            try:
                await self._do(run, task, progress)
            except FencedError as error:
                # The run is another process's, or deleted: so is the task.
                logger.warning("task given up", extra={"task": task.name, "problem": str(error)})
            except Exception:
                logger.exception("task not ended; tried again after a restart")

    async def _do(self, run: LiveRun, task: TaskRecord, progress: TaskProgress) -> None:
        work = self._codec.decode_task(task.kind, task.checkpoint, task.payload)
        error: TinsmithError | None = None
        task_id = task.name.rpartition("/")[2].partition("-")[2].replace("-", "")
        try:
            made = await self._work.do(run.record, work, task_id, progress.note)
            await self._commit(run, task, made)
        except FencedError:
            # Of no use to another process, and the folder of a deleted run was removed before.
            self._begin_tidying(run, task, work, task_id)
            raise
        except TinsmithError as problem:
            error = problem
        except Exception as bug:
            logger.error("task failed by a bug", exc_info=bug, extra={"task": task.name})
            error = internal_error()
        if error is not None:
            await self._commit_failure(run, task, error)
        self._begin_tidying(run, task, work, task_id)
        if not isinstance(error, StorageFullError):
            await asyncio.to_thread(self._work.end, work)
        CHECKPOINT_TASKS.labels(task.kind, "succeeded" if error is None else "failed").inc()
        logger.info(
            "task ended",
            extra={"task": task.name, "outcome": "succeeded" if error is None else error.reason},
        )

    def _begin_tidying(self, run: LiveRun, task: TaskRecord, work: TaskWork, task_id: str) -> None:
        # Beside what waits for the end of the task: the store may be slow.
        start(self._tidy(run, task, work, task_id), self._tidying)

    async def _tidy(self, run: LiveRun, task: TaskRecord, work: TaskWork, task_id: str) -> None:
        """Remove what attempts left; what remains there goes with the run."""
        try:
            await self._work.tidy(run.record, work, task_id)
        except TinsmithError as error:
            logger.warning(
                "files of attempts not removed",
                extra={"task": task.name, "problem": error.message},
            )

    async def _commit(self, run: LiveRun, task: TaskRecord, made: Made) -> None:
        result = self._codec.encode_made(made)
        await self._durably(
            task,
            lambda: self._ledger.finish_task(
                task,
                run.record.epoch,
                finish_time_s=self._clock(),
                result=result,
                checkpoint=made if isinstance(made, CheckpointRecord) else None,
                export=made if isinstance(made, ExportRecord) else None,
            ),
            ending=result,
        )

    async def _commit_failure(self, run: LiveRun, task: TaskRecord, error: TinsmithError) -> None:
        encoded = self._codec.encode_error(error)
        await self._durably(
            task,
            lambda: self._ledger.finish_task(
                task, run.record.epoch, finish_time_s=self._clock(), error=encoded
            ),
            ending=encoded,
        )

    async def _durably(
        self, task: TaskRecord, write: Callable[[], Awaitable[TaskRecord]], *, ending: bytes
    ) -> None:
        """Write the end of a task, waiting for space and for the database.

        Until it is known whether the end was written, its files must not be touched.
        """
        is_doubtful = False
        while True:
            try:
                await write()
            except _PASSING as error:
                is_doubtful |= isinstance(error, OutcomeUnknownError)
                logger.warning(
                    "task waits to be committed",
                    extra={"task": task.name, "problem": error.message},
                )
                await asyncio.sleep(STORAGE_RETRY_S)
            except FencedError:
                found = await self._ledger.get_task(task.name) if is_doubtful else None
                if found is None or ending not in (found.result, found.error):
                    raise
                return
            else:
                return
