"""What `SqlLedger` says to the database: statements, rows to records, the fence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith_runtime.errors import (
    RequestIdReusedError,
    SequenceGapError,
    SequenceNumberReusedError,
)
from tinsmith_runtime.ledger.records import (
    GIVEN_UP_KIND,
    Commit,
    FencedError,
    NewOperation,
    OperationRecord,
    OperationState,
    Outcome,
    SnapshotRecord,
)
from tinsmith_runtime.ledger.tables import leases, operations, runs, snapshots
from tinsmith_runtime.sql import insert

_SUMMARY_COLUMNS = [
    column for column in operations.c if column.name not in ("payload", "payload_path")
]


def select_runs() -> sa.Select[tuple[object, ...]]:
    """Select all runs with their epochs."""
    return sa.select(*runs.c, leases.c.epoch).join(leases, leases.c.run == runs.c.name)


def select_operations() -> sa.Select[tuple[object, ...]]:
    """Select operations without their payloads."""
    return sa.select(*_SUMMARY_COLUMNS)


def lowest_unfinished(run: str) -> sa.Select[Any]:
    """Select the lowest number of a run, from 1, that has no result."""
    finished = sa.select(operations.c.sequence_number.label("number")).where(
        operations.c.run == run, operations.c.state != OperationState.PENDING
    )
    candidates = sa.union_all(sa.select(sa.literal(0).label("number")), finished).subquery()
    following = operations.alias()
    is_finished = (
        sa.select(following.c.sequence_number)
        .where(
            following.c.run == run,
            following.c.sequence_number == candidates.c.number + 1,
            following.c.state != OperationState.PENDING,
        )
        .exists()
    )
    return sa.select(sa.func.min(candidates.c.number) + 1).where(~is_finished)


def operation_of(row: sa.RowMapping) -> OperationRecord:
    """Return a row as a record."""
    return OperationRecord(**{**row, "state": OperationState(row["state"])})


def get_operation(
    connection: sa.Connection, run: str, sequence_number: int
) -> OperationRecord | None:
    """Return an operation without its payload."""
    query = select_operations().where(
        operations.c.run == run, operations.c.sequence_number == sequence_number
    )
    row = connection.execute(query).mappings().first()
    return operation_of(row) if row is not None else None


def insert_operation(connection: sa.Connection, operation: NewOperation) -> Any:
    """Insert an operation, unless its number or request id is taken."""
    return (
        insert(connection, operations)
        .values(
            run=operation.run,
            sequence_number=operation.sequence_number,
            kind=operation.kind,
            request_id=operation.request_id,
            digest=operation.digest,
            payload=operation.payload,
            payload_path=operation.payload_path,
            state=OperationState.PENDING,
            num_attempts=0,
            submit_time_s=operation.submit_time_s,
            revision=0,
        )
        .on_conflict_do_nothing()
    )


def pending_record(operation: NewOperation) -> OperationRecord:
    """Return the record of an operation that was just inserted."""
    return OperationRecord(
        run=operation.run,
        sequence_number=operation.sequence_number,
        kind=operation.kind,
        request_id=operation.request_id,
        digest=operation.digest,
        state=OperationState.PENDING,
        num_attempts=0,
        submit_time_s=operation.submit_time_s,
    )


def known_operation(connection: sa.Connection, operation: NewOperation) -> OperationRecord:
    """Return the operation that the same request made, or say why this one can not be accepted."""
    query = select_operations().where(
        operations.c.run == operation.run, operations.c.request_id == operation.request_id
    )
    row = connection.execute(query).mappings().first()
    if row is not None:
        if row["digest"] == operation.digest:
            return operation_of(row)
        raise RequestIdReusedError(
            f"request id {operation.request_id} was used with another body for operation "
            f"{row['sequence_number']}; draw a new UUID for a new request",
            request_id=operation.request_id,
            sequence_number=row["sequence_number"],
        )
    holder = get_operation(connection, operation.run, operation.sequence_number)
    if holder is not None and holder.kind == GIVEN_UP_KIND:
        raise SequenceGapError(
            f"sequence number {operation.sequence_number} of {operation.run} was given up because "
            "higher numbers waited for it too long; go on with the next free number",
            run=operation.run,
            missing=operation.sequence_number,
        )
    raise SequenceNumberReusedError(
        f"sequence number {operation.sequence_number} of {operation.run} belongs to another "
        "request; go on with the next free number",
        run=operation.run,
        sequence_number=operation.sequence_number,
    )


def count_attempt(run: str, sequence_numbers: Sequence[int]) -> sa.Update:
    """Count that operations are begun."""
    return (
        sa.update(operations)
        .where(operations.c.run == run, operations.c.sequence_number.in_(sequence_numbers))
        .values(num_attempts=operations.c.num_attempts + 1)
    )


def commit(connection: sa.Connection, commit: Commit) -> list[OperationRecord]:
    """Write the results of a run, and return its operations.

    Raises:
        FencedError: If the epoch no longer holds, or an operation has a result already.
    """
    check_fence(connection, commit.run, commit.epoch)
    for outcome in commit.outcomes:
        updated = connection.execute(finish_operation(commit.run, outcome))
        if updated.rowcount != 1:
            raise FencedError(
                f"operation {outcome.sequence_number} of {commit.run} has a result already",
                run=commit.run,
            )
    connection.execute(
        sa.update(runs).where(runs.c.name == commit.run).values(version=commit.outcomes[-1].version)
    )
    query = select_operations().where(
        operations.c.run == commit.run,
        operations.c.sequence_number.in_([o.sequence_number for o in commit.outcomes]),
    )
    rows = connection.execute(query.order_by(operations.c.sequence_number))
    return [operation_of(row) for row in rows.mappings()]


def finish_operation(run: str, outcome: Outcome) -> sa.Update:
    """Write the result of an operation that has none."""
    is_success = outcome.result is not None
    return (
        sa.update(operations)
        .where(
            operations.c.run == run,
            operations.c.sequence_number == outcome.sequence_number,
            operations.c.state == OperationState.PENDING,
        )
        .values(
            state=OperationState.SUCCEEDED if is_success else OperationState.FAILED,
            result=outcome.result,
            error=outcome.error,
            plan=outcome.plan,
            finish_time_s=outcome.finish_time_s,
            revision=next_revision(run),
        )
    )


def next_revision(run: str) -> sa.ScalarSelect[int]:
    """Select the revision that the next operation to finish gets."""
    # An alias, or SQLAlchemy would correlate the subquery with the table that is being written.
    others = operations.alias()
    highest = sa.func.coalesce(sa.func.max(others.c.revision), 0)
    return sa.select(highest + 1).where(others.c.run == run).scalar_subquery()


def insert_snapshot(connection: sa.Connection, snapshot: SnapshotRecord) -> None:
    """Insert a snapshot, replacing one of the same operation."""
    values = {field: getattr(snapshot, field) for field in snapshot.__dataclass_fields__}
    connection.execute(
        insert(connection, snapshots)
        .values(**values)
        .on_conflict_do_update(index_elements=["run", "sequence_number"], set_=values)
    )


def epoch_of(connection: sa.Connection, run: str) -> int | None:
    """Return the epoch under which a run is held."""
    query = sa.select(leases.c.epoch).where(leases.c.run == run)
    return connection.execute(query).scalar_one_or_none()


def check_fence(connection: sa.Connection, run: str, epoch: int) -> None:
    """Refuse to write under another epoch.

    Raises:
        FencedError: If another epoch holds the run.
    """
    held = epoch_of(connection, run)
    if held != epoch:
        raise FencedError(
            f"run {run} is held under epoch {held}, not {epoch}; this process must stop", run=run
        )
