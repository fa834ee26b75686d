"""The tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "runs",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("adapter", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("replay_diverged", sa.Boolean, nullable=False),
    )
    op.create_table(
        "leases",
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "operations",
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("sequence_number", sa.BigInteger, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("payload", sa.LargeBinary),
        sa.Column("payload_path", sa.Text),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("num_attempts", sa.Integer, nullable=False),
        sa.Column("plan", sa.Text),
        sa.Column("result", sa.LargeBinary),
        sa.Column("error", sa.LargeBinary),
        sa.Column("submit_time_s", sa.Float, nullable=False),
        sa.Column("finish_time_s", sa.Float),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("run", "request_id"),
    )
    op.create_index("operations_by_revision", "operations", ["run", "revision"])
    op.create_table(
        "snapshots",
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("sequence_number", sa.BigInteger, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("create_time_s", sa.Float, nullable=False),
    )
    op.create_table(
        "checkpoints",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("adapter", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("sequence_number", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("manifest_uri", sa.Text, nullable=False),
        sa.Column("sha256", sa.Text, nullable=False),
        sa.Column("create_time_s", sa.Float, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
    )
    op.create_index("checkpoints_by_time", "checkpoints", ["project", "create_time_s", "name"])
    op.create_table("deletions", sa.Column("run", sa.Text, primary_key=True))
