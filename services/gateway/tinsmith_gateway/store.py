"""The database of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tinsmith_gateway.tables import SCHEMA_VERSION, metadata
from tinsmith_runtime.sql import Database, PostgresDatabase, SqliteDatabase

SCHEMA = "gateway"
"""The PostgreSQL schema of the tables: all pods may share a database."""


async def open_database(
    data_dir: Path, database_url: str = "", *, on_lost: Callable[[], None] = lambda: None
) -> Database:
    """Open or create the database of a gateway; one process has it at a time.

    Raises:
        ConfigError: If another process has the file open, a newer release wrote the tables, or the
            URL is wrong.
    """
    if not database_url:
        return await asyncio.to_thread(
            SqliteDatabase, data_dir / "gateway.sqlite", metadata, schema_version=SCHEMA_VERSION
        )
    return await PostgresDatabase.open(
        database_url,
        metadata,
        schema=SCHEMA,
        schema_version=SCHEMA_VERSION,
        exclusive="gateway",
        on_lost=on_lost,
        application_name="tinsmith gateway",
    )
