"""Creations in progress: places recorded runs on trainers, in the background.

One task for each run, from its commit to ACTIVE or FAILED. It asks the policy, writes the choice
down, asks the trainer, and tries again until its deadline; `waiting_for` says in words what it
waits for. What it writes is conditional, so that a run that is deleted meanwhile stays deleted. A
scheduler that restarts goes on with every run that it finds unfinished.

A trainer's answer decides: adopted; refused for good (the run fails); full (another trainer is
asked, this one again after the pause); or unknown, and then the same trainer is asked again under
the same epoch, which it answers alike however often it is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from tinsmith.tracing import spans
from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import (
    CapacityExhaustedError,
    ErrorCode,
    InternalError,
    OutcomeUnknownError,
    RunClosedError,
    StorageFullError,
    StorageUnavailableError,
    TinsmithError,
    WorkerUnavailableError,
)
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.metrics import PLACEMENT_SECONDS, WAITING_RUNS
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.runs.placement_attempts import Adoptions, TrainerFullError
from tinsmith_scheduler.store.records import Run
from tinsmith_scheduler.workers.placement import Wait, WaitReason
from tinsmith_scheduler.workers.trainer_protocol import Trainers

logger = logging.getLogger(__name__)

_PASSING = (StorageFullError, StorageUnavailableError, OutcomeUnknownError)
"""What the scheduler's own database waits for to end; what is written here may be repeated."""
_NOT_STARTED = "the scheduler to choose a trainer"


class Creations:
    """The creations that have not ended.

    Args:
        database: Where runs are kept.
        adoptions: Chooses trainers and asks them.
        trainers: Asked to load what a run begins from.
        encode_error: Turns an error into the bytes that are stored with a failed run.
        timeout_s: Time that a placement may take.
        retry_s: Pause between two attempts.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        database: Database,
        *,
        adoptions: Adoptions,
        trainers: Trainers,
        encode_error: Callable[[TinsmithError], bytes],
        timeout_s: float,
        retry_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._adoptions = adoptions
        self._trainers = trainers
        self._encode_error = encode_error
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waiting_for: dict[str, str] = {}
        self._stopping = asyncio.Event()

    async def load(self) -> None:
        """Go on with what a previous process left unfinished."""
        for run in await self._database.read(run_store.list_creating):
            self.start(run)

    def start(self, run: Run) -> None:
        """Place a run that was recorded, unless that is under way or left to the next process."""
        if run.name in self._tasks or self._stopping.is_set():
            return
        task = asyncio.create_task(self._create(run))
        self._tasks[run.name] = task
        task.add_done_callback(lambda _: self._forget(run.name))

    def waiting_for(self, run: str) -> str:
        """Return what a creation waits for, in words."""
        return self._waiting_for.get(run, _NOT_STARTED)

    async def wait(self, run: str, *, timeout_s: float) -> None:
        """Return when a creation has ended, the pod stops, or the time is up."""
        task = self._tasks.get(run)
        if task is None:
            return
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait(
                {task, stopping}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            stopping.cancel()

    def release_waiters(self) -> None:
        """Let every `wait` return, because the pod stops."""
        self._stopping.set()

    async def stop(self) -> None:
        """End all tasks; what is unfinished goes on after the restart."""
        self.release_waiters()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, run: str) -> None:
        self._tasks.pop(run, None)
        self._waiting_for.pop(run, None)
        WAITING_RUNS.set(len(self._tasks))

    async def _create(self, run: Run) -> None:
        begin_s = self._clock()
        failpoints.passing("scheduler.created")
        WAITING_RUNS.set(len(self._tasks))
        try:
            with spans.block("place run", {"tinsmith.run": run.name}):
                outcome = await self._place_until(run, begin_s + self._timeout_s)
        except TinsmithError as error:
            outcome = "failed"
            await self._fail(run, error)
        except Exception:
            outcome = "failed"
            logger.exception("placement failed by a bug", extra={"run": run.name})
            await self._fail(run, InternalError("internal error; the log of the pod has the trace"))
        PLACEMENT_SECONDS.labels(outcome).observe(self._clock() - begin_s)
        logger.info("creation ended", extra={"run": run.name, "outcome": outcome})

    async def _fail(self, run: Run, error: TinsmithError) -> None:
        encoded_error = self._encode_error(error)
        while True:
            try:
                await self._database.write(
                    lambda connection: run_store.fail_run(connection, run.name, encoded_error)
                )
            except _PASSING as passing:
                self._waiting_for[run.name] = passing.message
                await asyncio.sleep(self._retry_s)
            else:
                return

    async def _place_until(self, run: Run, deadline_s: float) -> str:
        """Place a run; return the outcome.

        Raises:
            TinsmithError: If it was refused for good, or the deadline passed.
        """
        refused: set[str] = set()
        while True:
            problem: TinsmithError
            try:
                placed = await self._adoptions.choose(run, refused)
                if placed is None:
                    return "withdrawn"
                if isinstance(placed, Run):
                    self._waiting_for[run.name] = f"trainer {placed.worker} to adopt the run"
                    return await self._adopt(placed)
                problem = _wait_error(run, placed)
                refused.clear()
            except TrainerFullError as error:
                problem = error
                refused.add(error.worker)
                if self._clock() < deadline_s:
                    # Another trainer may have room now.
                    continue
            except (WorkerUnavailableError, *_PASSING) as error:
                problem = error
            self._waiting_for[run.name] = problem.message
            if self._clock() >= deadline_s:
                raise problem
            await asyncio.sleep(self._retry_s)

    async def _adopt(self, placed: Run) -> str:
        """Have a trainer take the run, with what it begins from; return the outcome."""
        address = await self._adoptions.adopt(placed)
        if placed.source_checkpoint or placed.source_run:
            placed = await self._begin_from_source(placed, address)
        return "active" if await self._adoptions.activate(placed) else "withdrawn"

    async def _begin_from_source(self, placed: Run, address: str) -> Run:
        """Have the trainer give a run the state that it begins with, before the run is visible.

        Raises:
            WorkerUnavailableError: If it is not known whether it did; asking again is right.
            TinsmithError: If it cannot.
        """
        try:
            if placed.source_run:
                return await self._fork(placed, address)
            await self._load(placed, address)
        except TinsmithError as error:
            is_unknown = error.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED)
            if is_unknown or error.retry_after_s is not None:
                source = placed.source_run or placed.source_checkpoint
                raise WorkerUnavailableError(
                    f"trainer {placed.worker} did not begin from {source} yet: {error.message}",
                    worker=placed.worker,
                ) from error
            raise
        return placed

    async def _load(self, placed: Run, address: str) -> None:
        self._waiting_for[placed.name] = f"checkpoint {placed.source_checkpoint} to be loaded"
        await self._trainers.load_checkpoint(
            address,
            run=placed.name,
            checkpoint=placed.source_checkpoint,
            include_optimizer=placed.include_optimizer,
        )

    async def _fork(self, placed: Run, address: str) -> Run:
        step = f"step {placed.source_step} of {placed.source_run}"
        self._waiting_for[placed.name] = f"{step} to be copied"
        rerun_from = await self._trainers.fork_run(
            address,
            run=placed.name,
            epoch=placed.epoch,
            source_run=placed.source_run,
            source_step=placed.source_step,
            reruns_step=placed.reruns_step,
        )
        return replace(placed, rerun_from=rerun_from)


def run_closed(run: Run) -> RunClosedError:
    """Return the error of a creation whose run was deleted."""
    return RunClosedError(f"run {run.name} was deleted; create a new one", run=run.name)


def _wait_error(run: Run, wait: Wait) -> TinsmithError:
    """Return what a creation fails with if it still waits at its deadline."""
    if wait.reason is WaitReason.FULL:
        return CapacityExhaustedError(
            f"{wait.message}; delete a run, or try again later",
            retry_after_s=10.0,
            base_model=run.base_model,
        )
    return WorkerUnavailableError(wait.message, base_model=run.base_model)
