"""Opening the database of a pod of which one process works at a time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import sqlalchemy as sa

from tinsmith_runtime.sql.postgres import PostgresDatabase
from tinsmith_runtime.sql.sqlite import SqliteDatabase

_POOL_DIGITS = 16


@dataclass(frozen=True, slots=True)
class Store:
    """The tables of one kind of pod.

    Attributes:
        pod: Names the file, and the PostgreSQL schema: all pods may share a database.
        metadata: The tables.
        schema_version: Of the tables.
        migrations: The package that upgrades older tables.
    """

    pod: str
    metadata: sa.MetaData
    schema_version: int
    migrations: str = ""

    def of_pool(self, pool: str) -> Store:
        """Return the store of the pods of a pool: one of its own beside that of the shared ones.

        Args:
            pool: Of the pods; empty for the shared ones.
        """
        if not pool:
            return self
        digest = hashlib.sha256(pool.encode()).hexdigest()[:_POOL_DIGITS]
        return replace(self, pod=f"{self.pod}_{digest}")


async def open_store(
    store: Store,
    data_dir: Path,
    database_url: str = "",
    *,
    on_lost: Callable[[], None] = lambda: None,
) -> SqliteDatabase | PostgresDatabase:
    """Open or create the database of a pod; one process has it at a time.

    Args:
        store: The tables.
        data_dir: Folder of the file, if there is no URL.
        database_url: `postgresql://...`; another process on it is waited for until it ends.
        on_lost: Called if another process took over while this one was cut off; see
            `PostgresDatabase.open`.

    Returns:
        The database, with tables of this release.

    Raises:
        ConfigError: If another process has the file open, a newer release wrote the tables, or the
            URL is wrong.
    """
    if not database_url:
        return await asyncio.to_thread(
            SqliteDatabase,
            data_dir / f"{store.pod}.sqlite",
            store.metadata,
            schema_version=store.schema_version,
            migrations=store.migrations,
        )
    return await PostgresDatabase.open(
        database_url,
        store.metadata,
        schema=store.pod,
        schema_version=store.schema_version,
        migrations=store.migrations,
        exclusive=store.pod,
        on_lost=on_lost,
        application_name=f"tinsmith {store.pod}",
    )
