"""Which snapshots of a run the ledger has, and which of them are needed.

Two are for a restart: the newest, and one before it should that be damaged. The others are for the
past: it is computed again from the snapshot before, so some are kept all over the time of which it
is kept. Their number does not grow with the run, and with that time as its logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import sqlalchemy as sa

from tinsmith_runtime.ledger.records import SnapshotRecord
from tinsmith_runtime.ledger.tables import snapshots
from tinsmith_runtime.sql import insert

NUM_NEWEST_SNAPSHOTS = 2
"""Snapshots that are kept however old they are: with one, a damaged file would leave nothing."""


def snapshots_of(connection: sa.Connection, run: str) -> list[SnapshotRecord]:
    """Return the snapshots of a run, newest first."""
    query = (
        sa.select(snapshots)
        .where(snapshots.c.run == run)
        .order_by(snapshots.c.sequence_number.desc())
    )
    return [SnapshotRecord(**row) for row in connection.execute(query).mappings()]


def insert_snapshot(connection: sa.Connection, snapshot: SnapshotRecord) -> None:
    """Insert a snapshot, replacing one of the same operation."""
    values = {field: getattr(snapshot, field) for field in snapshot.__dataclass_fields__}
    connection.execute(
        insert(connection, snapshots)
        .values(**values)
        .on_conflict_do_update(index_elements=["run", "sequence_number"], set_=values)
    )


def begin_of_past(kept: Sequence[SnapshotRecord], past_s: float) -> SnapshotRecord | None:
    """Return the snapshot from which all that was done since a time can be computed again.

    Args:
        kept: The snapshots of a run, newest first.
        past_s: The time.

    Returns:
        The newest that is as old as that; None if there is none, and the past begins with the run.
        It is never the newest of all: a damaged file would leave nothing to replay from.
    """
    older = kept[NUM_NEWEST_SNAPSHOTS - 1 :]
    return next((each for each in older if each.create_time_s <= past_s), None)


def superfluous_snapshots(
    kept: Sequence[SnapshotRecord],
    *,
    now_s: float,
    history_s: float,
    recent_s: float,
    num_history: int,
) -> list[SnapshotRecord]:
    """Return which snapshots of a run are not needed any more.

    The newest ones stay, for a restart. Of the others those stay from which the past is made again:
    where it begins, and from there on the first in each part of its time. Parts double in width as
    they double in age, so that a longer past costs a few more. The widths are powers of two, and
    what is first in a part is first in a smaller one too: what was forgotten is never missed.

    Args:
        kept: The snapshots of a run, newest first.
        now_s: The time.
        history_s: How far back the past is kept.
        recent_s: How far back parts have the smallest width.
        num_history: Into how many parts that recent time is divided, at least 1.
    """
    begin = begin_of_past(kept, now_s - history_s)
    chosen_s: float | None = None
    superfluous: list[SnapshotRecord] = []
    for each in reversed(kept[NUM_NEWEST_SNAPSHOTS:]):
        age_s = max(now_s - each.create_time_s, recent_s)
        width_s = recent_s / num_history * 2 ** math.floor(math.log2(age_s / recent_s))
        is_past = begin is None or each.sequence_number >= begin.sequence_number
        is_first = chosen_s is None or each.create_time_s // width_s > chosen_s // width_s
        if is_past and is_first:
            chosen_s = each.create_time_s
        else:
            superfluous.append(each)
    return superfluous


def forget_snapshots(
    connection: sa.Connection, superfluous: Sequence[SnapshotRecord]
) -> list[SnapshotRecord]:
    """Forget snapshots of a run, and return those that no other write forgot before."""
    if not superfluous:
        return []
    statement = (
        sa.delete(snapshots)
        .where(
            snapshots.c.run == superfluous[0].run,
            snapshots.c.sequence_number.in_([each.sequence_number for each in superfluous]),
        )
        .returning(*snapshots.c)
    )
    return [SnapshotRecord(**row) for row in connection.execute(statement).mappings()]
