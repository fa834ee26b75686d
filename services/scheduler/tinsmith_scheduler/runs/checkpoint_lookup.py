"""Finds the checkpoint that a sampling session or a run begins from.

Only trainers know checkpoints. They answer the scheduler for every project, so read access is
checked here once more. A checkpoint that a project may not read does not exist for it: the error is
the same whether the run, the checkpoint or the access is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.names import CheckpointName
from tinsmith_runtime.errors import (
    CheckpointExpiredError,
    CheckpointNotFoundError,
    ErrorCode,
    FailedPreconditionError,
    NotFoundError,
    TinsmithError,
    WorkerUnavailableError,
)
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.runs.run_store import require_run
from tinsmith_scheduler.store.records import CheckpointInfo, Run, RunState
from tinsmith_scheduler.workers.trainer_protocol import Trainers
from tinsmith_scheduler.workers.workers import Workers


@dataclass(frozen=True, slots=True)
class LocatedCheckpoint:
    """A checkpoint, the run that saved it, and where its trainer is."""

    info: CheckpointInfo
    run: Run
    trainer_address: str


class CheckpointSources:
    """Finds checkpoints."""

    def __init__(self, database: Database, *, workers: Workers, trainers: Trainers) -> None:
        self._database = database
        self._workers = workers
        self._trainers = trainers

    async def find(self, name: CheckpointName, project: str | None) -> LocatedCheckpoint:
        """Return a checkpoint that a project may read: its own, or a published one.

        Args:
            name: Of the checkpoint.
            project: Of the caller; None for a pod, which reads everything.

        Raises:
            CheckpointNotFoundError: If there is none of this name for the project.
            CheckpointExpiredError: If it was the project's own, and expired.
            FailedPreconditionError: If its run, one of the project, is not active.
            WorkerUnavailableError: If its trainer cannot be asked.
        """
        is_own = project in (None, name.project)
        run = await self._database.read(
            lambda connection: require_run(connection, name.run_name, checkpoint_not_found(name))
        )
        if run.state not in (RunState.ACTIVE, RunState.MOVING):
            if not is_own:
                raise checkpoint_not_found(name)
            raise FailedPreconditionError(
                f"run {run.name} is {run.state.value}; wait for its creation to succeed",
                run=run.name,
                state=run.state.value,
            )
        address = self._workers.ledger_address(run)
        if not address:
            raise WorkerUnavailableError(
                f"the trainer of checkpoint {name} is not there at the moment; send the request "
                "again",
                checkpoint=name,
            )
        info = await self._ask(name, address, is_own=is_own)
        if not (is_own or info.is_published):
            raise checkpoint_not_found(name)
        return LocatedCheckpoint(info, run, address)

    async def _ask(self, name: CheckpointName, address: str, *, is_own: bool) -> CheckpointInfo:
        try:
            return await self._trainers.get_checkpoint(address, str(name))
        except TinsmithError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            if is_own and error.reason == CheckpointExpiredError.reason:
                raise CheckpointExpiredError(error.message, checkpoint=name) from error
            raise checkpoint_not_found(name) from error


def checkpoint_not_found(name: CheckpointName) -> NotFoundError:
    """Return the error of a checkpoint that does not exist, or may not be read."""
    return CheckpointNotFoundError(f"checkpoint {name} does not exist", checkpoint=name)
