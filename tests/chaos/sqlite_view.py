"""The ledger of an embedded server as it is on disk, beside the server."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path


def rows(data_dir: Path, query: str) -> list[tuple[int, ...]]:
    """Return what a query finds."""
    uri = f"file:{data_dir / 'trainer.db'}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=10)) as connection:
        return connection.execute(query).fetchall()


def count(data_dir: Path, source: str) -> int:
    """Return how many rows a FROM clause has."""
    return int(rows(data_dir, f"SELECT COUNT(*) FROM {source}")[0][0])
