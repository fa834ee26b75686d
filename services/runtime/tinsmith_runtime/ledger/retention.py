"""What the ledger forgets in time, and what it must not forget.

Three things of an operation go, each when it can no longer be needed:

* its result or error, when its client had it long enough; the digest of a result stays, so that a
  replay still compares;
* its request, when it ended long ago and no replay begins below it: every snapshot that is kept,
  two of them, already contains it;
* its row, when both are gone and the time in which a request may be repeated is over.

Requests and rows go from the lowest number on, without leaving one out: `payloads_through` and
`expired_through` say how far.

A finished operation has its kind, state and plan for as long as it has a row. A replay needs no
more of a failed one. Above the oldest snapshot every row is whole but for its result.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from tinsmith_runtime.ledger.records import Cutoffs, Expired
from tinsmith_runtime.ledger.tables import leases, operations, snapshots

NUM_KEPT_SNAPSHOTS = 2
_BATCH = 200
_BATCH_BYTES = 8 * 2**20

_IS_KEPT = operations.c.result.is_not(None) | operations.c.error.is_not(None)


def has_due(connection: sa.Connection, run: str, cutoffs: Cutoffs) -> bool:
    """Return whether `expire` would drop anything; reads a few index entries."""
    if any(connection.execute(query.limit(1)).first() for query in _due_results(run, cutoffs)):
        return True
    marks = _marks(connection, run)
    if marks is None:
        return False
    expired_through, payloads_through = marks
    return bool(
        _num_droppable(connection, run, payloads_through, cutoffs, limit=1)
        or _num_deletable(connection, run, expired_through, payloads_through, cutoffs, limit=1)
    )


def expire(connection: sa.Connection, run: str, cutoffs: Cutoffs) -> Expired:
    """Drop a bounded part of what is due; the caller checked the fence."""
    # No submit may come meanwhile: a number whose row goes must not be taken as a free one.
    marks = _marks(connection, run, lock=True)
    if marks is None:
        return Expired()
    expired_through, payloads_through = marks
    num_results = _drop_results(connection, run, cutoffs)
    num_payloads = _num_droppable(connection, run, payloads_through, cutoffs, limit=_BATCH)
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
    num_rows = _num_deletable(
        connection, run, expired_through, payloads_through, cutoffs, limit=_BATCH
    )
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
    return Expired(num_results=num_results, num_payloads=num_payloads, num_rows=num_rows)


def expired_through(connection: sa.Connection, run: str) -> int:
    """Return the number up to which the rows of a run were deleted."""
    marks = _marks(connection, run)
    return marks[0] if marks is not None else 0


def _marks(connection: sa.Connection, run: str, *, lock: bool = False) -> tuple[int, int] | None:
    query = sa.select(leases.c.expired_through, leases.c.payloads_through).where(
        leases.c.run == run
    )
    row = connection.execute(query.with_for_update() if lock else query).first()
    return (row.expired_through, row.payloads_through) if row is not None else None


def _due_results(run: str, cutoffs: Cutoffs) -> list[sa.Select[tuple[int]]]:
    of_run = sa.select(operations.c.sequence_number).where(operations.c.run == run, _IS_KEPT)
    return [
        of_run.where(operations.c.retrieve_time_s < cutoffs.retrieved_s),
        of_run.where(
            operations.c.retrieve_time_s.is_(None),
            operations.c.finish_time_s < cutoffs.unretrieved_s,
        ),
    ]


def _drop_results(connection: sa.Connection, run: str, cutoffs: Cutoffs) -> int:
    numbers = sorted(
        number
        for query in _due_results(run, cutoffs)
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


def _oldest_snapshot(connection: sa.Connection, run: str) -> int:
    """Return the number of the oldest snapshot that is kept; 0 unless there are as many as may.

    With one snapshot alone a damaged file would leave nothing to replay from.
    """
    numbers = connection.execute(
        sa.select(snapshots.c.sequence_number)
        .where(snapshots.c.run == run)
        .order_by(snapshots.c.sequence_number.desc())
    ).scalars()
    kept = list(numbers)
    return kept[-1] if len(kept) >= NUM_KEPT_SNAPSHOTS else 0


def _num_droppable(
    connection: sa.Connection, run: str, payloads_through: int, cutoffs: Cutoffs, *, limit: int
) -> int:
    """Count the requests that may go, from the lowest number on."""
    last = min(_oldest_snapshot(connection, run), payloads_through + limit)
    rows = _ended_between(connection, run, payloads_through, last)
    return len(list(itertools.takewhile(lambda row: row.finish_time_s < cutoffs.request_s, rows)))


def _num_deletable(
    connection: sa.Connection,
    run: str,
    expired_through: int,
    payloads_through: int,
    cutoffs: Cutoffs,
    *,
    limit: int,
) -> int:
    """Count the rows that may go, from the lowest number on."""
    last = min(payloads_through, expired_through + limit)
    rows = _ended_between(connection, run, expired_through, last)
    is_due = lambda row: not row.is_kept and row.finish_time_s < cutoffs.request_s  # noqa: E731
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
