"""Runs that move: which process of a trainer holds a run, and the ledger that it shares."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns; runs placed before do not move."""
    op.add_column("runs", sa.Column("incarnation", sa.Text, nullable=False, server_default=""))
    op.add_column("runs", sa.Column("ledger", sa.Text, nullable=False, server_default=""))
