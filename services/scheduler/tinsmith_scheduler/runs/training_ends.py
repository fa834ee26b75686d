"""Whether the training of a run is done: said by its client, and undone by what happens next.

A client says so with the number of its last operation. Trainers report each optimizer step with its
number, so that a report of an earlier step, which comes late, is told from a new step. No times are
compared.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from tinsmith.names import RunName, SessionName
from tinsmith_runtime.errors import FailedPreconditionError
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.runs.sessions import require_active
from tinsmith_scheduler.store.database import record_action
from tinsmith_scheduler.store.records import Run, RunState


class TrainingEnds:
    """Notes that the training of a run is done, or goes on.

    Args:
        database: Where runs are kept.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, database: Database, *, wall_clock: Callable[[], float]) -> None:
        self._database = database
        self._wall_clock = wall_clock

    async def finish(self, name: RunName, sequence_number: int, caller: Caller) -> Run:
        """Note that the training of a run is done; repeating it changes nothing.

        Args:
            name: Which run.
            sequence_number: The last operation of the training.
            caller: The client that says so, for the audit trail.

        Raises:
            RunNotFoundError: If there is no run of this name.
            FailedPreconditionError: If it is being created, or failed.
        """
        now_s = self._wall_clock()

        def write(connection: sa.Connection) -> Run:
            run = _require(connection, name)
            if run.finish_time_s is None or run.finish_sequence_number != sequence_number:
                run_store.finish_training(connection, run.name, sequence_number, now_s)
                record_action(
                    connection, caller, "finish_run", run.name, project=run.project, now_s=now_s
                )
            return _require(connection, name)

        return await self._database.write(write)

    async def reopen(self, name: RunName, session: SessionName, caller: Caller) -> Run:
        """Note that the training of a run goes on in a session; repeating it changes nothing.

        Raises:
            RunNotFoundError: If there is no run of this name.
            SessionNotFoundError: If there is no such session.
            SessionFinishedError: If the session was finished, or lost its heartbeat.
            FailedPreconditionError: If the run is being created, or failed.
        """
        now_s = self._wall_clock()

        def write(connection: sa.Connection) -> Run:
            run = _require(connection, name)
            require_active(connection, session)
            if run.finish_time_s is not None or run.reopened_in != str(session):
                run_store.reopen_training(connection, run.name, str(session))
                record_action(
                    connection, caller, "reopen_run", run.name, project=run.project, now_s=now_s
                )
            return _require(connection, name)

        return await self._database.write(write)


def _require(connection: sa.Connection, name: RunName) -> Run:
    """Return a run that can be trained.

    Raises:
        RunNotFoundError: If there is none of this name, or it was deleted.
        FailedPreconditionError: If it is being created, or failed.
    """
    run = run_store.require_run(connection, name)
    if run.state not in (RunState.ACTIVE, RunState.MOVING):
        raise FailedPreconditionError(
            f"run {name} is {run.state.value}; its training can be finished and reopened once it "
            "is active",
            run=str(name),
            state=run.state.value,
        )
    return run
