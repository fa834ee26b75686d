"""Keys: one role in the place of scopes, and the time at which they expire."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Turn scopes into roles."""
    op.add_column("keys", sa.Column("role", sa.Text, nullable=False, server_default="member"))
    op.add_column("keys", sa.Column("expire_time_s", sa.Float, nullable=True))
    keys = sa.table("keys", sa.column("serial"), sa.column("scopes", sa.JSON), sa.column("role"))
    connection = op.get_bind()
    for serial, scopes in connection.execute(sa.select(keys.c.serial, keys.c.scopes)).all():
        if "admin" in scopes:
            connection.execute(sa.update(keys).where(keys.c.serial == serial).values(role="admin"))
    is_sqlite = connection.dialect.name == "sqlite"
    # SQLite copies the table, and would draw numbers of forgotten keys again.
    drawn = sa.table("sqlite_sequence", sa.column("name"), sa.column("seq"))
    last = sa.select(drawn.c.seq).where(drawn.c.name == "keys")
    num_drawn = connection.execute(last).scalar() if is_sqlite else None
    with op.batch_alter_table("keys", table_kwargs={"sqlite_autoincrement": True}) as batch:
        batch.drop_column("scopes")
        batch.alter_column("role", server_default=None)
    if num_drawn is not None:
        connection.execute(sa.delete(drawn).where(drawn.c.name == "keys"))
        connection.execute(sa.insert(drawn).values(name="keys", seq=num_drawn))
