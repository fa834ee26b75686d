"""How long the past of runs is kept: changed in the ledger, and noted.

The ledger alone decides what is dropped, and the scheduler says what it was told. So the ledger is
told first: what is said of a run is then so, also where the call broke off in between.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from tinsmith.names import RunName
from tinsmith_runtime.errors import (
    AbortedError,
    ErrorCode,
    FailedPreconditionError,
    TinsmithError,
    WorkerUnavailableError,
)
from tinsmith_runtime.keyed_locks import KeyedLocks
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.shielded import see_through
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.runs.runs import Runs
from tinsmith_scheduler.store.database import record_action
from tinsmith_scheduler.store.records import Run, RunState
from tinsmith_scheduler.workers.trainer_protocol import Trainers
from tinsmith_scheduler.workers.workers import Workers

_PASSING_CODES = frozenset(
    # A run that moves this moment is known under another epoch, or to another trainer, the next.
    {ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.NOT_FOUND, AbortedError.code}
)


class RunRetention:
    """Changes how long the past of runs is kept.

    Args:
        database: Where runs are kept.
        runs: Finds them.
        workers: Know the trainers of their ledgers.
        trainers: Asked to tell the ledgers.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        *,
        runs: Runs,
        workers: Workers,
        trainers: Trainers,
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._runs = runs
        self._workers = workers
        self._trainers = trainers
        self._wall_clock = wall_clock
        self._locks = KeyedLocks()

    async def change(self, name: RunName, history_retention_s: float, caller: Caller) -> Run:
        """Change how long the past of a run is kept, and return it; repeating it changes nothing.

        Raises:
            RunNotFoundError: If there is no run of this name.
            FailedPreconditionError: If it is being created, or failed.
            WorkerUnavailableError: If no trainer on its ledger could be reached.
        """
        return await see_through(self._change(name, history_retention_s, caller))

    async def _change(self, name: RunName, history_retention_s: float, caller: Caller) -> Run:
        # One after another: what is noted last is what the ledger was told last.
        async with self._locks.of(str(name)):
            run = await self._runs.get(name)
            if run.state not in (RunState.ACTIVE, RunState.MOVING):
                raise FailedPreconditionError(
                    f"run {name} is {run.state.value}; how long its past is kept can be changed "
                    "once it is active",
                    run=str(name),
                    state=run.state.value,
                )
            await self._tell_ledger(run, history_retention_s)

            def note(connection: sa.Connection) -> None:
                before = run_store.get_run(connection, run.name)
                run_store.set_history(connection, run.name, history_retention_s)
                if before is not None and before.history_s != history_retention_s:
                    now_s = self._wall_clock()
                    record_action(
                        connection, caller, "update_run", run.name, project=run.project, now_s=now_s
                    )

            await self._database.write(note)
        return await self._runs.get(name)

    async def _tell_ledger(self, run: Run, history_retention_s: float) -> None:
        # Each trainer on the ledger can, also of a run that no trainer holds any more.
        address = self._workers.ledger_address(run)
        why = "has no trainer at the moment"
        try:
            if address:
                return await self._trainers.set_history(
                    address,
                    run=run.name,
                    epoch=run.epoch,
                    history_retention_s=history_retention_s,
                )
        except TinsmithError as error:
            if error.code not in _PASSING_CODES:
                raise
            why = f"cannot be changed now: {error.message}"
        raise WorkerUnavailableError(f"run {run.name} {why}; send the request again", run=run.name)
