"""Runs that begin from a checkpoint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns; runs created before began with initial weights."""
    op.add_column(
        "runs", sa.Column("source_checkpoint", sa.Text, nullable=False, server_default="")
    )
    op.add_column(
        "runs",
        sa.Column("include_optimizer", sa.Boolean, nullable=False, server_default=sa.false()),
    )
