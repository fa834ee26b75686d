"""Opening the database of a coordinator, and its clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tinsmith_coordinator.store.tables import MIGRATIONS, SCHEMA_VERSION, metadata
from tinsmith_runtime.sql import Database, now_s, open_exclusive

Clock = Callable[[sa.Connection], float]
"""Reads the time within a transaction, in seconds since the epoch."""


_now: dict[str, sa.Select[Any]] = {}


async def open_database(
    data_dir: Path, database_url: str = "", *, on_lost: Callable[[], None] = lambda: None
) -> Database:
    """Open or create the database of a coordinator; one process has it at a time.

    Args:
        data_dir: Folder of the file, if there is no URL.
        database_url: `postgresql://...`; another coordinator on it is waited for until it ends.
        on_lost: Called if another coordinator took over while this one was cut off; see
            `PostgresDatabase.open`.

    Raises:
        ConfigError: If another process has the file open, a newer release wrote the tables, or the
            URL is wrong.
    """
    return await open_exclusive(
        "coordinator",
        metadata,
        data_dir=data_dir,
        database_url=database_url,
        schema_version=SCHEMA_VERSION,
        migrations=MIGRATIONS,
        on_lost=on_lost,
    )


def database_clock(connection: sa.Connection) -> float:
    """Return the time of the database, which alone decides whether a lease ran out."""
    dialect = connection.dialect.name
    if dialect not in _now:
        _now[dialect] = sa.select(now_s(connection))
    return float(connection.execute(_now[dialect]).scalar_one())
