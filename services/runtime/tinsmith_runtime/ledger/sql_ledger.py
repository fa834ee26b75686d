"""The ledger as transactions on a SQL database, one function each; see `tinsmith_runtime.sql`."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from tinsmith_runtime.errors import (
    RunNotFoundError,
)
from tinsmith_runtime.ledger import (
    checkpoint_statements,
    retention,
    snapshot_statements,
    statements,
)
from tinsmith_runtime.ledger.records import (
    GIVEN_UP_KIND,
    Attempts,
    CheckpointRecord,
    Commit,
    Cutoffs,
    Expired,
    Holder,
    NewOperation,
    OperationOutcome,
    OperationRecord,
    OperationState,
    ResumePoint,
    SnapshotRecord,
)
from tinsmith_runtime.ledger.sql_checkpoints import SqlCheckpoints
from tinsmith_runtime.ledger.sql_history import SqlHistory
from tinsmith_runtime.ledger.sql_runs import SqlRuns
from tinsmith_runtime.ledger.tables import (
    leases,
    operations,
    runs,
)
from tinsmith_runtime.sql import Database


class Ledger(SqlRuns, SqlCheckpoints, SqlHistory):
    """Operations, snapshots and checkpoints of runs.

    Args:
        database: Holds the tables of `tables`; a subclass may open it later.
        holder: This process, where several share the database; runs are then leased.
        store: Names the object store of this process; empty if the ledger knows only one.
    """

    def __init__(
        self, database: Database | None = None, *, holder: Holder | None = None, store: str = ""
    ) -> None:
        super().__init__(database, holder=holder, store=store)

    async def submit(self, operation: NewOperation) -> OperationRecord:
        """Accept an operation, or return the one that the same request made before.

        Raises:
            RunNotFoundError: If the run was deleted.
            FencedError: If the epoch no longer holds.
            RequestIdReusedError: If the request id has another digest.
            SequenceNumberReusedError: If another request holds the number.
            SequenceGapError: If the number was given up.
        """

        def accept(connection: sa.Connection) -> OperationRecord:
            lease = statements.lock_lease(connection, operation.run)
            if lease is None:
                raise RunNotFoundError(f"run {operation.run} was deleted", run=operation.run)
            if lease.epoch != operation.epoch:
                raise statements.fenced(operation.run, operation.epoch)
            if operation.sequence_number <= lease.expired_through:
                return statements.known_operation(connection, operation)
            inserted = connection.execute(statements.insert_operation(connection, operation))
            if inserted.rowcount == 1:
                return statements.pending_record(operation)
            return statements.known_operation(connection, operation)

        return await self._database.write(accept)

    async def refuse(self, operation: NewOperation, error: bytes) -> OperationRecord | None:
        """Consume a number with a failed operation; None if the number or the run is gone.

        Raises:
            FencedError: If the epoch no longer holds.
        """

        def consume(connection: sa.Connection) -> OperationRecord | None:
            epoch = statements.epoch_of(connection, operation.run)
            if epoch is None:
                return None
            if epoch != operation.epoch:
                raise statements.fenced(operation.run, operation.epoch)
            is_known_id = connection.execute(
                sa.select(operations.c.sequence_number).where(
                    operations.c.run == operation.run,
                    operations.c.request_id == operation.request_id,
                )
            ).first()
            row = {
                "sequence_number": operation.sequence_number,
                "kind": operation.kind,
                "request_id": None if is_known_id else operation.request_id,
                "digest": operation.digest,
                "error": error,
                "submit_time_s": operation.submit_time_s,
                "finish_time_s": operation.submit_time_s,
            }
            if not statements.insert_failed(connection, operation.run, [row]):
                return None
            return statements.get_operation(connection, operation.run, operation.sequence_number)

        return await self._database.write(consume)

    async def start_all(self, attempts: Sequence[Attempts]) -> None:
        """Note that operations are about to be computed.

        A number is never lowered, so that repeating the call changes nothing. A run that another
        process holds is left out: the commit of its results is refused in any case.
        """

        def count(connection: sa.Connection) -> None:
            for each in attempts:
                if statements.epoch_of(connection, each.run) != each.epoch:
                    continue
                for number, num_attempts in each.numbers.items():
                    connection.execute(statements.count_attempt(each.run, number, num_attempts))

        await self._database.write(count)

    async def finish(
        self,
        run: str,
        epoch: int,
        outcomes: Sequence[OperationOutcome],
        *,
        checkpoints: Sequence[CheckpointRecord] = (),
        snapshots: Sequence[SnapshotRecord] = (),
    ) -> list[OperationRecord]:
        """Commit results, all or none, and return their operations.

        Raises:
            FencedError: If the epoch no longer holds, or an operation has a result already.
        """

        def finish(connection: sa.Connection) -> list[OperationRecord]:
            records = statements.commit(connection, Commit(run=run, epoch=epoch, outcomes=outcomes))
            for checkpoint in checkpoints:
                checkpoint_statements.insert_checkpoint(connection, checkpoint)
            for snapshot in snapshots:
                snapshot_statements.insert_snapshot(connection, snapshot)
            return records

        return await self._database.write(finish)

    async def finish_all(
        self, commits: Sequence[Commit]
    ) -> list[list[OperationRecord] | BaseException]:
        """Commit results of several runs in one group commit.

        Returns:
            For each run its operations, or why nothing of it was written; see `finish`. One run
            does not depend on another.
        """
        return await self._database.write_all(
            [functools.partial(statements.commit, commit=commit) for commit in commits]
        )

    async def give_up(
        self, run: str, epoch: int, missing: Sequence[int], error: bytes
    ) -> list[int]:
        """Consume numbers that never arrived, so that a late arrival is told so.

        Returns:
            The numbers that were consumed; one that arrived at the last moment is not.

        Raises:
            FencedError: If the epoch no longer holds.
        """

        def consume(connection: sa.Connection) -> list[int]:
            statements.check_fence(connection, run, epoch)
            now_s = time.time()
            row = {
                "kind": GIVEN_UP_KIND,
                "digest": b"",
                "error": error,
                "submit_time_s": now_s,
                "finish_time_s": now_s,
            }
            rows = [{"sequence_number": number, **row} for number in missing]
            return statements.insert_failed(connection, run, rows)

        return await self._database.write(consume)

    async def resume_point(self, run: str) -> ResumePoint:
        """Return where a run goes on after a restart."""

        def resume(connection: sa.Connection) -> ResumePoint:
            next_number = statements.lowest_unfinished(connection, run)
            later = (
                sa.select(operations)
                .where(operations.c.run == run, operations.c.sequence_number >= next_number)
                .order_by(operations.c.sequence_number)
            )
            records = [statements.operation_of(row) for row in connection.execute(later).mappings()]
            newest = sa.select(runs.c.last_revision).where(runs.c.name == run)
            return ResumePoint(
                next_sequence_number=next_number,
                pending=[r for r in records if r.state is OperationState.PENDING],
                finished_ahead=[r for r in records if r.state is not OperationState.PENDING],
                latest_revision=connection.execute(newest).scalar_one_or_none() or 0,
            )

        return await self._database.read(resume)

    async def mark_diverged(self, run: str, epoch: int) -> None:
        """Record that a replay gave other bits than the first execution.

        Raises:
            FencedError: If the epoch no longer holds.
        """

        def mark(connection: sa.Connection) -> None:
            statements.check_fence(connection, run, epoch)
            connection.execute(
                sa.update(runs).where(runs.c.name == run).values(replay_diverged=True)
            )

        await self._database.write(mark)

    async def get_operation(self, run: str, sequence_number: int) -> OperationRecord | None:
        """Return an operation."""
        return await self._database.read(
            lambda connection: statements.get_operation(connection, run, sequence_number)
        )

    async def operations_from(
        self, run: str, sequence_number: int, *, limit: int = 100
    ) -> list[OperationRecord]:
        """Return operations with at least this number, in order, payloads included."""
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
            .where(
                operations.c.run == run,
                operations.c.revision > revision,
                operations.c.result.is_not(None) | operations.c.error.is_not(None),
            )
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

    async def note_retrieved(self, run: str, epoch: int, times_s: Mapping[int, float]) -> None:
        """Note when clients first got results, by number; an earlier note stays.

        Raises:
            FencedError: If the epoch no longer holds.
        """

        def note(connection: sa.Connection) -> None:
            statements.check_fence(connection, run, epoch)
            for number, time_s in times_s.items():
                connection.execute(statements.note_retrieved(run, number, time_s))

        await self._database.write(note)

    async def expire(self, run: str, epoch: int, cutoffs: Cutoffs) -> Expired:
        """Drop a bounded part of what is old enough; call it again until it drops nothing.

        Results go by age, requests and snapshots before the past that is kept, rows once all are
        gone: see `tinsmith_runtime.ledger.retention`. Not to be called while the run is replayed.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        if not await self.has_expirable(run, cutoffs):
            return Expired()

        def expire(connection: sa.Connection) -> Expired:
            statements.check_fence(connection, run, epoch)
            return retention.expire(connection, run, cutoffs)

        return await self._database.write(expire)

    async def has_expirable(self, run: str, cutoffs: Cutoffs) -> bool:
        """Return whether `expire` would drop something."""
        return await self._database.read(
            lambda connection: retention.has_due(connection, run, cutoffs)
        )

    async def set_history(self, run: str, epoch: int, history_retention_s: float) -> None:
        """Set how long the past of a run is kept; what is gone stays gone.

        Raises:
            FencedError: If the epoch is not that under which the run is held.
        """

        def change(connection: sa.Connection) -> None:
            statements.check_fence(connection, run, epoch)
            retention.set_history(connection, run, history_retention_s)

        await self._database.write(change)

    async def expired_through(self, run: str) -> int:
        """Return the highest number whose row was deleted with all below it; 0 if none was."""
        return await self._database.read(
            lambda connection: retention.expired_through(connection, run)
        )

    async def named_payloads(self, run: str, epoch: int, paths: Sequence[str]) -> set[str]:
        """Return those of some `payload_path` that an operation of the run still names.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        query = sa.select(operations.c.payload_path).where(
            operations.c.run == run, operations.c.payload_path.in_(paths)
        )

        holder = sa.select(leases.c.epoch).where(leases.c.run == run)

        def select(connection: sa.Connection) -> set[str]:
            # Not locked: a read only.
            if connection.execute(holder).scalar_one_or_none() != epoch:
                raise statements.fenced(run, epoch)
            return {path for path in connection.execute(query).scalars() if path is not None}

        return await self._database.read(select)

    async def add_snapshot(self, snapshot: SnapshotRecord, epoch: int) -> None:
        """Record a snapshot that is in the store.

        Raises:
            FencedError: If the epoch no longer holds.
        """

        def add(connection: sa.Connection) -> None:
            statements.check_fence(connection, snapshot.run, epoch)
            snapshot_statements.insert_snapshot(connection, snapshot)

        await self._database.write(add)

    async def list_snapshots(self, run: str) -> list[SnapshotRecord]:
        """Return the snapshots of a run, newest first."""
        return await self._database.read(
            lambda connection: snapshot_statements.snapshots_of(connection, run)
        )

    async def thin_snapshots(
        self, run: str, *, now_s: float, num_history: int
    ) -> list[SnapshotRecord]:
        """Forget the snapshots that neither a restart nor the past needs, and return them.

        Args:
            run: Its name.
            now_s: The time.
            num_history: Into how many parts the last 25 h are divided, one snapshot each; older
                parts are wider.
        """
        return await self._database.write(
            lambda connection: retention.thin_snapshots(
                connection, run, now_s=now_s, num_history=num_history
            )
        )

    async def close(self) -> None:
        """Finish what waits and release the database."""
        if self._opened is not None:
            await self._opened.close()
