"""An operation carries what its sender could know of earlier failures when it was accepted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add the column; of operations that were accepted before nothing is known."""
    op.add_column(
        "operations",
        sa.Column("seen_through", sa.BigInteger, nullable=False, server_default="0"),
    )
