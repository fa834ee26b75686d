"""A ledger that several trainers share: the holder of a run, and revisions given out by its row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the columns and tables; a run goes on after the last revision that it gave out."""
    op.add_column(
        "runs", sa.Column("last_revision", sa.BigInteger, nullable=False, server_default="0")
    )
    op.execute(
        "UPDATE runs SET last_revision = (SELECT coalesce(max(operations.revision), 0) "
        "FROM operations WHERE operations.run = runs.name)"
    )
    op.add_column("leases", sa.Column("holder", sa.Text, nullable=False, server_default=""))
    op.create_index("leases_by_holder", "leases", ["holder"])
    op.create_table(
        "holders",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column("expire_time_s", sa.Float, nullable=False),
    )
    op.create_table(
        "facts",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
