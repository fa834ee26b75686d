"""Pools: keys that are bound to workers, and what was created with them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_TABLES = ("keys", "sessions", "runs", "sampling_sessions")


def upgrade() -> None:
    """Add the columns; what is there belongs to no pool."""
    for table in _TABLES:
        op.add_column(table, sa.Column("pool", sa.Text, nullable=False, server_default=""))
