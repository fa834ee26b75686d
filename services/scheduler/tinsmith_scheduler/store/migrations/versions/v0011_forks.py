"""Runs that are forks of other runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Add the columns; runs created before are no forks."""
    for column in (
        sa.Column("source_run", sa.Text, nullable=False, server_default=""),
        sa.Column("source_step", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("reruns_step", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("rerun_from", sa.BigInteger, nullable=False, server_default="0"),
    ):
        op.add_column("runs", column)
