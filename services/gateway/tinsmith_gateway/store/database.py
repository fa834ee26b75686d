"""The database of a gateway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tinsmith_gateway.store.tables import SCHEMA_VERSION, metadata
from tinsmith_runtime.sql import Database, open_exclusive


async def open_database(
    data_dir: Path, database_url: str = "", *, on_lost: Callable[[], None] = lambda: None
) -> Database:
    """Open or create the database of a gateway; one process has it at a time.

    Raises:
        ConfigError: If another process has the file open, a newer release wrote the tables, or the
            URL is wrong.
    """
    return await open_exclusive(
        "gateway",
        metadata,
        data_dir=data_dir,
        database_url=database_url,
        schema_version=SCHEMA_VERSION,
        on_lost=on_lost,
    )
