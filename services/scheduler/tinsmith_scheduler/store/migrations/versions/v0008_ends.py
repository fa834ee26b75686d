"""When sessions, runs and keys ended, as the sweep found it, so that they are forgotten in time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the columns; for what ended before, the retention begins with the next sweep."""
    for table in ("sessions", "runs", "keys"):
        op.add_column(table, sa.Column("end_time_s", sa.Float))
        if table != "keys":
            op.drop_index(f"{table}_by_state", table)
        op.create_index(f"{table}_by_state", table, ["state", "end_time_s"])
    op.create_index("keys_by_expiry", "keys", ["expire_time_s"])
