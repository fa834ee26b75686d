"""The part of the ledger that is about the past of runs, as transactions on a SQL database."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa

from tinsmith_runtime.errors import AbortedError
from tinsmith_runtime.ledger import snapshot_statements, statements
from tinsmith_runtime.ledger.history import EndedOperation, RunCopy, RunHistory
from tinsmith_runtime.ledger.records import OperationState
from tinsmith_runtime.ledger.sql_deletions import SqlDeletions
from tinsmith_runtime.ledger.tables import leases, operations, runs

_IS_SUCCESS = operations.c.state == OperationState.SUCCEEDED
_EMPTIED_BY_RERUN = (
    "plan",
    "result",
    "error",
    "finish_time_s",
    "retrieve_time_s",
    "result_digest",
)


class SqlHistory(SqlDeletions):
    """The past of runs."""

    async def history(self, run: str, kinds: Collection[str]) -> RunHistory | None:
        """Return what is kept of the past of a run, in whatever hands; None if there is none.

        Args:
            run: Its name.
            kinds: Kinds of the operations that are wanted.
        """

        def read(connection: sa.Connection) -> RunHistory | None:
            query = statements.select_runs().where(runs.c.name == run)
            row = connection.execute(query).mappings().first()
            marks = connection.execute(_select_marks(run)).first()
            if row is None or marks is None:
                return None
            return RunHistory(
                run=statements.run_of(row),
                is_here=not self._store or marks.store in ("", self._store),
                expired_through=marks.expired_through,
                payloads_through=marks.payloads_through,
                ended=tuple(
                    EndedOperation(**each)
                    for each in connection.execute(_select_ended(run, kinds)).mappings()
                ),
                snapshots=tuple(snapshot_statements.snapshots_of(connection, run)),
            )

        return await self._database.read(read)

    async def stored_requests(self, copy: RunCopy) -> list[str]:
        """Return the `payload_path` of each large request of the source that a copy needs."""
        query = (
            sa.select(operations.c.payload_path)
            .distinct()
            .where(*_is_copied(copy), _needs_request(copy), operations.c.payload_path.is_not(None))
        )
        found = await self._database.read(
            lambda connection: list(connection.execute(query).scalars())
        )
        return [path for path in found if path is not None]

    async def copy_run(self, copy: RunCopy) -> bool:
        """Copy rows of a run into another that has none; the files must be there already.

        Returns:
            False if something that is needed was dropped meanwhile; nothing was written.

        Raises:
            FencedError: If the epoch of the target no longer holds.
            AbortedError: If the target has operations.
        """
        return await self._database.write(lambda connection: _copy(connection, copy))


def _select_marks(run: str) -> sa.Select[tuple[int, int, str]]:
    return (
        sa.select(leases.c.expired_through, leases.c.payloads_through, runs.c.store)
        .join(runs, runs.c.name == leases.c.run)
        .where(leases.c.run == run)
    )


def _select_ended(run: str, kinds: Collection[str]) -> sa.Select[tuple[object, ...]]:
    return (
        sa.select(
            operations.c.sequence_number,
            operations.c.kind,
            _IS_SUCCESS.label("is_success"),
            operations.c.plan.is_not(None).label("was_begun"),
            operations.c.result,
        )
        .where(operations.c.run == run, operations.c.kind.in_(kinds), operations.c.revision > 0)
        .order_by(operations.c.sequence_number)
    )


def _is_copied(copy: RunCopy) -> tuple[sa.ColumnElement[bool], ...]:
    """Whether a row of the source is one that is copied."""
    return (
        operations.c.run == copy.source,
        operations.c.sequence_number > copy.rows_after,
        operations.c.sequence_number <= copy.through,
    )


def _is_rerun(copy: RunCopy) -> sa.ColumnElement[bool]:
    """Whether an operation is executed anew; one that failed stays as it is."""
    if not copy.rerun_from:
        return sa.false()
    return sa.and_(
        operations.c.sequence_number >= copy.rerun_from,
        operations.c.kind.in_(copy.rerun_kinds),
        _IS_SUCCESS,
    )


def _needs_request(copy: RunCopy) -> sa.ColumnElement[bool]:
    """Whether the request of an operation is needed to replay or to execute it."""
    is_replayed = sa.and_(
        operations.c.sequence_number > copy.requests_after,
        operations.c.kind.in_(copy.replayed_kinds),
        _IS_SUCCESS,
    )
    return sa.or_(is_replayed, _is_rerun(copy))


def _copy(connection: sa.Connection, copy: RunCopy) -> bool:
    # Alone: nothing is accepted for the target meanwhile.
    target = statements.lock_lease(connection, copy.target, alone=True)
    if target is None or target.epoch != copy.epoch:
        raise statements.fenced(copy.target, copy.epoch)
    of_target = sa.select(operations.c.sequence_number).where(operations.c.run == copy.target)
    if connection.execute(of_target.limit(1)).first() or target.expired_through:
        raise AbortedError(f"run {copy.target} has operations; fork into a new run")
    # What is needed is not dropped while this transaction looks.
    if statements.lock_lease(connection, copy.source) is None:
        return False
    if not _is_whole(connection, copy):
        return False
    _insert_rows(connection, copy)
    if copy.snapshot is not None:
        snapshot_statements.insert_snapshot(connection, copy.snapshot)
    connection.execute(
        sa.update(leases)
        .where(leases.c.run == copy.target)
        .values(expired_through=copy.rows_after, payloads_through=copy.requests_after)
    )
    newest = sa.select(sa.func.coalesce(sa.func.max(operations.c.revision), 0)).where(
        operations.c.run == copy.target
    )
    connection.execute(
        sa.update(runs)
        .where(runs.c.name == copy.target)
        .values(version=copy.version, last_revision=newest.scalar_subquery())
    )
    return True


def _is_whole(connection: sa.Connection, copy: RunCopy) -> bool:
    """Whether every row that is copied ended, and has its request if that is needed."""
    has_request = operations.c.payload.is_not(None) | operations.c.payload_path.is_not(None)
    is_usable = sa.and_(operations.c.revision > 0, has_request | sa.not_(_needs_request(copy)))
    query = sa.select(sa.func.count()).select_from(operations).where(*_is_copied(copy), is_usable)
    num_usable: int = connection.execute(query).scalar_one()
    return num_usable == copy.through - copy.rows_after


def _insert_rows(connection: sa.Connection, copy: RunCopy) -> None:
    is_rerun, needs_request = _is_rerun(copy), _needs_request(copy)
    columns: dict[str, sa.ColumnElement[object]] = {column.name: column for column in operations.c}
    path = sa.func.replace(operations.c.payload_path, f"{copy.source}/", f"{copy.target}/")
    columns |= {
        "run": sa.literal(copy.target),
        "payload": sa.case((needs_request, operations.c.payload)),
        "payload_path": sa.case((needs_request, path)),
        "state": sa.case((is_rerun, OperationState.PENDING.value), else_=operations.c.state),
        "num_attempts": sa.case((is_rerun, 0), else_=operations.c.num_attempts),
        "revision": sa.case((is_rerun, 0), else_=operations.c.revision),
        "submit_time_s": sa.case((is_rerun, copy.submit_time_s), else_=operations.c.submit_time_s),
    }
    for name in _EMPTIED_BY_RERUN:
        columns[name] = sa.case((sa.not_(is_rerun), operations.c[name]))
    chosen = sa.select(*(column.label(name) for name, column in columns.items()))
    connection.execute(
        sa.insert(operations).from_select(list(columns), chosen.where(*_is_copied(copy)))
    )
