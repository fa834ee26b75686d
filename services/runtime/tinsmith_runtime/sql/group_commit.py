"""Transactions on PostgreSQL, several writes to one: group commit, and every write exactly once.

Each group is one transaction that also sets the writer's own row to a fresh nonce. When the answer
to a COMMIT does not arrive, the row tells whether it took place. The next session first waits for
the row, which the old session may still hold. It then finds the nonce there, or runs the group
again. A group that was not sent its COMMIT is run again without a question.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from tinsmith.backoff import backoff
from tinsmith_runtime.errors import (
    OutcomeUnknownError,
    StorageFullError,
    StorageUnavailableError,
)
from tinsmith_runtime.observability.metrics import LEDGER_COMMIT_SECONDS, LEDGER_COMMIT_WRITES
from tinsmith_runtime.sql.advisory_lock import HoldLostError
from tinsmith_runtime.sql.fair_groups import FairGroups
from tinsmith_runtime.sql.postgres_sessions import PassingError, is_disk_full
from tinsmith_runtime.sql.postgres_transactions import Statements, Write, WriterSession
from tinsmith_runtime.tenant import current_tenant

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


class GroupCommitWriter:
    """Takes the writes that wait, and commits them in groups.

    Args:
        name: What messages call the database.
        open_session: Opens a session with whatever lock it needs; raises `PassingError` where a
            later attempt may succeed, and `HoldLostError` where none will.
        session: The first one.
        on_lost: Called once if another process took the lock.
        is_watched: Whether a lost connection is replaced at once, not at the next write.
        reconnect_timeout_s: Time that a write may take in all.
        ping_interval_s: How often a watched connection is tried.
    """

    def __init__(
        self,
        name: str,
        open_session: Callable[[], Awaitable[WriterSession]],
        session: WriterSession | None,
        *,
        on_lost: Callable[[], None],
        is_watched: bool,
        reconnect_timeout_s: float,
        ping_interval_s: float,
    ) -> None:
        self._name = name
        self._open_session = open_session
        self._session = session
        self._on_lost = on_lost
        self._is_watched = is_watched
        self._reconnect_timeout_s = reconnect_timeout_s
        self._ping_interval_s = ping_interval_s
        self._waiting: FairGroups[Write[Any]] = FairGroups()
        self._event = asyncio.Event()
        self._is_closing = False
        self._latest_s = math.inf
        """When writes that were queued before `hurry` give up."""
        self._end: Exception | None = None
        self._task = asyncio.create_task(self._run(), name=f"sql-write {name}")

    @property
    def end(self) -> Exception | None:
        """Why nothing is written any more."""
        return self._end

    def enqueue(self, group: Sequence[Statements[ResultT]]) -> list[Write[ResultT]]:
        """Queue writes that are to share a transaction.

        Raises:
            StorageUnavailableError: If the database is closed, or another process took it over.
        """
        if self._end is not None:
            raise self._end
        if self._is_closing:
            raise StorageUnavailableError(f"{self._name} is closed by this process")
        deadline_s = time.monotonic() + self._reconnect_timeout_s
        writes = [Write(statements, deadline_s=deadline_s) for statements in group]
        if writes:
            self._waiting.add(current_tenant(), cast(list[Write[Any]], writes))
            self._event.set()
        return writes

    def hurry(self, within_s: float) -> None:
        """Let writes wait for the server this long at most from now on; the process stops."""
        self._reconnect_timeout_s = min(self._reconnect_timeout_s, within_s)
        self._latest_s = time.monotonic() + within_s

    async def close(self) -> None:
        """Finish what waits, and close the session."""
        self._is_closing = True
        self._event.set()
        await asyncio.shield(self._task)

    async def _run(self) -> None:
        group: list[Write[Any]] = []
        try:
            while group := await self._next_group():
                begin_s = time.perf_counter()
                num_writes = len(group)
                if await self._settle(group):
                    LEDGER_COMMIT_SECONDS.observe(time.perf_counter() - begin_s)
                    LEDGER_COMMIT_WRITES.observe(num_writes)
            self._give_up(StorageUnavailableError(f"{self._name} is closed by this process"))
            if self._session is not None:
                await self._session.close()
                self._session = None
        except HoldLostError as error:
            logger.critical("this process lost its database to another", extra={"why": str(error)})
            self._give_up(StorageUnavailableError(f"{error}; this process must stop"))
            self._on_lost()
        except Exception as error:
            logger.critical("the writer of the database ended", exc_info=error)
            self._give_up(error)
            self._on_lost()
        finally:
            # Cancelled: whether a group was committed is not known.
            self._give_up(OutcomeUnknownError(f"{self._name} was closed while it was written"))
            for write in group:
                write.fail(cast(Exception, self._end))
            if self._session is not None:
                await self._session.abandon()

    async def _next_group(self) -> list[Write[Any]]:
        """Return what waits, at least one write; nothing once the database is to be closed."""
        while not self._waiting:
            if self._is_closing:
                return []
            self._event.clear()
            pause_s = self._ping_interval_s
            if self._session is None:
                pause_s = min(pause_s, _LONGEST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s if self._is_watched else None):
                    await self._event.wait()
            if self._is_watched and not self._waiting and not self._is_closing:
                await self._watch()
        return self._waiting.take()

    async def _watch(self) -> None:
        """Have a session, so that a lost lock is noticed without a write."""
        try:
            await (await self._ready_session()).ping()
        except PassingError as error:
            await self._drop_session(error)

    async def _settle(self, group: list[Write[Any]]) -> bool:
        """Commit a group and tell its callers; return whether it was committed.

        Raises:
            HoldLostError: If this process may not write any more; the callers were told.
        """
        nonce = ""  # of a COMMIT that was sent, while it is not known whether it took place
        pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while group:
            try:
                session = await self._ready_session()
                if nonce and await session.has_committed(nonce):
                    break
                nonce = ""
                attempt = uuid.uuid4().hex
                begin_s = time.perf_counter()
                if not await session.run(group, attempt):
                    break
                nonce = attempt
                written_s = time.perf_counter()
                if await session.commit():
                    commit_s = time.perf_counter() - written_s
                    self._waiting.note(len(group), writes_s=written_s - begin_s, commit_s=commit_s)
                    break
            except PassingError as error:
                await self._clean_session(error, keep=error.keeps_session)
                self._expire(group, error, is_doubtful=bool(nonce))
                await asyncio.sleep(next(pauses))
            except HoldLostError as error:
                self._fail(group, self._unavailable(error, is_doubtful=bool(nonce)))
                raise
            except Exception as error:
                # Nothing was committed.
                await self._clean_session(error, keep=True)
                self._fail(group, self._typed(error, num_writes=len(group)))
                return False
        for write in group:
            write.finish()
        return bool(group)

    async def _ready_session(self) -> WriterSession:
        if self._session is not None and self._session.raw.is_closed():
            await self._drop_session(PassingError("the connection was closed"))
        if self._session is None:
            self._session = await self._open_session()
            logger.info("connected again", extra={"database": self._name})
        return self._session

    def wake(self) -> None:
        """Look after the session."""
        self._event.set()

    async def _clean_session(self, error: Exception, *, keep: bool) -> None:
        """Leave a session without a transaction, or none."""
        if keep and self._session is not None:
            try:
                await self._session.rollback()
            except Exception as lost:
                await self._drop_session(lost)
        else:
            await self._drop_session(error)

    async def _drop_session(self, error: Exception) -> None:
        if self._session is not None:
            logger.warning(
                "lost a session of the database",
                extra={"database": self._name, "why": str(error) or type(error).__name__},
            )
            session, self._session = self._session, None
            await session.abandon()

    def _expire(self, group: list[Write[Any]], error: Exception, *, is_doubtful: bool) -> None:
        """Tell the callers whose time is over, and drop their writes from the group."""
        now_s = time.monotonic()
        is_late = now_s >= self._latest_s
        expired = [write for write in group if is_late or write.deadline_s <= now_s]
        group[:] = [write for write in group if not is_late and write.deadline_s > now_s]
        self._fail(expired, self._unavailable(error, is_doubtful=is_doubtful))

    def _fail(self, group: Sequence[Write[Any]], error: Exception) -> None:
        for write in group:
            write.fail(error)

    def _unavailable(self, error: Exception, *, is_doubtful: bool) -> Exception:
        if is_doubtful:
            return OutcomeUnknownError(
                f"{self._name} was lost during a commit, and whether it took place could not be "
                "found out; send the same request again"
            )
        return StorageUnavailableError(
            f"{self._name} cannot be written to ({error}); nothing was written"
        )

    def _typed(self, error: Exception, *, num_writes: int) -> Exception:
        if is_disk_full(error):
            logger.warning("disk is full", extra={"num_writes": num_writes})
            return StorageFullError(
                f"the disk of {self._name} is full; free space, then send the request again"
            )
        logger.error("group commit failed", exc_info=error, extra={"num_writes": num_writes})
        return error

    def _give_up(self, error: Exception) -> None:
        """Refuse what waits and what comes, for the first reason given."""
        if self._end is None:
            self._end = error
        while waiting := self._waiting.take():
            self._fail(waiting, self._end)
