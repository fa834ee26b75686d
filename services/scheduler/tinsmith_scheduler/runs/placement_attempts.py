"""One try to place a run: the policy's choice written down, then the trainer asked.

Shared by creations, which give up in the end, and moves, which never do.
"""

from __future__ import annotations

from collections.abc import Collection

from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import (
    AbortedError,
    CapacityExhaustedError,
    ErrorCode,
    TinsmithError,
    WorkerUnavailableError,
)
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.store.records import Run
from tinsmith_scheduler.workers.placement import Wait
from tinsmith_scheduler.workers.trainer_protocol import Trainers
from tinsmith_scheduler.workers.workers import Workers


class TrainerFullError(CapacityExhaustedError):
    """A trainer has no place for a run, and did not take it."""

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(
            f"trainer {worker} has no room: {message}", retry_after_s=10.0, worker=worker
        )
        self.worker = worker


class Adoptions:
    """Places runs, one try at a time."""

    def __init__(self, database: Database, *, workers: Workers, trainers: Trainers) -> None:
        self._database = database
        self._workers = workers
        self._trainers = trainers

    async def choose(self, run: Run, refused: Collection[str]) -> Run | Wait | None:
        """Choose a trainer and write it down; see `run_store.place_run`."""
        trainers = self._workers.trainers()
        failpoints.passing("scheduler.place")
        placed = await self._database.write(
            lambda connection: run_store.place_run(connection, run.name, trainers, refused=refused)
        )
        failpoints.passing("scheduler.placed")
        return placed

    async def adopt(self, placed: Run) -> str:
        """Have the chosen trainer adopt a run; return its address.

        Raises:
            TrainerFullError: If the trainer is full; it does not hold the run.
            WorkerUnavailableError: If it is not known whether the trainer holds the run, or not
                yet possible.
            TinsmithError: If the run is refused for good.
        """
        address = self._workers.address(placed.worker)
        try:
            if not address:
                raise WorkerUnavailableError(f"trainer {placed.worker} stopped its heartbeat")
            failpoints.passing("scheduler.adopt")
            await self._trainers.adopt_run(
                address,
                run=placed.name,
                epoch=placed.epoch,
                base_model=placed.base_model,
                adapter=placed.adapter,
                history_retention_s=placed.history_s,
            )
        except TinsmithError as error:
            await self._note_refusal(placed, error)
        failpoints.passing("scheduler.adopted")
        return address

    async def activate(self, placed: Run) -> bool:
        """Let clients use a run that was adopted; return False if it was deleted meanwhile."""
        is_active = await self._database.write(
            lambda connection: run_store.activate_run(connection, placed)
        )
        failpoints.passing("scheduler.activated")
        return is_active

    async def _note_refusal(self, placed: Run, error: TinsmithError) -> None:
        """Raise what a refusal means for the placement."""
        if error.code is ErrorCode.UNAVAILABLE or error.code is ErrorCode.DEADLINE_EXCEEDED:
            raise WorkerUnavailableError(
                f"trainer {placed.worker} cannot adopt the run now: {error.message}",
                worker=placed.worker,
            ) from error
        next_epoch = placed.epoch + 1 if error.code is AbortedError.code else None
        await self._database.write(
            lambda connection: run_store.unplace_run(connection, placed, next_epoch=next_epoch)
        )
        if error.reason == CapacityExhaustedError.reason:
            raise TrainerFullError(placed.worker, error.message) from error
        if next_epoch is not None:
            raise WorkerUnavailableError(error.message, worker=placed.worker) from error
        raise error
