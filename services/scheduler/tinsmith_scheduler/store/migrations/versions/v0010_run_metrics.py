"""Metrics of runs: what clients and trainers record, by run, name and step."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Add the tables."""
    op.create_table(
        "metric_series",
        sa.Column("serial", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("project", sa.Text, nullable=False),
        sa.Column("num_points", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("last_value", sa.Float),
        sa.Column("update_time_s", sa.Float, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("metric_series_by_run", "metric_series", ["run", "name"], unique=True)
    op.create_index("metric_series_by_project", "metric_series", ["project", "run", "name"])
    op.create_table(
        "metric_blocks",
        sa.Column("series", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("block", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("num_points", sa.Integer, nullable=False),
        sa.Column("num_finite", sa.Integer, nullable=False),
        sa.Column("total", sa.Float, nullable=False),
        sa.Column("minimum", sa.Float),
        sa.Column("maximum", sa.Float),
        sa.Column("time_s", sa.Float, nullable=False),
    )
    op.create_table(
        "metric_points",
        sa.Column("series", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("block", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("points", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "metric_usage",
        sa.Column("project", sa.Text, primary_key=True),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
    )
