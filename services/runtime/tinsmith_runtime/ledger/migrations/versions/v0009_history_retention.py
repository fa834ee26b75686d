"""How long the past of each run is kept."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add the column; runs created before have the default."""
    op.add_column(
        "runs",
        sa.Column("history_retention_s", sa.Float, nullable=False, server_default="0"),
    )
