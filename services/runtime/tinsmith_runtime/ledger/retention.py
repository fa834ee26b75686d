"""What the ledger forgets in time, and what it must not forget.

Three things of an operation go, each when it can no longer be needed:

* its result or error, when its client had it long enough; the digest of a result stays, so that a
  replay still compares;
* its request, when it ended before the past that is kept: the snapshot from which that begins
  contains it, and so does a newer one;
* its row, when both are gone and the time in which a request may be repeated is over; but not that
  of the operation that made the version at which the past begins.

The past that is kept is that of `HISTORY_RETENTION_S`, or of a longer time that the run says. Then
its results are kept for as long too: a step that is played again has what it is compared with.

Requests and rows go from the lowest number on, without leaving one out: `payloads_through` and
`expired_through` say how far.

A finished operation has its kind, state and plan for as long as it has a row. A replay needs no
more of a failed one. Above the oldest snapshot every row is whole but for its result: snapshots
before the past that is kept go with the requests.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tinsmith_runtime.ledger import snapshot_statements
from tinsmith_runtime.ledger.records import Cutoffs, Expired, SnapshotRecord
from tinsmith_runtime.ledger.tables import leases, operations, runs
from tinsmith_runtime.records import HISTORY_RETENTION_S

_BATCH = 200
_BATCH_BYTES = 8 * 2**20

_IS_KEPT = operations.c.result.is_not(None) | operations.c.error.is_not(None)


@dataclass(frozen=True, slots=True)
class _Due:
    """What is due of one run, as times before which it ended or was retrieved."""

    past_s: float
    retrieved_s: float
    unretrieved_s: float
    boundary_kinds: frozenset[str]

    @classmethod
    def of(cls, cutoffs: Cutoffs, history_retention_s: float) -> _Due:
        """Return what is due of a run that keeps its past for so long."""
        past_s = cutoffs.now_s - history_s(history_retention_s)
        # Of the default past, results go as the trainer says.
        results_s = past_s if history_retention_s > HISTORY_RETENTION_S else math.inf
        return cls(
            past_s=past_s,
            retrieved_s=min(cutoffs.retrieved_s, results_s),
            unretrieved_s=min(cutoffs.unretrieved_s, results_s),
            boundary_kinds=cutoffs.boundary_kinds,
        )


def history_s(history_retention_s: float) -> float:
    """Return how long the past of a run is kept that says so: never less than requests repeat."""
    return max(HISTORY_RETENTION_S, history_retention_s)


def has_due(connection: sa.Connection, run: str, cutoffs: Cutoffs) -> bool:
    """Return whether `expire` would drop anything; reads a few index entries."""
    marks = _marks(connection, run)
    if marks is None:
        return False
    due = _Due.of(cutoffs, marks.history_retention_s)
    if any(connection.execute(query.limit(1)).first() for query in _due_results(run, due)):
        return True
    expired_through, payloads_through = marks.expired_through, marks.payloads_through
    begin, before = _begin_of_past(connection, run, due)
    return bool(
        before
        or _num_droppable(connection, run, payloads_through, begin, due, limit=1)
        or _num_deletable(connection, run, expired_through, payloads_through, due, limit=1)
    )


def expire(connection: sa.Connection, run: str, cutoffs: Cutoffs) -> Expired:
    """Drop a bounded part of what is due; the caller checked the fence."""
    # No submit may come meanwhile: a number whose row goes must not be taken as a free one.
    marks = _marks(connection, run, lock=True)
    if marks is None:
        return Expired()
    due = _Due.of(cutoffs, marks.history_retention_s)
    expired_through, payloads_through = marks.expired_through, marks.payloads_through
    num_results = _drop_results(connection, run, due)
    begin, before = _begin_of_past(connection, run, due)
    num_payloads = _num_droppable(connection, run, payloads_through, begin, due, limit=_BATCH)
    if num_payloads:
        connection.execute(
            sa.update(operations)
            .where(
                operations.c.run == run,
                operations.c.sequence_number > payloads_through,
                operations.c.sequence_number <= payloads_through + num_payloads,
            )
            .values(payload=None, payload_path=None)
        )
        payloads_through += num_payloads
    num_rows = _num_deletable(connection, run, expired_through, payloads_through, due, limit=_BATCH)
    if num_rows:
        connection.execute(
            sa.delete(operations).where(
                operations.c.run == run,
                operations.c.sequence_number <= expired_through + num_rows,
            )
        )
    if num_payloads or num_rows:
        connection.execute(
            sa.update(leases)
            .where(leases.c.run == run)
            .values(expired_through=expired_through + num_rows, payloads_through=payloads_through)
        )
    return Expired(
        num_results=num_results,
        num_payloads=num_payloads,
        num_rows=num_rows,
        snapshots=tuple(snapshot_statements.forget_snapshots(connection, before)),
    )


def expired_through(connection: sa.Connection, run: str) -> int:
    """Return the number up to which the rows of a run were deleted."""
    query = sa.select(leases.c.expired_through).where(leases.c.run == run)
    return connection.execute(query).scalar_one_or_none() or 0


def set_history(connection: sa.Connection, run: str, history_retention_s: float) -> None:
    """Set how long the past of a run is kept; the caller checked the fence."""
    connection.execute(
        sa.update(runs).where(runs.c.name == run).values(history_retention_s=history_retention_s)
    )


def _marks(
    connection: sa.Connection, run: str, *, lock: bool = False
) -> sa.Row[int, int, float] | None:
    """Return how far the operations of a run are gone, and how long its past is kept."""
    query = (
        sa.select(leases.c.expired_through, leases.c.payloads_through, runs.c.history_retention_s)
        .join(runs, runs.c.name == leases.c.run)
        .where(leases.c.run == run)
    )
    return connection.execute(query.with_for_update(of=leases) if lock else query).first()


def _due_results(run: str, due: _Due) -> list[sa.Select[tuple[int]]]:
    of_run = sa.select(operations.c.sequence_number).where(operations.c.run == run, _IS_KEPT)
    return [
        of_run.where(operations.c.retrieve_time_s < due.retrieved_s),
        of_run.where(
            operations.c.retrieve_time_s.is_(None),
            operations.c.finish_time_s < due.unretrieved_s,
        ),
    ]


def _drop_results(connection: sa.Connection, run: str, due: _Due) -> int:
    numbers = sorted(
        number
        for query in _due_results(run, due)
        for number in connection.execute(query.limit(_BATCH)).scalars()
    )
    rows = connection.execute(
        sa.select(operations.c.sequence_number, operations.c.result).where(
            operations.c.run == run, operations.c.sequence_number.in_(numbers[:_BATCH])
        )
    )
    digests = []
    num_bytes = 0
    for row in rows:
        digest = None if row.result is None else hashlib.sha256(row.result).digest()
        digests.append({"number": row.sequence_number, "result_sha256": digest})
        num_bytes += len(row.result or b"")
        if num_bytes > _BATCH_BYTES:
            break
    if digests:
        connection.execute(
            sa.update(operations)
            .where(
                operations.c.run == run,
                operations.c.sequence_number == sa.bindparam("number"),
            )
            .values(result=None, error=None, result_digest=sa.bindparam("result_sha256")),
            digests,
        )
    return len(digests)


def thin_snapshots(
    connection: sa.Connection, run: str, *, now_s: float, num_history: int
) -> list[SnapshotRecord]:
    """Forget the snapshots of a run that are not needed, and return them."""
    marks = _marks(connection, run)
    if marks is None:
        return []
    superfluous = snapshot_statements.superfluous_snapshots(
        snapshot_statements.snapshots_of(connection, run),
        now_s=now_s,
        history_s=history_s(marks.history_retention_s),
        recent_s=HISTORY_RETENTION_S,
        num_history=num_history,
    )
    return snapshot_statements.forget_snapshots(connection, superfluous)


def _begin_of_past(
    connection: sa.Connection, run: str, due: _Due
) -> tuple[int, list[SnapshotRecord]]:
    """Return the last operation before the past that is kept, and the snapshots before it."""
    kept = snapshot_statements.snapshots_of(connection, run)
    begin = snapshot_statements.begin_of_past(kept, due.past_s)
    if begin is None:
        return 0, []
    return begin.sequence_number, kept[kept.index(begin) + 1 :]


def _num_droppable(
    connection: sa.Connection,
    run: str,
    payloads_through: int,
    begin: int,
    due: _Due,
    *,
    limit: int,
) -> int:
    """Count the requests that may go, from the lowest number on."""
    last = min(begin, payloads_through + limit)
    rows = _ended_between(connection, run, payloads_through, last)
    return len(list(itertools.takewhile(lambda row: row.finish_time_s < due.past_s, rows)))


def _num_deletable(
    connection: sa.Connection,
    run: str,
    expired_through: int,
    payloads_through: int,
    due: _Due,
    *,
    limit: int,
) -> int:
    """Count the rows that may go, from the lowest number on."""
    boundary = sa.select(sa.func.max(operations.c.sequence_number)).where(
        operations.c.run == run,
        operations.c.sequence_number <= payloads_through,
        operations.c.kind.in_(due.boundary_kinds),
    )
    kept = connection.execute(boundary).scalar_one() or payloads_through + 1
    last = min(kept - 1, expired_through + limit)
    rows = _ended_between(connection, run, expired_through, last)
    is_due = lambda row: not row.is_kept and row.finish_time_s < due.past_s  # noqa: E731
    return len(list(itertools.takewhile(is_due, rows)))


def _ended_between(
    connection: sa.Connection, run: str, after: int, last: int
) -> Iterator[sa.Row[Any]]:
    """Return the operations above one number, up to another, as long as none is missing."""
    rows = connection.execute(
        sa.select(
            operations.c.sequence_number,
            operations.c.finish_time_s,
            _IS_KEPT.label("is_kept"),
        )
        .where(
            operations.c.run == run,
            operations.c.sequence_number > after,
            operations.c.sequence_number <= last,
        )
        .order_by(operations.c.sequence_number)
    )
    for number, row in enumerate(rows, after + 1):
        if row.sequence_number != number or row.finish_time_s is None:
            return
        yield row
