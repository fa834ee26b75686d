"""Single statements on PostgreSQL whose outcome is always found out.

A statement that is given here can be repeated: run twice, it changes nothing the second time and
says so. That makes an unknown outcome (a connection that broke, a server that went down, a query
that was cut off) no special case: the statement is run again on another connection until an answer
arrives. Nothing is ever cancelled from here: cancelling a commit that waits for its standby would
report as done what only the primary has.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

import asyncpg

from tinsmith_runtime.errors import StorageFullError, StorageUnavailableError

logger = logging.getLogger(__name__)

_SETTINGS = {
    "statement_timeout": "30s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "10s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
_ANSWER_TIMEOUT_S = 45.0
"""Above the server's own limit: who does not answer by then is gone."""
_CONNECT_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_RETRY_AFTER_S = 1.0
_LOST: tuple[type[BaseException], ...] = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    asyncpg.OperatorInterventionError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.LockNotAvailableError,
    asyncpg.TransactionRollbackError,
)
"""Passing: connections, shutdowns, time limits, demoted servers, deadlocks."""
_NOT_REPLICATED = "canceling wait for synchronous replication"


class StatementPool:
    """Connections for repeatable statements.

    Args:
        dsn: `postgresql://...`, several hosts allowed.
        schema: Where unqualified names are looked up.
        application_name: Shown in `pg_stat_activity`.
        patience_s: How long to look for a server before a statement that was never sent is refused.
    """

    def __init__(
        self, dsn: str, *, schema: str, application_name: str, patience_s: float = 10.0
    ) -> None:
        self._dsn = dsn
        self._settings = {
            **_SETTINGS,
            "search_path": schema,
            "application_name": application_name,
        }
        self._patience_s = patience_s
        self._idle: list[asyncpg.Connection[Any]] = []
        self._is_closed = False

    async def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        """Run a repeatable statement until its outcome is known, and return its rows.

        Raises:
            StorageUnavailableError: If no server took it in time; it was never sent.
            StorageFullError: If the server has no room; nothing was written.
        """
        begin_s = time.monotonic()
        was_sent = False
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                connection = await self._take()
            except _LOST as error:
                self._note_lost(error)
                if self._is_closed or (
                    not was_sent and time.monotonic() - begin_s >= self._patience_s
                ):
                    raise StorageUnavailableError(
                        "the database can not be reached; send the request again",
                        retry_after_s=_RETRY_AFTER_S,
                    ) from error
            else:
                was_sent = True
                try:
                    return await self._run(connection, statement, arguments)
                except asyncpg.DiskFullError as error:
                    raise StorageFullError(
                        "the disk of the database is full; free space, then send the request again"
                    ) from error
                except _LOST as error:
                    self._note_lost(error)
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause_s)
            pause_s = min(pause_s * 2, _MAX_PAUSE_S)

    async def listen(self, channel: str, callback: Any) -> asyncpg.Connection[Any]:
        """Return a new connection on which `callback(payload)` is called for each notification."""
        connection = await self._connect()
        await connection.add_listener(
            channel, lambda _connection, _pid, _channel, payload: callback(payload)
        )
        return connection

    async def close(self) -> None:
        """Close the connections that are idle; a statement that is under way ends first."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().close(timeout=_CONNECT_TIMEOUT_S)

    async def _take(self) -> asyncpg.Connection[Any]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await self._connect()

    async def _connect(self) -> asyncpg.Connection[Any]:
        return await asyncpg.connect(
            self._dsn, timeout=_CONNECT_TIMEOUT_S, server_settings=self._settings
        )

    async def _run(
        self, connection: asyncpg.Connection[Any], statement: str, arguments: tuple[Any, ...]
    ) -> list[asyncpg.Record]:
        warnings: list[str] = []

        def note(_: Any, message: Any) -> None:
            warnings.append(str(message.message))

        connection.add_log_listener(note)
        # A statement that fails for good leaves the connection usable; one that is lost does not.
        is_usable = False
        query = asyncio.ensure_future(connection.fetch(statement, *arguments))
        try:
            done, _ = await asyncio.wait([query], timeout=_ANSWER_TIMEOUT_S)
            if not done:
                raise TimeoutError("the database did not answer")
            rows = query.result()
            while any(_NOT_REPLICATED in warning for warning in warnings):
                # On the primary alone. What is written after it can not be durable without it.
                warnings.clear()
                await connection.execute("SELECT pg_logical_emit_message(true, 'tinsmith', '')")
            is_usable = True
            return rows
        except asyncpg.PostgresError as error:
            is_usable = not isinstance(error, _LOST)
            raise
        finally:
            connection.remove_log_listener(note)
            if is_usable and not self._is_closed:
                self._idle.append(connection)
            else:
                connection.terminate()
                await asyncio.gather(query, return_exceptions=True)

    def _note_lost(self, error: BaseException) -> None:
        logger.warning("the database is away, trying again", extra={"problem": repr(error)[:300]})
