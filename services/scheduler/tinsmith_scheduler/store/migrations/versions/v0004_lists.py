"""Lists of sessions and of audit events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Number the rows that are listed; give audit events the project of their resource."""
    serial = sa.Column("serial", sa.Integer, nullable=False, server_default="0")
    op.add_column("sessions", serial)
    op.execute(_numbering("sessions", "project", "create_time_s, name"))
    op.create_index("sessions_by_project", "sessions", ["project", "serial"], unique=True)

    serial = sa.Column("serial", sa.Integer, nullable=False, server_default="0")
    op.add_column("sampling_sessions", serial)
    op.execute(_numbering("sampling_sessions", "session", "name"))
    op.drop_index("sampling_sessions_by_session", "sampling_sessions")
    op.create_index(
        "sampling_sessions_by_session", "sampling_sessions", ["session", "serial"], unique=True
    )

    _move_audit_rows()
    op.create_index("audit_by_project", "audit", ["project", "serial"])


def _numbering(table: str, group: str, order: str) -> str:
    """Return a statement that counts the rows of each group from 1."""
    return (
        f"UPDATE {table} SET serial = ordered.number FROM (SELECT name, "
        f"row_number() OVER (PARTITION BY {group} ORDER BY {order}) AS number FROM {table}"
        f") AS ordered WHERE ordered.name = {table}.name"
    )


def _move_audit_rows() -> None:
    """File what an operator did to another project under that project."""
    audit = sa.table("audit", sa.column("serial"), sa.column("project"), sa.column("resource"))
    connection = op.get_bind()
    for row in connection.execute(sa.select(audit)).all():
        project = row.resource.split("/")[1]
        if project != row.project:
            connection.execute(
                sa.update(audit).where(audit.c.serial == row.serial).values(project=project)
            )
