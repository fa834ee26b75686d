"""The ledger on SQLite: one process for each file."""

from __future__ import annotations

from pathlib import Path

from tinsmith_runtime.ledger.sql_ledger import Ledger
from tinsmith_runtime.ledger.tables import MIGRATIONS, SCHEMA_VERSION, metadata
from tinsmith_runtime.sql import SqliteDatabase


class SqliteLedger(Ledger):
    """A ledger in a file.

    Args:
        path: The file; its folder is created.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(
            SqliteDatabase(path, metadata, schema_version=SCHEMA_VERSION, migrations=MIGRATIONS)
        )
