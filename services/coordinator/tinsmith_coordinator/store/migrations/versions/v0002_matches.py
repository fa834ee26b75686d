"""Matches: several agents that play side by side."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "matches",
        sa.Column("serial", _Serial, primary_key=True, autoincrement=True),
        sa.Column("match_id", sa.Text, nullable=False, unique=True),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("request_digest", sa.LargeBinary, nullable=False),
        sa.Column("rules", sa.JSON, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("num_opened", sa.BigInteger, nullable=False),
        sa.Column("num_open_games", sa.Integer, nullable=False),
        sa.Column("deadline_s", sa.Float(53), nullable=True),
        sa.Column("failure", sa.Text, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("create_time_s", sa.Float(53), nullable=False),
        sa.Column("end_time_s", sa.Float(53), nullable=True),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "members",
        sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("agent", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("client_id", sa.Text, nullable=False),
        sa.Column("num_joins", sa.Integer, nullable=False),
        sa.Column("lease_expire_s", sa.Float(53), nullable=True),
        sa.Column("arrived", sa.BigInteger, nullable=False),
        sa.Column("failure", sa.Text, nullable=False),
        sa.Column("request_sha256", sa.LargeBinary, nullable=False),
        sa.Column("salt", sa.LargeBinary, nullable=False),
        sa.Column("token_sha256", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "games",
        sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("game", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("turn", sa.Integer, nullable=False),
        sa.Column("running", sa.JSON, nullable=False),
        sa.Column("rewards", sa.JSON, nullable=False),
        sa.Column("failure", sa.Text, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("deadline_s", sa.Float(53), nullable=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "moves",
        sa.Column("serial", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("game", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("turn", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("agent", sa.Text, primary_key=True),
        sa.Column("action_json", sa.Text, nullable=False),
        sa.Column("verdict", sa.JSON, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("matches_by_project", "matches", ["project", "serial"])
    op.create_index("matches_by_request", "matches", ["project", "request_id"], unique=True)
    op.create_index("matches_by_deadline", "matches", ["deadline_s"])
    op.create_index("matches_by_end", "matches", ["end_time_s"])
    op.create_index("members_by_lease", "members", ["lease_expire_s"])
    op.create_index("games_by_revision", "games", ["serial", "revision"])
    op.create_index("games_by_deadline", "games", ["deadline_s"])
    op.create_index("moves_by_revision", "moves", ["serial", "revision"])
