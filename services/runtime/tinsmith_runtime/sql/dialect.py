"""What the two databases spell alike but SQLAlchemy does not: inserts that may meet a row."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite


def insert(connection: sa.Connection, table: sa.Table) -> Any:
    """Return an insert with `on_conflict_do_nothing` and `on_conflict_do_update`."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table)
    return sqlite.insert(table)
