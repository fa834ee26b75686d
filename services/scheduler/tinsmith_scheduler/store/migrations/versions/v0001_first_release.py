"""The tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "projects",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("create_time_s", sa.Float, nullable=False),
    )
    op.create_table(
        "keys",
        sa.Column("serial", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("key_id", sa.Text, nullable=False, unique=True),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary, nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("display_name", sa.Text, nullable=False),
        sa.Column("create_time_s", sa.Float, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "sessions",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("display_name", sa.Text, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("client_version", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("create_time_s", sa.Float, nullable=False),
    )
    op.create_index("sessions_by_state", "sessions", ["state"])
    op.create_table(
        "runs",
        sa.Column("serial", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("session", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("adapter", sa.Text, nullable=False),
        sa.Column("display_name", sa.Text, nullable=False),
        sa.Column("labels", sa.JSON, nullable=False),
        sa.Column("create_time_s", sa.Float, nullable=False),
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("encoded_error", sa.LargeBinary, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("runs_by_project", "runs", ["project", "serial"])
    op.create_index("runs_by_session", "runs", ["session"])
    op.create_index("runs_by_worker", "runs", ["worker", "state"])
    op.create_index("runs_by_state", "runs", ["state"])
    op.create_table(
        "sampling_sessions",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("session", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("checkpoint", sa.Text, nullable=False),
        sa.Column("run", sa.Text, nullable=False),
    )
    op.create_index("sampling_sessions_by_session", "sampling_sessions", ["session"])
    op.create_table(
        "releases",
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("worker", sa.Text, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("mode", sa.Text, nullable=False),
    )
    op.create_table(
        "requests",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("request_id", sa.Text, primary_key=True),
        sa.Column("method", sa.Text, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sa.Column("create_time_s", sa.Float, nullable=False),
    )
    op.create_index("requests_by_time", "requests", ["create_time_s"])
    op.create_table("models", sa.Column("base_model", sa.Text, primary_key=True))
    op.create_table(
        "audit",
        sa.Column("serial", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("time_s", sa.Float, nullable=False),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("resource", sa.Text, nullable=False),
    )
