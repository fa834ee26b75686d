"""The tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "episodes",
        sa.Column("serial", _Serial, primary_key=True, autoincrement=True),
        sa.Column("episode_id", sa.Text, nullable=False, unique=True),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("task_json", sa.Text, nullable=False),
        sa.Column("sampling_session", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("num_attempts", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("client_id", sa.Text, nullable=False),
        sa.Column("lease_expire_s", sa.Float(53), nullable=True),
        sa.Column("lease_duration_s", sa.Float(53), nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("failures", sa.JSON, nullable=False),
        sa.Column("num_model_calls", sa.Integer, nullable=False),
        sa.Column("trajectory_bytes", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("create_time_s", sa.Float(53), nullable=False),
        sa.Column("end_time_s", sa.Float(53), nullable=True),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "attempts",
        sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("request_sha256", sa.LargeBinary, nullable=False),
        sa.Column("request_digest", sa.LargeBinary, nullable=False),
        sa.Column("salt", sa.LargeBinary, nullable=False),
        sa.Column("token_sha256", sa.LargeBinary, nullable=False),
        sa.Column("key_sha256", sa.LargeBinary, nullable=False),
        sa.Column("end", sa.Text, nullable=False),
    )
    op.create_table(
        "model_calls",
        sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("first_index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "requests",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("first_serial", sa.BigInteger, nullable=False),
        sa.Column("last_serial", sa.BigInteger, nullable=False),
        sa.Column("create_time_s", sa.Float(53), nullable=False),
    )
    op.create_table(
        "projects",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("last_revision", sa.BigInteger, nullable=False),
    )
    op.create_index(
        "episodes_by_queue", "episodes", ["project", "queue", "type", "state", "serial"]
    )
    op.create_index("episodes_by_revision", "episodes", ["project", "queue", "revision"])
    op.create_index("episodes_by_project", "episodes", ["project", "serial"])
    op.create_index("episodes_by_holder", "episodes", ["project", "state", "client_id"])
    op.create_index("episodes_by_lease", "episodes", ["lease_expire_s"])
    op.create_index("episodes_by_end", "episodes", ["end_time_s"])
    op.create_index("attempts_by_request", "attempts", ["project", "request_sha256"], unique=True)
    op.create_index("model_calls_by_request", "model_calls", ["serial", "request_id"], unique=True)
    op.create_index("requests_by_time", "requests", ["create_time_s"])
