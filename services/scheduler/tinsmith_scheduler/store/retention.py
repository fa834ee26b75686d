"""What the scheduler forgets in time: ended sessions, rows of deleted runs, refused keys.

A sweep stamps what it finds ended, and a later one deletes what was stamped long ago. So no path by
which something ends has to know of it; the retention begins with the sweep after the end. Rows go
in parts, each by index, so that no other write waits for long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import sqlalchemy as sa

from tinsmith_scheduler.store.records import KeyState, RunState, SessionState
from tinsmith_scheduler.store.tables import (
    keys,
    metric_blocks,
    metric_points,
    metric_series,
    metric_usage,
    releases,
    runs,
    sessions,
)

BATCH = 500
_SERIES_AT_ONCE = 20
"""Metrics that go in one transaction: each may have thousands of blocks."""
BOOTSTRAP_NAME = "bootstrap"
"""The display name of keys from the settings: forgotten, one that was revoked would come back."""

_ENDED: Sequence[tuple[sa.Table, Sequence[str]]] = (
    (sessions, (SessionState.FINISHED.value, SessionState.EXPIRED.value)),
    (runs, (RunState.FAILED.value, RunState.DELETED.value)),
    (keys, (KeyState.REVOKED.value,)),
)


def stamp_ended(connection: sa.Connection, now_s: float) -> None:
    """Note of what ended since the last sweep that it ended now."""
    for table, states in _ENDED:
        for state in states:
            connection.execute(
                sa.update(table)
                .where(table.c.state == state, table.c.end_time_s.is_(None))
                .values(end_time_s=now_s)
            )


def forget_sessions(connection: sa.Connection, before_s: float) -> int:
    """Delete a part of the sessions that ended before a time; return how many."""
    return len(_delete(connection, sessions, sessions.c.name, _ended_states(sessions), before_s))


def forget_metrics(connection: sa.Connection) -> int:
    """Delete a part of the metrics of runs that were deleted; return how many."""
    is_kept = sa.exists().where(
        runs.c.name == metric_series.c.run, runs.c.state != RunState.DELETED.value
    )
    query = (
        sa.select(metric_series.c.serial, metric_series.c.project, metric_series.c.size_bytes)
        .where(~is_kept)
        .limit(_SERIES_AT_ONCE)
    )
    found = connection.execute(query).all()
    serials = [row.serial for row in found]
    for table in (metric_blocks, metric_points):
        connection.execute(sa.delete(table).where(table.c.series.in_(serials)))
    connection.execute(sa.delete(metric_series).where(metric_series.c.serial.in_(serials)))
    for project in {row.project for row in found}:
        freed = sum(row.size_bytes for row in found if row.project == project)
        connection.execute(
            sa.update(metric_usage)
            .where(metric_usage.c.project == project)
            .values(size_bytes=metric_usage.c.size_bytes - freed)
        )
    return len(found)


def forget_runs(connection: sa.Connection, before_s: float) -> int:
    """Delete a part of the rows of runs that were gone before a time; return how many.

    One that a trainer still has to release stays.
    """
    is_released = ~sa.exists().where(releases.c.run == runs.c.name)
    return len(_delete(connection, runs, runs.c.name, _ended_states(runs), before_s, is_released))


def forget_keys(connection: sa.Connection, before_s: float) -> list[str]:
    """Delete a part of the keys that were refused before a time, and return their ids."""
    is_given = keys.c.display_name != BOOTSTRAP_NAME
    revoked = _delete(connection, keys, keys.c.key_id, _ended_states(keys), before_s, is_given)
    expired = sa.select(keys.c.key_id).where(keys.c.expire_time_s < before_s).limit(BATCH)
    deleted = sa.delete(keys).where(keys.c.key_id.in_(expired)).returning(keys.c.key_id)
    return [*revoked, *connection.execute(deleted).scalars()]


def next_key_expiry_s(connection: sa.Connection, now_s: float) -> float:
    """Return when the first valid key of a user expires, +inf if none does.

    Keys of drivers end with their jobs, which is no concern of an operator.
    """
    expire_s = connection.execute(
        sa.select(sa.func.min(keys.c.expire_time_s)).where(
            keys.c.state == KeyState.ACTIVE.value, keys.c.job == "", keys.c.expire_time_s > now_s
        )
    ).scalar()
    return math.inf if expire_s is None else float(expire_s)


def _ended_states(table: sa.Table) -> Sequence[str]:
    return next(states for each, states in _ENDED if each is table)


def _delete(
    connection: sa.Connection,
    table: sa.Table,
    name: sa.Column[str],
    states: Sequence[str],
    before_s: float,
    *conditions: sa.ColumnElement[bool],
) -> list[str]:
    found = (
        sa.select(name)
        .where(table.c.state.in_(states), table.c.end_time_s < before_s, *conditions)
        .limit(BATCH)
    )
    statement = sa.delete(table).where(name.in_(found)).returning(name)
    return list(connection.execute(statement).scalars())
