"""The ledger as transactions on a SQL database, one function each; see `tinsmith_runtime.sql`."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from tinsmith_runtime.errors import (
    AbortedError,
    RunNotFoundError,
)
from tinsmith_runtime.ledger import checkpoint_statements, statements
from tinsmith_runtime.ledger.records import (
    GIVEN_UP_KIND,
    CheckpointRecord,
    Commit,
    NewOperation,
    OperationRecord,
    OperationState,
    Outcome,
    ResumePoint,
    RunRecord,
    SnapshotRecord,
)
from tinsmith_runtime.ledger.sql_checkpoints import SqlCheckpoints
from tinsmith_runtime.ledger.tables import (
    checkpoint_exports,
    checkpoint_tasks,
    checkpoints,
    deletions,
    expired_checkpoints,
    leases,
    operations,
    runs,
    snapshots,
)
from tinsmith_runtime.sql import insert


class SqlLedger(SqlCheckpoints):
    """Implements `Ledger`; see there for the methods.

    Args:
        database: Holds the tables of `tables`.
    """

    async def adopt_run(self, run: RunRecord) -> RunRecord:
        """Create a run or raise its epoch; see `Ledger`."""

        def adopt(connection: sa.Connection) -> RunRecord:
            held = statements.epoch_of(connection, run.name)
            if held is not None and held > run.epoch:
                raise AbortedError(
                    f"run {run.name} is held under epoch {held}, not {run.epoch}",
                    run=run.name,
                    epoch=held,
                )
            connection.execute(
                insert(connection, leases)
                .values(run=run.name, epoch=run.epoch)
                .on_conflict_do_update(index_elements=["run"], set_={"epoch": run.epoch})
            )
            connection.execute(
                insert(connection, runs)
                .values(name=run.name, base_model=run.base_model, adapter=run.adapter)
                .on_conflict_do_nothing()
            )
            query = statements.select_runs().where(runs.c.name == run.name)
            return RunRecord(**connection.execute(query).mappings().one())

        return await self._database.write(adopt)

    async def list_runs(self) -> list[RunRecord]:
        """Return all runs."""
        return await self._database.read(
            lambda connection: [
                RunRecord(**row) for row in connection.execute(statements.select_runs()).mappings()
            ]
        )

    async def delete_run(self, run: str, epoch: int) -> None:
        """Remove a run; see `Ledger`."""

        def delete(connection: sa.Connection) -> None:
            statements.check_fence(connection, run, epoch)
            for table in (
                operations,
                snapshots,
                checkpoints,
                expired_checkpoints,
                checkpoint_exports,
                checkpoint_tasks,
                leases,
            ):
                connection.execute(sa.delete(table).where(table.c.run == run))
            connection.execute(sa.delete(runs).where(runs.c.name == run))
            connection.execute(
                insert(connection, deletions).values(run=run).on_conflict_do_nothing()
            )

        await self._database.write(delete)

    async def list_deletions(self) -> list[str]:
        """Return the deleted runs whose files may still be there."""
        return await self._database.read(
            lambda connection: list(connection.execute(sa.select(deletions.c.run)).scalars())
        )

    async def forget_deletion(self, run: str) -> None:
        """Note that the files of a deleted run are gone."""
        statement = sa.delete(deletions).where(deletions.c.run == run)
        await self._database.write(lambda connection: connection.execute(statement))

    async def submit(self, operation: NewOperation) -> OperationRecord:
        """Accept an operation; see `Ledger`."""

        def accept(connection: sa.Connection) -> OperationRecord:
            if statements.epoch_of(connection, operation.run) is None:
                raise RunNotFoundError(f"run {operation.run} was deleted", run=operation.run)
            inserted = connection.execute(statements.insert_operation(connection, operation))
            if inserted.rowcount == 1:
                return statements.pending_record(operation)
            return statements.known_operation(connection, operation)

        return await self._database.write(accept)

    async def refuse(self, operation: NewOperation, error: bytes) -> OperationRecord | None:
        """Consume a number with a failed operation; see `Ledger`."""

        def consume(connection: sa.Connection) -> OperationRecord | None:
            if statements.epoch_of(connection, operation.run) is None:
                return None
            is_known_id = connection.execute(
                sa.select(operations.c.sequence_number).where(
                    operations.c.run == operation.run,
                    operations.c.request_id == operation.request_id,
                )
            ).first()
            inserted = connection.execute(
                insert(connection, operations)
                .values(
                    run=operation.run,
                    sequence_number=operation.sequence_number,
                    kind=operation.kind,
                    request_id=None if is_known_id else operation.request_id,
                    digest=operation.digest,
                    state=OperationState.FAILED,
                    num_attempts=0,
                    error=error,
                    submit_time_s=operation.submit_time_s,
                    finish_time_s=operation.submit_time_s,
                    revision=statements.next_revision(operation.run),
                )
                .on_conflict_do_nothing()
            )
            if inserted.rowcount == 0:
                return None
            return statements.get_operation(connection, operation.run, operation.sequence_number)

        return await self._database.write(consume)

    async def start(self, run: str, sequence_numbers: Sequence[int]) -> None:
        """Count an attempt; see `Ledger`."""
        await self.start_all({run: sequence_numbers})

    async def start_all(self, operations: Mapping[str, Sequence[int]]) -> None:
        """Count an attempt of operations of several runs; see `Ledger`."""

        def count(connection: sa.Connection) -> None:
            for run, sequence_numbers in operations.items():
                connection.execute(statements.count_attempt(run, sequence_numbers))

        await self._database.write(count)

    async def finish(
        self,
        run: str,
        epoch: int,
        outcomes: Sequence[Outcome],
        *,
        checkpoints: Sequence[CheckpointRecord] = (),
        snapshots: Sequence[SnapshotRecord] = (),
    ) -> list[OperationRecord]:
        """Commit results; see `Ledger`."""

        def finish(connection: sa.Connection) -> list[OperationRecord]:
            records = statements.commit(connection, Commit(run=run, epoch=epoch, outcomes=outcomes))
            for checkpoint in checkpoints:
                checkpoint_statements.insert_checkpoint(connection, checkpoint)
            for snapshot in snapshots:
                statements.insert_snapshot(connection, snapshot)
            return records

        return await self._database.write(finish)

    async def finish_all(
        self, commits: Sequence[Commit]
    ) -> list[list[OperationRecord] | BaseException]:
        """Commit results of several runs; see `Ledger`."""
        return await self._database.write_all(
            [functools.partial(statements.commit, commit=commit) for commit in commits]
        )

    async def give_up(
        self, run: str, epoch: int, missing: Sequence[int], error: bytes
    ) -> list[int]:
        """Consume numbers that never arrived; see `Ledger`."""

        def consume(connection: sa.Connection) -> list[int]:
            statements.check_fence(connection, run, epoch)
            now_s = time.time()
            given_up = []
            for number in missing:
                inserted = connection.execute(
                    insert(connection, operations)
                    .values(
                        run=run,
                        sequence_number=number,
                        kind=GIVEN_UP_KIND,
                        digest=b"",
                        state=OperationState.FAILED,
                        error=error,
                        submit_time_s=now_s,
                        finish_time_s=now_s,
                        revision=statements.next_revision(run),
                    )
                    .on_conflict_do_nothing()
                )
                if inserted.rowcount == 1:
                    given_up.append(number)
            return given_up

        return await self._database.write(consume)

    async def resume_point(self, run: str) -> ResumePoint:
        """Return where a run goes on after a restart; see `Ledger`."""

        def resume(connection: sa.Connection) -> ResumePoint:
            next_number: int = connection.execute(statements.lowest_unfinished(run)).scalar_one()
            later = (
                sa.select(operations)
                .where(operations.c.run == run, operations.c.sequence_number >= next_number)
                .order_by(operations.c.sequence_number)
            )
            records = [statements.operation_of(row) for row in connection.execute(later).mappings()]
            newest = sa.select(sa.func.coalesce(sa.func.max(operations.c.revision), 0))
            return ResumePoint(
                next_sequence_number=next_number,
                pending=[r for r in records if r.state is OperationState.PENDING],
                finished_ahead=[r for r in records if r.state is not OperationState.PENDING],
                latest_revision=connection.execute(
                    newest.where(operations.c.run == run)
                ).scalar_one(),
            )

        return await self._database.read(resume)

    async def mark_diverged(self, run: str) -> None:
        """Record that a replay gave other bits than the first execution."""
        statement = sa.update(runs).where(runs.c.name == run).values(replay_diverged=True)
        await self._database.write(lambda connection: connection.execute(statement))

    async def get_operation(self, run: str, sequence_number: int) -> OperationRecord | None:
        """Return an operation."""
        return await self._database.read(
            lambda connection: statements.get_operation(connection, run, sequence_number)
        )

    async def operations_from(
        self, run: str, sequence_number: int, *, limit: int = 100
    ) -> list[OperationRecord]:
        """Return operations in order, payloads included."""
        query = (
            sa.select(operations)
            .where(operations.c.run == run, operations.c.sequence_number >= sequence_number)
            .order_by(operations.c.sequence_number)
            .limit(limit)
        )
        return await self._database.read(
            lambda connection: [
                statements.operation_of(row) for row in connection.execute(query).mappings()
            ]
        )

    async def finished_after(
        self, run: str, revision: int, *, limit: int, limit_bytes: int
    ) -> list[OperationRecord]:
        """Return finished operations in the order in which they finished."""
        query = (
            statements.select_operations()
            .where(operations.c.run == run, operations.c.revision > revision)
            .order_by(operations.c.revision)
            .limit(limit)
        )

        def collect(connection: sa.Connection) -> list[OperationRecord]:
            found: list[OperationRecord] = []
            size_bytes = 0
            for row in connection.execute(query).mappings():
                size_bytes += len(row["result"] or row["error"] or b"")
                if found and size_bytes > limit_bytes:
                    break
                found.append(statements.operation_of(row))
            return found

        return await self._database.read(collect)

    async def add_snapshot(self, snapshot: SnapshotRecord, epoch: int) -> None:
        """Record a snapshot; see `Ledger`."""

        def add(connection: sa.Connection) -> None:
            statements.check_fence(connection, snapshot.run, epoch)
            statements.insert_snapshot(connection, snapshot)

        await self._database.write(add)

    async def list_snapshots(self, run: str) -> list[SnapshotRecord]:
        """Return the snapshots of a run, newest first."""
        query = (
            sa.select(snapshots)
            .where(snapshots.c.run == run)
            .order_by(snapshots.c.sequence_number.desc())
        )
        return await self._database.read(
            lambda connection: [
                SnapshotRecord(**row) for row in connection.execute(query).mappings()
            ]
        )

    async def delete_snapshots(self, run: str, before: int) -> list[SnapshotRecord]:
        """Forget snapshots below a sequence number, and return them."""
        statement = (
            sa.delete(snapshots)
            .where(snapshots.c.run == run, snapshots.c.sequence_number < before)
            .returning(*snapshots.c)
        )
        return await self._database.write(
            lambda connection: [
                SnapshotRecord(**row) for row in connection.execute(statement).mappings()
            ]
        )

    async def close(self) -> None:
        """Finish what waits and release the database."""
        await self._database.close()
