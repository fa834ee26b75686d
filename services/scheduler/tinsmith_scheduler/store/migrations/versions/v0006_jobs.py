"""Jobs: their keys, what their drivers report, and those that the scheduler runs itself."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the columns and tables."""
    op.add_column("keys", sa.Column("job", sa.Text, nullable=False, server_default=""))
    op.add_column("keys", sa.Column("job_uid", sa.Text, nullable=False, server_default=""))
    op.create_table(
        "job_reports",
        sa.Column("job", sa.Text, primary_key=True),
        sa.Column("uid", sa.Text, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("max_steps", sa.BigInteger, nullable=False),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("checkpoint", sa.Text, nullable=False),
        sa.Column("checkpoint_step", sa.BigInteger, nullable=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("update_time_s", sa.Float, nullable=True),
        sa.Column("step_time_s", sa.Float, nullable=True),
    )
    op.create_table(
        "jobs",
        sa.Column("serial", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("uid", sa.Text, nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("status", sa.JSON, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("request_digest", sa.LargeBinary, nullable=False),
        sa.Column("create_time_s", sa.Float, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("jobs_by_project", "jobs", ["project", "serial"])
