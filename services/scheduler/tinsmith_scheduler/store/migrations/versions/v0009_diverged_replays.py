"""Whether a replay of the run of a job gave other bits than the first execution, as reported."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add the column; jobs that were reported before have not said so."""
    column = sa.Column("replay_diverged", sa.Boolean, nullable=False, server_default=sa.false())
    op.add_column("job_reports", column)
