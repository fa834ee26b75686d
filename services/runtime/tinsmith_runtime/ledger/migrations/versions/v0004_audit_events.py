"""The audit trail of checkpoints."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

# SQLite numbers rows by itself under this type alone.
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add the table; the sender of tasks that are there already is not known."""
    op.create_table(
        "audit_events",
        sa.Column("serial", _SERIAL, primary_key=True, autoincrement=True),
        sa.Column("time_s", sa.Float, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in _TEXTS),
    )
    op.create_index("audit_events_by_project", "audit_events", ["project", "time_s", "serial"])
    op.create_index("audit_events_by_time", "audit_events", ["time_s"])
    key_id = sa.Column("key_id", sa.Text, nullable=False, server_default="")
    op.add_column("checkpoint_tasks", key_id)


_TEXTS = ("project", "key_id", "action", "resource", "checkpoint_kind")
