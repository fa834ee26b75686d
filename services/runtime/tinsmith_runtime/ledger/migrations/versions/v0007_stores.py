"""Runs and notes of what is to be removed name the store that holds the files."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns; of what is there already the store is not known, and any process acts."""
    op.add_column("runs", _store())
    for table, key, others in (
        ("deletions", "run", ()),
        ("folder_deletions", "folder", (sa.Column("not_before_s", sa.Float, nullable=False),)),
    ):
        # Written anew: SQLite cannot change a primary key.
        op.rename_table(table, f"{table}_before")
        op.create_table(
            table,
            sa.Column(key, sa.Text, nullable=False),
            _store(),
            *others,
            # Named, since PostgreSQL keeps the name of the key of the table before.
            sa.PrimaryKeyConstraint(key, "store", name=f"{table}_by_store"),
        )
        columns = ", ".join([key, *(column.name for column in others)])
        op.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table}_before")
        op.drop_table(f"{table}_before")


def _store() -> sa.Column[str]:
    return sa.Column("store", sa.Text, nullable=False, server_default="")
