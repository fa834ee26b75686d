"""Single statements on PostgreSQL that can be repeated, so that their outcome is always found out.

Run twice, such a statement changes nothing the second time and says so. That makes an unknown
outcome no special case: after a connection broke or a server went down, the statement is run again
on another one until an answer arrives. It is for what every operation does, where the transactions
of `group_commit` would cost three round trips for one, and hold locks between them. What cannot be
repeated goes there. Nothing is ever cancelled from here: a cancelled commit that waits for its
standby would report as done what only the primary has.

A process that stops cannot wait for ever: from `hurry` on an outcome that stays unknown is an
error. The next process, or the same request sent again, finds it out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import asyncpg

from tinsmith.backoff import backoff
from tinsmith_runtime.errors import (
    OutcomeUnknownError,
    StorageFullError,
    StorageUnavailableError,
)
from tinsmith_runtime.sql.postgres_sessions import (
    Connection,
    PassingError,
    PostgresTarget,
    answer_within,
    is_disk_full,
    is_passing,
    is_session_over,
)

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_RETRY_AFTER_S = 1.0
_MAX_IDLE = 4
_NOT_REPLICATED = "canceling wait for synchronous replication"


class RepeatableStatements:
    """Connections for repeatable statements.

    Args:
        target: The database.
        patience_s: How long to look for a server before a statement that was never sent is refused.
    """

    def __init__(self, target: PostgresTarget, *, patience_s: float = 10.0) -> None:
        self._target = target
        self._patience_s = patience_s
        self._idle: list[Connection] = []
        self._busy: dict[Connection, float] = {}
        self._is_closed = False
        self._hurry_s: float | None = None
        self._is_away = False

    async def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        """Run a repeatable statement until its outcome is known, and return its rows.

        Raises:
            StorageUnavailableError: If no server took it in time; it was never sent.
            StorageFullError: If the server has no room; nothing was written.
            OutcomeUnknownError: If it was sent and not answered, and the process stops.
        """
        begin_s = time.monotonic()
        was_sent = False
        if self._is_away:
            raise self._unavailable()
        pauses = backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        while True:
            try:
                session = await self._take()
            except PassingError as error:
                is_over = time.monotonic() - begin_s >= self._patience_s
                if not was_sent and (self._is_closed or is_over or self._gives_up(begin_s)):
                    raise self._unavailable() from error
                problem = str(error)
            else:
                was_sent = True
                try:
                    return await self._run(session, statement, arguments)
                except Exception as error:
                    if is_disk_full(error):
                        raise StorageFullError(
                            "the disk of the database is full; free space, then send the request "
                            "again"
                        ) from error
                    if not is_passing(error, session):
                        raise
                    problem = str(error)
            if was_sent and self._gives_up(begin_s):
                raise OutcomeUnknownError(
                    f"the database {self._target.name} did not answer before this process "
                    "stopped; send the same request again",
                    retry_after_s=_RETRY_AFTER_S,
                )
            logger.warning("a statement is sent again", extra={"problem": problem[:300]})
            await asyncio.sleep(next(pauses))

    def hurry(self, within_s: float) -> None:
        """Let each statement wait this long at most from now on, because the process stops.

        Once one waited in vain the database counts as away, and later ones do not wait at all.
        """
        self._hurry_s = within_s
        asked_s = time.monotonic()

        def cut() -> None:
            for session, begin_s in list(self._busy.items()):
                if begin_s <= asked_s:
                    session.terminate()

        asyncio.get_running_loop().call_later(within_s, cut)

    def _gives_up(self, begin_s: float) -> bool:
        """Whether a statement that failed is not to be sent again."""
        if self._hurry_s is not None and time.monotonic() - begin_s >= self._hurry_s:
            self._is_away = True
        return self._is_away

    def _unavailable(self) -> StorageUnavailableError:
        return StorageUnavailableError(
            f"the database {self._target.name} cannot be reached; send the request again",
            retry_after_s=_RETRY_AFTER_S,
        )

    async def listen(self, channel: str, callback: Callable[[str], None]) -> None:
        """Call `callback(payload)` for each notification, until the task is cancelled.

        What is said while the connection is lost is not heard; a reconnect calls nothing back.
        """
        while True:
            try:
                session = await self._target.connect()
            except PassingError:
                await asyncio.sleep(_MAX_PAUSE_S)
                continue
            ended = asyncio.Event()
            session.add_termination_listener(lambda _, ended=ended: ended.set())
            try:
                await session.add_listener(channel, lambda _s, _pid, _c, text: callback(text))
                await ended.wait()
            except Exception as error:
                if not is_passing(error, session):
                    raise
            finally:
                session.terminate()

    async def close(self) -> None:
        """Close the sessions that are idle; a statement that is under way ends first."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().close()

    async def _take(self) -> Connection:
        while self._idle:
            session = self._idle.pop()
            if not session.is_closed():
                return session
        return await self._target.connect(is_leading=True)

    async def _run(
        self, session: Connection, statement: str, arguments: tuple[Any, ...]
    ) -> list[asyncpg.Record]:
        warnings: list[str] = []

        def note(_: object, message: asyncpg.PostgresLogMessage) -> None:
            warnings.append(str(message.message))

        session.add_log_listener(note)
        is_usable = False
        timeout_s = self._target.answer_timeout_s
        if self._hurry_s is not None:
            timeout_s = min(timeout_s, self._hurry_s)
        self._busy[session] = time.monotonic()
        try:
            # In a task of its own: a caller that goes away must not cancel it on the server.
            call = asyncio.ensure_future(
                answer_within(session, timeout_s, session.fetch(statement, *arguments))
            )
            rows = await asyncio.shield(call)
            while any(_NOT_REPLICATED in warning for warning in warnings):
                # It is on the primary alone; what is written after it is not durable before it.
                warnings.clear()
                await answer_within(
                    session,
                    timeout_s,
                    session.execute("SELECT pg_logical_emit_message(true, 'tinsmith', '')"),
                )
            is_usable = True
        except Exception as error:
            is_usable = not is_session_over(error, session)
            raise
        finally:
            self._busy.pop(session, None)
            session.remove_log_listener(note)
            if is_usable and not self._is_closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(session)
            else:
                session.terminate()
        return rows
