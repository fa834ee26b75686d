"""What the two databases spell differently and SQLAlchemy does not hide."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


def insert(connection: sa.Connection, table: sa.Table) -> Any:
    """Return an insert with `on_conflict_do_nothing` and `on_conflict_do_update`."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)


def notify(connection: sa.Connection, channel: str, payload: str) -> None:
    """Tell the processes that listen, once the transaction is committed; SQLite has none."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_notify(channel, payload)))


def now_s(connection: sa.Connection) -> sa.ColumnElement[float]:
    """Return an expression for the database's clock, in seconds since the epoch.

    It goes on within a transaction.
    """
    if connection.dialect.name == "postgresql":
        return sa.extract("epoch", sa.func.clock_timestamp()).cast(sa.Float)
    return (sa.func.julianday("now", type_=sa.Float) - 2440587.5) * 86400.0
