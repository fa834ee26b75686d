"""SQL as a durable store, on SQLite for one machine or PostgreSQL for a cluster.

A write is a function of a SQLAlchemy connection: it runs inside a transaction that other writes of
this process may share, and its caller is told once the transaction is on disk. The same functions
run on both databases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import sqlalchemy as sa

from tinsmith_runtime.sql.connect import Store, open_store
from tinsmith_runtime.sql.dialect import insert, notify, now_s
from tinsmith_runtime.sql.postgres import PostgresDatabase
from tinsmith_runtime.sql.sqlite import SqliteDatabase

__all__ = [
    "Database",
    "PostgresDatabase",
    "SqliteDatabase",
    "Statements",
    "Store",
    "insert",
    "notify",
    "now_s",
    "open_store",
]

ResultT = TypeVar("ResultT")
Statements = Callable[[sa.Connection], ResultT]


class Database(Protocol):
    """Tables of one pod."""

    async def write(self, statements: Statements[ResultT]) -> ResultT:
        """Run statements in the next group commit; return once they are on disk.

        A cancelled caller does not cancel the write. Writes of one object run one after another.
        Statements may run several times, after a lost connection, and take effect once.

        Raises:
            StorageFullError: If the disk is full; nothing was written.
            StorageUnavailableError: If the database cannot be reached; nothing was written.
            OutcomeUnknownError: If it cannot be found out whether the commit took place.
            Exception: What the statements raised; nothing was written.
        """
        ...

    async def write_all(
        self, group: Sequence[Statements[ResultT]]
    ) -> list[ResultT | BaseException]:
        """Run several writes in one group commit; each has a result or an error of its own."""
        ...

    async def read(self, statements: Statements[ResultT]) -> ResultT:
        """Run statements that change nothing, on the state of the last commit."""
        ...

    async def close(self) -> None:
        """Finish the writes that wait, and release the database."""
        ...
