"""The life of checkpoints and of results: expiry, publishing, exports, tasks, what was dropped."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the columns and tables; what was saved before never expires and is private."""
    _add_retention()
    _add_checkpoints()


def _add_retention() -> None:
    for name in ("expired_through", "payloads_through"):
        op.add_column("leases", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("operations", sa.Column("retrieve_time_s", sa.Float))
    op.add_column("operations", sa.Column("result_digest", sa.LargeBinary))
    op.drop_index("operations_by_revision", "operations")
    op.create_index("operations_by_revision", "operations", ["run", "revision", "sequence_number"])
    is_kept = sa.text("result IS NOT NULL OR error IS NOT NULL")
    op.create_index(
        "operations_by_retention",
        "operations",
        ["run", "retrieve_time_s", "finish_time_s"],
        sqlite_where=is_kept,
        postgresql_where=is_kept,
    )


def _add_checkpoints() -> None:
    for column in (
        sa.Column("expire_time_s", sa.Float),
        sa.Column("is_published", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("files", sa.JSON),
        sa.Column("source_checkpoint", sa.Text, nullable=False, server_default=""),
    ):
        op.add_column("checkpoints", column)
    op.create_index("checkpoints_by_expiry", "checkpoints", ["expire_time_s"])
    op.create_table(
        "expired_checkpoints",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("expire_time_s", sa.Float, nullable=False),
    )
    op.create_table(
        "checkpoint_exports",
        sa.Column("name", sa.Text, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in _EXPORT_TEXTS),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("files", sa.JSON, nullable=False),
        sa.Column("create_time_s", sa.Float, nullable=False),
        sa.Column("expire_time_s", sa.Float, nullable=False),
    )
    op.create_index("checkpoint_exports_by_checkpoint", "checkpoint_exports", ["checkpoint"])
    op.create_index("checkpoint_exports_by_expiry", "checkpoint_exports", ["expire_time_s"])
    op.create_table(
        "checkpoint_tasks",
        sa.Column("name", sa.Text, primary_key=True),
        *(sa.Column(name, sa.Text, nullable=False) for name in _TASK_TEXTS),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("result", sa.LargeBinary),
        sa.Column("error", sa.LargeBinary),
        sa.Column("submit_time_s", sa.Float, nullable=False),
        sa.Column("finish_time_s", sa.Float),
    )
    op.create_index("checkpoint_tasks_by_state", "checkpoint_tasks", ["state", "project"])
    op.create_table(
        "folder_deletions",
        sa.Column("folder", sa.Text, primary_key=True),
        sa.Column("not_before_s", sa.Float, nullable=False),
    )


_EXPORT_TEXTS = ("checkpoint", "run", "format", "folder", "manifest_uri", "sha256")
_TASK_TEXTS = ("project", "run", "kind", "checkpoint")
