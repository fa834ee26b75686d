"""What the scheduler forgets in time: ended sessions, rows of deleted runs, refused keys.

A sweep stamps what it finds ended, and a later one deletes what was stamped long ago. So no path by
which something ends has to know of it; the retention begins with the sweep after the end. Rows go
in parts, each by index, so that no other write waits for long.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from tinsmith_scheduler.store.records import KeyState, RunState, SessionState
from tinsmith_scheduler.store.tables import keys, releases, runs, sessions

BATCH = 500
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
