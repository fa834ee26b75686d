"""What `Ledger` says to the database about the audit trail of checkpoints.

An event is inserted by the transaction that makes the change, so that none is missing and none is
made up. Several trainers write at once and their serials may become visible out of order: lists go
by time, and the serial only tells events of one moment apart.
"""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith_runtime.ledger.tables import audit_events
from tinsmith_runtime.records import AuditEvent

_COLUMNS = [column for column in audit_events.c if column.name != "project"]


def insert_event(connection: sa.Connection, event: AuditEvent) -> None:
    """Add an event; the database gives it its serial."""
    connection.execute(
        sa.insert(audit_events).values(
            time_s=event.time_s,
            project=event.project,
            key_id=event.key_id,
            action=event.action,
            resource=event.resource,
            checkpoint_kind=event.checkpoint_kind,
        )
    )


def list_events(
    connection: sa.Connection,
    project: str,
    *,
    limit: int,
    after: tuple[float, int] | None,
    start_s: float | None,
    end_s: float | None,
) -> list[AuditEvent]:
    """Return events of a project, oldest first, after a position in that order."""
    query = sa.select(*_COLUMNS).where(audit_events.c.project == project)
    if after is not None:
        position = sa.tuple_(audit_events.c.time_s, audit_events.c.serial)
        query = query.where(position > sa.tuple_(*after))
    if start_s is not None:
        query = query.where(audit_events.c.time_s >= start_s)
    if end_s is not None:
        query = query.where(audit_events.c.time_s < end_s)
    query = query.order_by(audit_events.c.time_s, audit_events.c.serial).limit(limit)
    return [AuditEvent(**row) for row in connection.execute(query).mappings()]


def forget_before(connection: sa.Connection, time_s: float) -> int:
    """Forget events that are older, and return how many there were."""
    return connection.execute(
        sa.delete(audit_events).where(audit_events.c.time_s < time_s)
    ).rowcount
