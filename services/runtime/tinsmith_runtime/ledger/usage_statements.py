"""What `Ledger` says to the database about usage: totals by run, key and day.

The transaction that commits results adds what they used, once: a result is never committed twice.
A total is marked when the scheduler has it, and loses the mark with the next addition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from tinsmith_runtime.ledger.records import OperationOutcome, OperationRecord
from tinsmith_runtime.ledger.tables import checkpoint_exports, checkpoints, leases, usage_totals
from tinsmith_runtime.sql import insert
from tinsmith_runtime.usage import NOTHING, UsageAmounts, UsageKey, day_of

_COUNTED = ("num_trained_tokens", "num_prefilled_tokens", "engine_s")
"""What training uses; the columns have the names of the fields."""


def add(
    connection: sa.Connection,
    run: str,
    outcomes: Iterable[tuple[OperationOutcome, OperationRecord]],
) -> None:
    """Add what operations used that are committed by this transaction."""
    used: defaultdict[tuple[str, int], UsageAmounts] = defaultdict(UsageAmounts)
    for outcome, record in outcomes:
        if outcome.used != NOTHING:
            used[record.key_id, day_of(outcome.finish_time_s)] += outcome.used
    for (key_id, day), amounts in used.items():
        counts = {name: getattr(amounts, name) for name in _COUNTED}
        connection.execute(
            insert(connection, usage_totals)
            .values(run=run, key_id=key_id, day=day, is_reported=False, **counts)
            .on_conflict_do_update(
                index_elements=["run", "key_id", "day"],
                set_={
                    "is_reported": False,
                    **{name: usage_totals.c[name] + count for name, count in counts.items()},
                },
            )
        )


def unreported(
    connection: sa.Connection, holder: str | None, limit: int
) -> dict[UsageKey, UsageAmounts]:
    """Return totals that the scheduler does not have yet.

    Args:
        connection: The transaction.
        holder: Leaves out runs that another process holds; None where one process has all.
        limit: How many at most.
    """
    query = sa.select(usage_totals).where(sa.not_(usage_totals.c.is_reported)).limit(limit)
    if holder is not None:
        held_elsewhere = sa.exists().where(
            leases.c.run == usage_totals.c.run, leases.c.holder.not_in(("", holder))
        )
        query = query.where(sa.not_(held_elsewhere))
    return {
        UsageKey(
            project=row.run.split("/")[1], run=row.run, key_id=row.key_id, day=row.day
        ): UsageAmounts(**{name: getattr(row, name) for name in _COUNTED})
        for row in connection.execute(query)
    }


def note_reported(
    connection: sa.Connection, totals: Mapping[UsageKey, UsageAmounts], *, forget_before: int
) -> None:
    """Mark totals that the scheduler has, unless they have grown since; forget old ones."""
    for key, amounts in totals.items():
        connection.execute(
            sa.update(usage_totals)
            .where(
                usage_totals.c.run == key.run,
                usage_totals.c.key_id == key.key_id,
                usage_totals.c.day == key.day,
                *(usage_totals.c[name] == getattr(amounts, name) for name in _COUNTED),
            )
            .values(is_reported=True)
        )
    connection.execute(
        sa.delete(usage_totals).where(
            usage_totals.c.is_reported, usage_totals.c.day < forget_before
        )
    )


def stored_bytes(connection: sa.Connection) -> dict[tuple[str, str], int]:
    """Return what checkpoints and exports take, by project and run."""
    sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for table in (checkpoints, checkpoint_exports):
        query = sa.select(table.c.run, sa.func.sum(table.c.size_bytes)).group_by(table.c.run)
        for run, size_bytes in connection.execute(query):
            sizes[run.split("/")[1], run] += int(size_bytes)
    return dict(sizes)
