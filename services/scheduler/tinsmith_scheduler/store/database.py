"""What all tables share: repeatable requests, pages, the audit trail.

A mutating call is one transaction that looks its request id up, changes the tables and keeps the
answer. A repeat finds the answer, whatever became of the resource since; two calls that race are
put in order by the one writer of the database.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from tinsmith_runtime.errors import RequestIdReusedError
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.store.tables import audit, requests

REQUEST_RETENTION_S = 25 * 3600.0
"""How long answers are kept; the contract promises 24 h."""


def recall(connection: sa.Connection, request: RequestIdentity) -> bytes | None:
    """Return the answer that a request got before, or None.

    Raises:
        RequestIdReusedError: If the id was used for another method or with another body.
    """
    row = connection.execute(
        sa.select(requests.c.method, requests.c.digest, requests.c.response).where(
            requests.c.project == request.project, requests.c.request_id == request.request_id
        )
    ).first()
    if row is None:
        return None
    if (row.method, row.digest) != (request.method, request.digest):
        raise reused(request)
    response: bytes = row.response
    return response


def reused(request: RequestIdentity) -> RequestIdReusedError:
    """Return the error of a request id that was used before."""
    return RequestIdReusedError(
        f"request id {request.request_id} was used before with another body or method; draw a "
        "new UUID for a new request",
        request=request.request_id,
    )


async def answer_once(
    database: Database,
    request: RequestIdentity,
    create: Callable[[sa.Connection], bytes],
    *,
    now_s: float,
) -> bytes:
    """Return the stored answer of a request, or run `create` and keep its answer.

    Raises:
        RequestIdReusedError: If the id was used for another method or with another body.
        TinsmithError: What `create` raised; nothing is kept, and the request may be sent again.
    """

    def answer(connection: sa.Connection) -> bytes:
        known = recall(connection, request)
        if known is not None:
            return known
        response = create(connection)
        remember(connection, request, response, now_s=now_s)
        return response

    return await database.write(answer)


def remember(
    connection: sa.Connection, request: RequestIdentity, response: bytes, *, now_s: float
) -> None:
    """Keep the answer of a request."""
    connection.execute(
        sa.insert(requests).values(
            project=request.project,
            request_id=request.request_id,
            method=request.method,
            digest=request.digest,
            response=response,
            create_time_s=now_s,
        )
    )


def forget_requests(connection: sa.Connection, *, now_s: float) -> int:
    """Drop the answers that are older than promised; return how many."""
    old = requests.c.create_time_s < now_s - REQUEST_RETENTION_S
    return connection.execute(sa.delete(requests).where(old)).rowcount


def forget_audit_events(connection: sa.Connection, *, before_s: float) -> int:
    """Drop the audit events of before a time, in seconds since the epoch; return how many."""
    return connection.execute(sa.delete(audit).where(audit.c.time_s < before_s)).rowcount


def next_serial(table: sa.Table, group: sa.ColumnElement[bool]) -> sa.ScalarSelect[int]:
    """Return the next serial of a group of rows, for an insert.

    The database has one writer, and the index on the serials refuses another one's. The serial of
    a row that was forgotten may come again.
    """
    highest = sa.func.coalesce(sa.func.max(table.c.serial), 0)
    return sa.select(highest + 1).where(group).scalar_subquery()


def record_action(
    connection: sa.Connection,
    caller: Caller,
    action: str,
    resource: str,
    *,
    project: str,
    now_s: float,
) -> None:
    """Add a management action to the audit trail of the project of the resource."""
    connection.execute(
        sa.insert(audit).values(
            time_s=now_s,
            project=project,
            key_id=caller.key_id,
            action=action,
            resource=resource,
        )
    )
