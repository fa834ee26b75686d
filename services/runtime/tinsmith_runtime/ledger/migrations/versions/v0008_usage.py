"""Totals of usage, and the key that each operation was sent with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the table; what was computed before was not counted, and its keys are not known."""
    op.add_column("operations", sa.Column("key_id", sa.Text, nullable=False, server_default=""))
    op.create_table(
        "usage_totals",
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("day", sa.BigInteger, primary_key=True),
        sa.Column("num_trained_tokens", sa.BigInteger, nullable=False),
        sa.Column("num_prefilled_tokens", sa.BigInteger, nullable=False),
        sa.Column("engine_s", sa.Float, nullable=False),
        sa.Column("is_reported", sa.Boolean, nullable=False),
    )
    op.create_index("usage_totals_by_report", "usage_totals", ["is_reported", "day"])
