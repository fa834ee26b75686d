"""Whether the training of each run is done."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    """Add the columns; nothing is known of the training of runs that were created before."""
    for column in (
        sa.Column("finish_time_s", sa.Float),
        sa.Column("finish_sequence_number", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("reopened_in", sa.Text, nullable=False, server_default=""),
    ):
        op.add_column("runs", column)
