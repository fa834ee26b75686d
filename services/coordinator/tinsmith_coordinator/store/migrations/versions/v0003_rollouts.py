"""Rollouts: batches of episodes that the coordinator plays."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "rollout_batches",
        sa.Column("serial", _Serial, primary_key=True, autoincrement=True),
        sa.Column("batch_id", sa.Text, nullable=False, unique=True),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("request_digest", sa.LargeBinary, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.Column("num_tasks", sa.Integer, nullable=False),
        sa.Column("groups", sa.JSON, nullable=False),
        sa.Column("num_episodes", sa.BigInteger, nullable=False),
        sa.Column("num_tokens", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("report", sa.JSON, nullable=False),
        sa.Column("taken", sa.JSON, nullable=False),
        sa.Column("failure", sa.JSON, nullable=True),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("deadline_s", sa.Float(53), nullable=False),
        sa.Column("create_time_s", sa.Float(53), nullable=False),
        sa.Column("end_time_s", sa.Float(53), nullable=True),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "rollout_episodes",
        sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("task", sa.Integer, nullable=False),
        sa.Column("member", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("problem", sa.Text, nullable=False),
        sa.Column("may_repeat", sa.Boolean, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.create_index("rollout_batches_by_project", "rollout_batches", ["project", "serial"])
    op.create_index(
        "rollout_batches_by_request", "rollout_batches", ["project", "request_id"], unique=True
    )
    op.create_index("rollout_batches_by_state", "rollout_batches", ["state"])
    op.create_index("rollout_batches_by_end", "rollout_batches", ["end_time_s"])
