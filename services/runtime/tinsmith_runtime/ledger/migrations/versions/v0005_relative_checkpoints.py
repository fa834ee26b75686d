"""Checkpoints and exports are found by their folder, relative to the store, wherever that is."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Drop the absolute URIs: they named the place where the store was when a file was written."""
    for table in ("checkpoints", "checkpoint_exports"):
        op.drop_column(table, "manifest_uri")
