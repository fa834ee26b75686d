"""Two small tables for tests of the database: notes that are added, and a counter that is moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from tinsmith_runtime.sql import PostgresDatabase

metadata = sa.MetaData()
notes = sa.Table(
    "notes",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("text", sa.Text, nullable=False),
)
counters = sa.Table(
    "counters",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Integer, nullable=False),
)
PID = "SELECT pg_backend_pid()"


def add(number: int, text: str = "x") -> Callable[[sa.Connection], int]:
    def statements(connection: sa.Connection) -> int:
        connection.execute(sa.insert(notes).values(number=number, text=text))
        return number

    return statements


def numbers(connection: sa.Connection) -> list[int]:
    return list(connection.execute(sa.select(notes.c.number).order_by(notes.c.number)).scalars())


def increment(connection: sa.Connection) -> None:
    changed = connection.execute(sa.update(counters).values(value=counters.c.value + 1))
    assert changed.rowcount == 1


def start_counter(connection: sa.Connection) -> None:
    connection.execute(sa.insert(counters).values(name="n", value=0))


def counter(connection: sa.Connection) -> int:
    return connection.execute(sa.select(counters.c.value)).scalar_one()


async def open_database(url: str, **options: Any) -> PostgresDatabase:
    return await PostgresDatabase.open(
        url, metadata, **{"schema": "pod", "schema_version": 1, **options}
    )


async def in_thread(call: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.to_thread(call, *arguments)
