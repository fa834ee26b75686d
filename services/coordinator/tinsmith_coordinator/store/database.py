"""Opening the database of a coordinator, and its clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from tinsmith_runtime.sql import now_s

Clock = Callable[[sa.Connection], float]
"""Reads the time within a transaction, in seconds since the epoch."""


_now: dict[str, sa.Select[Any]] = {}


def database_clock(connection: sa.Connection) -> float:
    """Return the time of the database, which alone decides whether a lease ran out."""
    dialect = connection.dialect.name
    if dialect not in _now:
        _now[dialect] = sa.select(now_s(connection))
    return float(connection.execute(_now[dialect]).scalar_one())
