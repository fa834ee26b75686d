"""What all tables share: repeatable requests, pages, the audit trail.

A mutating call is one transaction that looks its request id up, changes the tables and keeps the
answer. A repeat finds the answer, whatever became of the resource since; two calls that race are
put in order by the one writer of the database.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable

import sqlalchemy as sa

from tinsmith_runtime.errors import InvalidFieldError, RequestIdReusedError
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.store.records import RequestIdentity
from tinsmith_scheduler.store.tables import audit, requests

REQUEST_RETENTION_S = 25 * 3600.0
"""How long answers are kept; the contract promises 24 h."""

_DIGEST_BYTES = 8
_MAX_SERIAL_DIGITS = 18


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


def next_serial(table: sa.Table, group: sa.ColumnElement[bool]) -> sa.ScalarSelect[int]:
    """Return the next serial of a group of rows, for an insert; rows of a group go all at once.

    The database has one writer, and the index on the serials refuses another one's.
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


def encode_page_token(list_name: str, serial: int) -> str:
    """Return the token that continues a list after the row with a serial.

    The digest ties a token to its list; it is no secret, because every list is filtered by project
    whatever the token says.
    """
    body = str(serial).encode()
    return base64.urlsafe_b64encode(_page_digest(list_name, body) + body).decode().rstrip("=")


def decode_page_token(list_name: str, token: str) -> int | None:
    """Return the serial in a token, None for an empty token.

    Raises:
        InvalidFieldError: If the token was not made for this list.
    """
    if not token:
        return None
    try:
        content = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        content = b""
    digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    is_serial = body.isdigit() and len(body) <= _MAX_SERIAL_DIGITS
    if not is_serial or digest != _page_digest(list_name, body):
        raise InvalidFieldError("page_token", "is not a next_page_token of this list")
    return int(body)


def _page_digest(list_name: str, body: bytes) -> bytes:
    return hashlib.sha256(list_name.encode() + b"\0" + body).digest()[:_DIGEST_BYTES]
