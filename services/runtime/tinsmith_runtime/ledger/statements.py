"""What `Ledger` says to the database: statements, rows to records, the fence."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith_runtime.errors import (
    AbortedError,
    RequestIdReusedError,
    RunHeldError,
    SequenceGapError,
    SequenceNumberReusedError,
    StorageBusyError,
)
from tinsmith_runtime.ledger import usage_statements
from tinsmith_runtime.ledger.records import (
    GIVEN_UP_KIND,
    Commit,
    FencedError,
    Holder,
    NewOperation,
    OperationOutcome,
    OperationRecord,
    OperationState,
    RunRecord,
)
from tinsmith_runtime.ledger.retention import expired_through
from tinsmith_runtime.ledger.tables import (
    facts,
    holders,
    leases,
    operations,
    runs,
    snapshots,
)
from tinsmith_runtime.sql import insert, notify, now_s

LEASES_CHANNEL = "tinsmith_leases"
"""Where it is said whose lease was taken; the payload is the name of the holder before."""

_SUMMARY_COLUMNS = [
    column for column in operations.c if column.name not in ("payload", "payload_path")
]


def select_runs() -> sa.Select[tuple[object, ...]]:
    """Select all runs with their epochs."""
    columns = [column for column in runs.c if column.name not in ("last_revision", "store")]
    query = sa.select(*columns, leases.c.epoch).join(leases, leases.c.run == runs.c.name)
    return query.order_by(runs.c.name)


def run_of(row: sa.RowMapping) -> RunRecord:
    """Return a row as a record."""
    return RunRecord(**row)


def select_operations() -> sa.Select[tuple[object, ...]]:
    """Select operations without their payloads."""
    return sa.select(*_SUMMARY_COLUMNS)


def lowest_unfinished(connection: sa.Connection, run: str) -> int:
    """Return the lowest number of a run, from 1, that has no result.

    It is the lowest that waits, or the lowest that never arrived. Everything up to a snapshot is
    finished, and what is above is counted by indexes alone: a row may carry a large request.
    """
    newest_snapshot = sa.select(sa.func.max(snapshots.c.sequence_number)).where(
        snapshots.c.run == run
    )
    through: int = max(
        expired_through(connection, run), connection.execute(newest_snapshot).scalar_one() or 0
    )
    of_run = [operations.c.run == run, operations.c.sequence_number > through]
    # Revision 0: without a result.
    waiting = sa.select(sa.func.min(operations.c.sequence_number)).where(
        *of_run, operations.c.revision == 0
    )
    lowest_waiting: int | None = connection.execute(waiting).scalar_one()
    if lowest_waiting is not None:
        of_run.append(operations.c.sequence_number < lowest_waiting)
    num_finished: int
    highest, num_finished = connection.execute(
        sa.select(sa.func.max(operations.c.sequence_number), sa.func.count()).where(*of_run)
    ).one()
    if num_finished == (highest or through) - through:
        return through + num_finished + 1
    placed = (
        sa.select(
            operations.c.sequence_number.label("number"),
            sa.func.row_number().over(order_by=operations.c.sequence_number).label("place"),
        )
        .where(*of_run)
        .subquery()
    )
    unbroken = sa.select(sa.func.count()).where(placed.c.number == placed.c.place + through)
    num_unbroken: int = connection.execute(unbroken).scalar_one()
    return through + num_unbroken + 1


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
            seen_through=operation.seen_through,
            key_id=operation.key_id,
        )
        .on_conflict_do_nothing()
    )


def note_retrieved(run: str, sequence_number: int, time_s: float) -> sa.Update:
    """Note when a client first got the result of an operation."""
    return (
        sa.update(operations)
        .where(
            operations.c.run == run,
            operations.c.sequence_number == sequence_number,
            operations.c.finish_time_s.is_not(None),
            operations.c.retrieve_time_s.is_(None),
        )
        .values(retrieve_time_s=time_s)
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
        seen_through=operation.seen_through,
        key_id=operation.key_id,
    )


def known_operation(connection: sa.Connection, operation: NewOperation) -> OperationRecord:
    """Return the operation that the same request made, or say why this one cannot be accepted."""
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
    if holder is None:
        raise SequenceNumberReusedError(
            f"sequence number {operation.sequence_number} of {operation.run} belonged to an "
            "operation that has expired; go on with the next free number",
            run=operation.run,
            sequence_number=operation.sequence_number,
        )
    if holder.kind == GIVEN_UP_KIND:
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


def count_attempt(run: str, sequence_number: int, num_attempts: int) -> sa.Update:
    """Note that an operation is begun for the so-manieth time."""
    return (
        sa.update(operations)
        .where(
            operations.c.run == run,
            operations.c.sequence_number == sequence_number,
            operations.c.num_attempts < num_attempts,
        )
        .values(num_attempts=num_attempts)
    )


def commit(connection: sa.Connection, commit: Commit) -> list[OperationRecord]:
    """Write the results of a run, and return its operations.

    Raises:
        FencedError: If the epoch no longer holds, or an operation has a result already.
    """
    check_fence(connection, commit.run, commit.epoch)
    count = len(commit.outcomes)
    highest = next_revisions(connection, commit.run, count, version=commit.outcomes[-1].version)
    records = []
    for revision, outcome in enumerate(commit.outcomes, highest - count + 1):
        statement = finish_operation(commit.run, outcome, revision).returning(*_SUMMARY_COLUMNS)
        row = connection.execute(statement).mappings().first()
        if row is None:
            raise finished_already(commit.run, outcome.sequence_number)
        records.append(operation_of(row))
    usage_statements.add(connection, commit.run, zip(commit.outcomes, records, strict=True))
    return records


def finished_already(run: str, sequence_number: int) -> FencedError:
    """Return the error of a commit that meets a result."""
    return FencedError(f"operation {sequence_number} of {run} has a result already", run=run)


def finish_operation(run: str, outcome: OperationOutcome, revision: int) -> sa.Update:
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
            revision=revision,
        )
    )


def next_revisions(
    connection: sa.Connection, run: str, count: int, *, version: int | None = None
) -> int:
    """Take revisions for operations that finish now, and return the highest of them.

    The lock of the row makes revisions appear in their order, so that a reader of what is above a
    revision never misses one below.
    """
    values = {"last_revision": runs.c.last_revision + count}
    if version is not None:
        values["version"] = sa.literal(version)
    statement = sa.update(runs).where(runs.c.name == run).values(**values)
    highest: int = connection.execute(statement.returning(runs.c.last_revision)).scalar_one()
    return highest


def insert_failed(
    connection: sa.Connection, run: str, rows: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Insert operations that failed before they began, where their numbers are free.

    Returns:
        The numbers that were inserted, each with a revision.
    """
    numbers = []
    deleted_through = expired_through(connection, run)
    for row in rows:
        if row["sequence_number"] <= deleted_through:
            continue
        values = {"run": run, "state": OperationState.FAILED, "num_attempts": 0, "revision": 0}
        inserted = connection.execute(
            insert(connection, operations).values(**values, **row).on_conflict_do_nothing()
        )
        if inserted.rowcount == 1:
            numbers.append(row["sequence_number"])
    if numbers:
        highest = next_revisions(connection, run, len(numbers))
        for revision, number in enumerate(numbers, highest - len(numbers) + 1):
            connection.execute(
                sa.update(operations)
                .where(operations.c.run == run, operations.c.sequence_number == number)
                .values(revision=revision)
            )
    return numbers


def adopt(
    connection: sa.Connection, run: RunRecord, holder: Holder | None, store: str
) -> RunRecord:
    """Create a run or raise its epoch; see `Ledger.adopt_run`."""
    name = holder.name if holder is not None else ""
    # Inserted first: of two processes that adopt a new run at once, the second one waits here and
    # then finds the lease of the first, which it may have to respect.
    inserted = connection.execute(
        insert(connection, leases)
        .values(run=run.name, epoch=run.epoch, holder=name)
        .on_conflict_do_nothing()
    )
    if inserted.rowcount == 0:
        query = sa.select(leases.c.epoch, leases.c.holder).where(leases.c.run == run.name)
        lease = connection.execute(query.with_for_update()).first()
        if lease is None:
            raise StorageBusyError(
                f"run {run.name} is being deleted; send the request again", run=run.name
            )
        is_repeat = (run.epoch, name) == (lease.epoch, lease.holder)
        if run.epoch < lease.epoch or (run.epoch == lease.epoch and lease.holder and not is_repeat):
            raise AbortedError(
                f"run {run.name} is held under epoch {lease.epoch}, not {run.epoch}",
                run=run.name,
                epoch=lease.epoch,
            )
        if holder is not None and not is_repeat:
            _check_expired(connection, run.name, lease.holder, holder)
        if holder is not None and lease.holder not in ("", name):
            notify(connection, LEASES_CHANNEL, lease.holder)
        connection.execute(
            sa.update(leases).where(leases.c.run == run.name).values(epoch=run.epoch, holder=name)
        )
    connection.execute(
        insert(connection, runs)
        .values(
            name=run.name,
            base_model=run.base_model,
            adapter=run.adapter,
            store=store,
            history_retention_s=run.history_retention_s,
        )
        # Wherever it was before: from now on its files are written there.
        .on_conflict_do_update(index_elements=["name"], set_={"store": store})
    )
    row = connection.execute(select_runs().where(runs.c.name == run.name)).mappings().one()
    return run_of(row)


def _check_expired(connection: sa.Connection, run: str, held_by: str, holder: Holder) -> None:
    """Refuse to take a run from another trainer that is alive by the clock of the database.

    A process of the same trainer does not wait: it was started because the one before is gone, and
    should that be wrong, the fence holds all the same.
    """
    query = sa.select(holders.c.worker, holders.c.expire_time_s - now_s(connection)).where(
        holders.c.name == held_by
    )
    found = connection.execute(query).first()
    if found is None or found[0] == holder.worker or found[1] <= 0:
        return
    raise RunHeldError(
        f"run {run} is held by {found[0]}, whose lease ends in {found[1]:.1f} s; retry then",
        retry_after_s=found[1],
        run=run,
    )


def identity(connection: sa.Connection) -> str:
    """Return the name of this database, drawn at the first question."""
    connection.execute(
        insert(connection, facts)
        .values(name="identity", value=f"ledger-{uuid.uuid4().hex}")
        .on_conflict_do_nothing()
    )
    query = sa.select(facts.c.value).where(facts.c.name == "identity")
    value: str = connection.execute(query).scalar_one()
    return value


def renew(
    connection: sa.Connection, holder: Holder, ttl_s: float, among: Collection[str] | None
) -> dict[str, int]:
    """Extend the lease of a process, and return the epochs of the runs that it holds."""
    values = {"worker": holder.worker, "expire_time_s": now_s(connection) + ttl_s}
    connection.execute(
        insert(connection, holders)
        .values(name=holder.name, **values)
        .on_conflict_do_update(index_elements=["name"], set_=values)
    )
    query = sa.select(leases.c.run, leases.c.epoch).where(leases.c.holder == holder.name)
    if among is not None:
        query = query.where(leases.c.run.in_(among))
    return {row.run: row.epoch for row in connection.execute(query)}


def leave(connection: sa.Connection, holder: Holder) -> None:
    """Give up the lease of a process with all runs that it holds."""
    connection.execute(sa.update(leases).where(leases.c.holder == holder.name).values(holder=""))
    connection.execute(sa.delete(holders).where(holders.c.name == holder.name))


def epoch_of(connection: sa.Connection, run: str) -> int | None:
    """Return the epoch under which a run is held, and hold others off from raising it."""
    lease = lock_lease(connection, run)
    return lease.epoch if lease is not None else None


def lock_lease(
    connection: sa.Connection, run: str, *, alone: bool = False
) -> sa.Row[Any, Any] | None:
    """Return the epoch under which a run is held, and how far its rows were deleted.

    Args:
        connection: The transaction.
        run: Its name.
        alone: Whether other writes to the run are held off as well.
    """
    # Locked until the end of the transaction: a raise of the epoch waits for it, and what was
    # checked here is still true at the commit.
    query = sa.select(leases.c.epoch, leases.c.expired_through).where(leases.c.run == run)
    return connection.execute(query.with_for_update(read=not alone)).first()


def check_fence(connection: sa.Connection, run: str, epoch: int) -> None:
    """Refuse to write under another epoch.

    Raises:
        FencedError: If another epoch holds the run.
    """
    held = epoch_of(connection, run)
    if held != epoch:
        raise fenced(run, epoch)


def fenced(run: str, epoch: int) -> FencedError:
    """Return the error of a write under an epoch that no longer holds."""
    return FencedError(
        f"run {run} is not held under epoch {epoch} any more; this process must stop", run=run
    )
