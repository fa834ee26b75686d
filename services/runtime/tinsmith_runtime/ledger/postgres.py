"""The ledger on PostgreSQL, for several processes of one deployment.

What every operation goes through (accepted, begun, finished) is one statement for all runs that
wait at the moment; what is rare is a transaction, as on SQLite. Of either kind, one batch is under
way at a time and the next gathers meanwhile.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tinsmith_runtime.errors import OutcomeUnknownError, RunNotFoundError
from tinsmith_runtime.ledger import postgres_statements, statements
from tinsmith_runtime.ledger.records import (
    Attempts,
    CheckpointRecord,
    Commit,
    FencedError,
    Holder,
    NewOperation,
    OperationOutcome,
    OperationRecord,
    OperationState,
    SnapshotRecord,
)
from tinsmith_runtime.ledger.sql_ledger import Ledger
from tinsmith_runtime.ledger.tables import MIGRATIONS, SCHEMA_VERSION, metadata
from tinsmith_runtime.sql import PostgresDatabase
from tinsmith_runtime.sql.batcher import Batcher
from tinsmith_runtime.sql.postgres_sessions import PostgresTarget
from tinsmith_runtime.sql.repeatable_statements import RepeatableStatements

logger = logging.getLogger(__name__)

SCHEMA = "ledger"


class PostgresLedger(Ledger):
    """A ledger that several trainers share; see `Ledger` for the methods.

    Args:
        url: `postgresql://...` of the database.
        holder: This process.
        store: Names the object store of this process; empty if all have the same.
    """

    def __init__(self, url: str, *, holder: Holder, store: str = "") -> None:
        target = PostgresTarget(
            url=url, schema=SCHEMA, application_name=f"tinsmith {holder.worker}"
        )
        super().__init__(holder=holder, store=store)
        self._target = target
        self._identity = ""
        self._pool = RepeatableStatements(target)
        self._submits: Batcher[NewOperation, OperationRecord] = Batcher(self._submit_all)
        self._starts: Batcher[Sequence[Attempts], None] = Batcher(self._count_all)
        self._commits: Batcher[Commit, list[OperationRecord]] = Batcher(self._commit_all)

    async def open(self) -> None:
        """Connect, and create or upgrade the tables; see `Ledger`."""
        self._opened = await PostgresDatabase.open(
            self._target.url,
            metadata,
            schema=self._target.schema,
            schema_version=SCHEMA_VERSION,
            migrations=MIGRATIONS,
            application_name=self._target.application_name,
        )
        self._identity = await self._opened.write(statements.identity)

    @property
    def identity(self) -> str:
        """Names the database among those of a deployment."""
        return self._identity

    async def submit(self, operation: NewOperation) -> OperationRecord:
        """Accept an operation; see `Ledger`."""
        return await self._submits.add(operation)

    async def start_all(self, attempts: Sequence[Attempts]) -> None:
        """Count an attempt of operations of several runs; see `Ledger`."""
        await self._starts.add(attempts)

    async def finish(
        self,
        run: str,
        epoch: int,
        outcomes: Sequence[OperationOutcome],
        *,
        checkpoints: Sequence[CheckpointRecord] = (),
        snapshots: Sequence[SnapshotRecord] = (),
    ) -> list[OperationRecord]:
        """Commit results; see `Ledger`."""
        commit = Commit(run=run, epoch=epoch, outcomes=outcomes)
        if not (checkpoints or snapshots):
            return await self._commits.add(commit)
        is_doubtful = False
        while True:
            try:
                return await super().finish(
                    run, epoch, outcomes, checkpoints=checkpoints, snapshots=snapshots
                )
            except OutcomeUnknownError as error:
                is_doubtful = True
                logger.warning("a commit is repeated", extra={"run": run, "problem": error.message})
            except FencedError as error:
                # The first try may have been what it met: one transaction, so all of it or nothing.
                found = await self._looked_up(commit) if is_doubtful else error
                if isinstance(found, BaseException):
                    raise error
                return found

    async def finish_all(
        self, commits: Sequence[Commit]
    ) -> list[list[OperationRecord] | BaseException]:
        """Commit results of several runs; see `Ledger`."""
        return await self._commits.add_all(commits)

    async def watch_lease(self, changed: Callable[[], None]) -> None:
        """Call back when a run of this process was taken; see `Ledger`."""
        holder = self._holder

        def note(taken_from: str) -> None:
            if holder is not None and taken_from == holder.name:
                changed()

        await self._pool.listen(statements.LEASES_CHANNEL, note)

    def hurry(self, within_s: float) -> None:
        """Wait for a database that is away this long at most; see `Ledger`."""
        self._pool.hurry(within_s)
        if isinstance(self._opened, PostgresDatabase):
            self._opened.hurry(within_s)

    async def close(self) -> None:
        """Finish what waits and release the database."""
        for batcher in (self._submits, self._starts, self._commits):
            await batcher.finish()
        await self._pool.close()
        await super().close()

    async def _submit_all(
        self, batch: Sequence[NewOperation]
    ) -> list[OperationRecord | BaseException]:
        rows = await self._pool.fetch(
            postgres_statements.SUBMIT,
            [operation.run for operation in batch],
            [operation.epoch for operation in batch],
            [operation.sequence_number for operation in batch],
            [operation.kind for operation in batch],
            [operation.request_id for operation in batch],
            [operation.digest for operation in batch],
            [operation.payload for operation in batch],
            [operation.payload_path for operation in batch],
            [operation.submit_time_s for operation in batch],
            [operation.seen_through for operation in batch],
            [operation.key_id for operation in batch],
        )
        answers: list[OperationRecord | BaseException] = []
        for operation, row in zip(batch, rows, strict=True):
            if row["is_inserted"]:
                answers.append(statements.pending_record(operation))
            elif row["is_held"]:
                answers.append(await self._known(operation))
            else:
                answers.append(await self._unheld(operation))
        return answers

    async def _unheld(self, operation: NewOperation) -> BaseException:
        """Say why a run is not held under an epoch: another one holds it, or it was deleted.

        Looked up again: a statement that had to wait for a deletion still sees the deleted row.
        """
        try:
            is_known = await self.is_known(operation.run)
        except Exception as error:
            return error
        if is_known:
            return statements.fenced(operation.run, operation.epoch)
        return RunNotFoundError(f"run {operation.run} was deleted", run=operation.run)

    async def _known(self, operation: NewOperation) -> OperationRecord | BaseException:
        try:
            return await self._database.read(
                lambda connection: statements.known_operation(connection, operation)
            )
        except Exception as error:
            return error

    async def _count_all(self, batch: Sequence[Sequence[Attempts]]) -> list[BaseException | None]:
        counts = [
            (each.run, each.epoch, number, num_attempts)
            for attempts in batch
            for each in attempts
            for number, num_attempts in each.numbers.items()
        ]
        await self._pool.fetch(postgres_statements.START, *_columns(counts, 4))
        return [None] * len(batch)

    async def _commit_all(
        self, batch: Sequence[Commit]
    ) -> list[list[OperationRecord] | BaseException]:
        entries = [
            (
                commit.run,
                commit.epoch,
                outcome.sequence_number,
                _state(outcome),
                outcome.result,
                outcome.error,
                outcome.plan,
                outcome.finish_time_s,
                commit.outcomes[-1].version,
                place,
                outcome.used.num_trained_tokens,
                outcome.used.num_prefilled_tokens,
                outcome.used.engine_s,
            )
            for commit in batch
            for place, outcome in enumerate(commit.outcomes, 1)
        ]
        rows = iter(await self._pool.fetch(postgres_statements.FINISH, *_columns(entries, 13)))
        return [
            await self._answer(commit, [next(rows) for _ in commit.outcomes]) for commit in batch
        ]

    async def _answer(
        self, commit: Commit, rows: Sequence[Any]
    ) -> list[OperationRecord] | BaseException:
        if not rows[0]["is_held"]:
            return statements.fenced(commit.run, commit.epoch)
        if all(row["run"] is not None for row in rows):
            return [
                _finished(row, outcome) for row, outcome in zip(rows, commit.outcomes, strict=True)
            ]
        return await self._looked_up(commit)

    async def _looked_up(self, commit: Commit) -> list[OperationRecord] | BaseException:
        """Return what became of a commit that found results: its own, if an answer was lost."""
        records = []
        for outcome in commit.outcomes:
            record = await self.get_operation(commit.run, outcome.sequence_number)
            is_own = record is not None and (
                record.result,
                record.error,
                record.plan,
                record.finish_time_s,
            ) == (outcome.result, outcome.error, outcome.plan, outcome.finish_time_s)
            if record is None or not is_own:
                return statements.finished_already(commit.run, outcome.sequence_number)
            records.append(record)
        return records


def _columns(rows: Sequence[tuple[Any, ...]], num_columns: int) -> list[list[Any]]:
    return [[row[index] for row in rows] for index in range(num_columns)]


def _state(outcome: OperationOutcome) -> str:
    is_success = outcome.result is not None
    return (OperationState.SUCCEEDED if is_success else OperationState.FAILED).value


def _finished(row: Any, outcome: OperationOutcome) -> OperationRecord:
    values = {
        field.name: row[field.name]
        for field in dataclasses.fields(OperationRecord)
        if field.name in row
    }
    return OperationRecord(
        **values,
        state=OperationState(_state(outcome)),
        finish_time_s=outcome.finish_time_s,
        result=outcome.result,
        error=outcome.error,
        plan=outcome.plan,
    )
