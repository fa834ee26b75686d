"""Opening the database of a coordinator, and its clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tinsmith_coordinator.tables import MIGRATIONS, SCHEMA_VERSION, metadata
from tinsmith_runtime.sql import Database, PostgresDatabase, SqliteDatabase, now_s

Clock = Callable[[sa.Connection], float]
"""Reads the time within a transaction, in seconds since the epoch."""

SCHEMA = "coordinator"
"""The PostgreSQL schema of the tables: pods may share a database."""

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
    if not database_url:
        return await asyncio.to_thread(
            SqliteDatabase,
            data_dir / "coordinator.sqlite",
            metadata,
            schema_version=SCHEMA_VERSION,
            migrations=MIGRATIONS,
        )
    return await PostgresDatabase.open(
        database_url,
        metadata,
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        migrations=MIGRATIONS,
        exclusive="coordinator",
        on_lost=on_lost,
        application_name="tinsmith coordinator",
    )


def database_clock(connection: sa.Connection) -> float:
    """Return the time of the database, which alone decides whether a lease ran out."""
    dialect = connection.dialect.name
    if dialect not in _now:
        _now[dialect] = sa.select(now_s(connection))
    value: float = connection.execute(_now[dialect]).scalar_one()
    return value
