"""What projects used, and their budgets."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"

_COUNTS = ("num_trained_tokens", "num_sampled_tokens", "num_prefilled_tokens", "num_cached_tokens")


def upgrade() -> None:
    """Add the tables; what was used before was not counted."""
    op.create_table(
        "usage_rows",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("day", sa.BigInteger, primary_key=True),
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
        *_amounts(),
    )
    op.create_table(
        "usage_days",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("day", sa.BigInteger, primary_key=True),
        *_amounts(),
    )
    op.create_table(
        "usage_stored",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("source", sa.Text, primary_key=True),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "budgets",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("quantity", sa.Text, primary_key=True),
        sa.Column("budget", sa.Float, nullable=False),
        sa.Column("period", sa.Text, nullable=False),
    )


def _amounts() -> list[sa.Column[float]]:
    counts = [sa.Column(name, sa.BigInteger, nullable=False) for name in _COUNTS]
    return [*counts, sa.Column("engine_s", sa.Float, nullable=False)]
