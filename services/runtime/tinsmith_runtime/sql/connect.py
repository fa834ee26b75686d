"""Opening the database of a pod of which one process works at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from tinsmith_runtime.sql.postgres import PostgresDatabase
from tinsmith_runtime.sql.sqlite import SqliteDatabase


async def open_exclusive(
    pod: str,
    metadata: sa.MetaData,
    *,
    data_dir: Path,
    database_url: str,
    schema_version: int,
    migrations: str = "",
    on_lost: Callable[[], None] = lambda: None,
) -> SqliteDatabase | PostgresDatabase:
    """Open or create the database of a pod; one process has it at a time.

    Args:
        pod: Names the file, and the PostgreSQL schema: all pods may share a database.
        metadata: The tables.
        data_dir: Folder of the file, if there is no URL.
        database_url: `postgresql://...`; another process on it is waited for until it ends.
        schema_version: Of the tables.
        migrations: The package that upgrades older tables.
        on_lost: Called if another process took over while this one was cut off; see
            `PostgresDatabase.open`.

    Raises:
        ConfigError: If another process has the file open, a newer release wrote the tables, or the
            URL is wrong.
    """
    if not database_url:
        return await asyncio.to_thread(
            SqliteDatabase,
            data_dir / f"{pod}.sqlite",
            metadata,
            schema_version=schema_version,
            migrations=migrations,
        )
    return await PostgresDatabase.open(
        database_url,
        metadata,
        schema=pod,
        schema_version=schema_version,
        migrations=migrations,
        exclusive=pod,
        on_lost=on_lost,
        application_name=f"tinsmith {pod}",
    )
