"""The writer of a PostgreSQL database: group commit, and every write exactly once.

Each group is one transaction that also sets the writer's own row to a fresh nonce. When the answer
to a COMMIT does not arrive, the row tells whether it took place: the next session first waits for
the row, which the old session may still hold, and then finds the nonce there or runs the group
again. A group that was not sent its COMMIT is run again without a question.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_runtime.errors import (
    OutcomeUnknownError,
    StorageFullError,
    StorageUnavailableError,
)
from tinsmith_runtime.metrics import LEDGER_COMMIT_SECONDS, LEDGER_COMMIT_WRITES
from tinsmith_runtime.sql.postgres_hold import HoldLostError
from tinsmith_runtime.sql.postgres_sessions import (
    Connection,
    PassingError,
    answer_within,
    is_disk_full,
    is_passing,
    is_refusal,
    is_session_over,
)

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Statements = Callable[[sa.Connection], ResultT]

_MAX_GROUP = 256
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


class Write(Generic[ResultT]):
    """One function that waits for the writer, and the future of its result."""

    def __init__(self, statements: Statements[ResultT], *, deadline_s: float) -> None:
        self.statements = statements
        self.deadline_s = deadline_s
        self.future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        # A caller that was cancelled does not fetch the error.
        self.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._result: ResultT | None = None
        self._error: Exception | None = None

    def keep(self, result: ResultT | None, error: Exception | None) -> None:
        """Note what an attempt came to; a later attempt replaces it."""
        self._result, self._error = result, error

    def finish(self) -> None:
        """Tell the caller, after the commit."""
        if self._error is not None:
            self.fail(self._error)
        elif not self.future.done():
            self.future.set_result(cast(ResultT, self._result))

    def fail(self, error: Exception) -> None:
        """Tell the caller that nothing was written, or that it is not known."""
        if not self.future.done():
            self.future.set_exception(error)


class WriterSession:
    """The writer's connection, until it is lost.

    Args:
        connection: In autocommit mode; its transactions are begun and ended here.
        raw: The same connection, as asyncpg has it.
        writer: Names the writer's row.
        answer_timeout_s: Time after which a silent server counts as gone.
        on_end: Called when the connection is closed by whomever.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        raw: Connection,
        *,
        writer: str,
        answer_timeout_s: float,
        on_end: Callable[[], None],
    ) -> None:
        self.connection = connection
        self.raw = raw
        self._writer = writer
        self._answer_timeout_s = answer_timeout_s
        self._warnings: list[str] = []
        raw.add_log_listener(self._note_warning)
        raw.add_termination_listener(lambda _: on_end())

    async def run(self, group: Sequence[Write[Any]], nonce: str) -> bool:
        """Run a group up to its COMMIT.

        Returns:
            Whether there is anything to commit.

        Raises:
            PassingError: If the group has to be run again; nothing of it was committed.
            asyncpg.PostgresError: What ends the whole group; nothing of it was committed.
        """
        is_shared = len(group) > 1
        begin = (
            "BEGIN; INSERT INTO tinsmith_writers (writer, last_commit) "
            f"VALUES ('{self._writer}', '{nonce}') ON CONFLICT (writer) "
            "DO UPDATE SET last_commit = excluded.last_commit, seen = now()"
        )
        try:
            await self.answer(self.raw.execute(f"{begin}; SAVEPOINT one" if is_shared else begin))
        except Exception as error:
            raise self._group_error(error) from error
        for write in group:
            failure = await self._run_one(write, is_shared=is_shared)
            if failure is None:
                continue
            group_error = self._group_error(failure)
            if group_error is not failure or is_disk_full(failure):
                raise group_error from failure
            write.keep(None, failure)
            await self._undo("ROLLBACK TO SAVEPOINT one" if is_shared else "ROLLBACK")
            if not is_shared:
                return False
        return True

    async def commit(self) -> bool:
        """Commit.

        Returns:
            False if it is committed on this server, but perhaps not on its standby.

        Raises:
            PassingError: If it is not known whether the commit took place.
            Exception: Why it surely did not.
        """
        self._warnings.clear()
        try:
            answer = await self.answer(self.raw.execute("COMMIT"))
        except Exception as error:
            if is_refusal(error, self.raw):
                raise
            raise PassingError(str(error) or type(error).__name__) from error
        if answer != "COMMIT":
            raise RuntimeError("a write hid an error of the database; nothing was written")
        return not self._warnings

    async def has_committed(self, nonce: str) -> bool:
        """Whether a transaction took place, which can not begin or end any more.

        Changing the row waits for an old session that still holds it. The change is itself a
        commit: when it is acknowledged without a warning, so is all that came before it.

        Raises:
            PassingError: If that can not be found out now.
        """
        self._warnings.clear()
        query = (
            "INSERT INTO tinsmith_writers (writer, last_commit) VALUES ($1, '') "
            "ON CONFLICT (writer) DO UPDATE SET seen = now() RETURNING last_commit"
        )
        try:
            found = await self.answer(self.raw.fetchval(query, self._writer))
        except Exception as error:
            raise self._group_error(error) from error
        if self._warnings:
            raise PassingError(
                f"the standby does not confirm: {self._warnings[0]}", keeps_session=True
            )
        return bool(found == nonce)

    async def ping(self) -> None:
        """Notice a server that vanished without a word.

        Raises:
            PassingError: If it does not answer.
        """
        try:
            await self.answer(self.raw.execute("SELECT 1"))
        except Exception as error:
            raise PassingError(str(error) or type(error).__name__) from error

    async def answer(self, call: Awaitable[ResultT]) -> ResultT:
        """Wait for an answer of the server; see `answer_within`."""
        return await answer_within(self.raw, self._answer_timeout_s, call)

    async def rollback(self) -> None:
        """End whatever transaction there is.

        Raises:
            PassingError: If the session is lost.
        """
        await self._undo("ROLLBACK")

    async def close(self) -> None:
        """Forget the writer, which waits for nothing any more, and close the connection."""
        with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            query = "DELETE FROM tinsmith_writers WHERE writer = $1"
            await self.answer(self.raw.execute(query, self._writer))
        await self.abandon()

    async def abandon(self) -> None:
        """Cut the connection."""
        self.raw.terminate()
        with contextlib.suppress(sa.exc.SQLAlchemyError):
            await self.connection.invalidate()
            await self.connection.close()

    async def _run_one(self, write: Write[Any], *, is_shared: bool) -> Exception | None:
        try:
            result = await self.answer(self.connection.run_sync(write.statements))
            if is_shared:
                await self.answer(self.raw.execute("RELEASE SAVEPOINT one; SAVEPOINT one"))
        except Exception as error:
            return error
        write.keep(result, None)
        return None

    async def _undo(self, statement: str) -> None:
        try:
            await self.answer(self.raw.execute(statement))
        except Exception as error:
            raise self._group_error(error) from error

    def _group_error(self, error: Exception) -> Exception:
        """Return what an error means for a group: itself, or that it has to be run again."""
        if not is_passing(error, self.raw):
            return error
        return PassingError(
            str(error) or type(error).__name__,
            keeps_session=not is_session_over(error, self.raw),
        )

    def _note_warning(self, _: object, message: asyncpg.PostgresLogMessage) -> None:
        # Whatever the server warns of at a commit is taken for a doubt: its words may be translated
        # and its code is that of any warning.
        if getattr(message, "severity_en", None) == "WARNING":
            self._warnings.append(str(message))


class PostgresWriter:
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
        self._queue: deque[list[Write[Any]]] = deque()
        self._event = asyncio.Event()
        self._is_closing = False
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
            self._queue.append(cast(list[Write[Any]], writes))
            self._event.set()
        return writes

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
        while not self._queue:
            if self._is_closing:
                return []
            self._event.clear()
            try:
                async with asyncio.timeout(self._ping_interval_s if self._is_watched else None):
                    await self._event.wait()
            except TimeoutError:
                pass
            if self._is_watched and not self._queue and not self._is_closing:
                await self._watch()
        group: list[Write[Any]] = []
        while self._queue and len(group) < _MAX_GROUP:
            group += self._queue.popleft()
        return group

    async def _watch(self) -> None:
        """Have a session, so that a lost lock is noticed without a write."""
        try:
            await (await self._ready_session()).ping()
        except PassingError as error:
            await self._drop_session(error)
            # The next attempt comes after the ping interval at most, or with a write.
            await asyncio.sleep(_FIRST_PAUSE_S)

    async def _settle(self, group: list[Write[Any]]) -> bool:
        """Commit a group and tell its callers; return whether it was committed.

        Raises:
            HoldLostError: If this process may not write any more; the callers were told.
        """
        nonce = ""  # of a COMMIT that was sent, while it is not known whether it took place
        pause_s = _FIRST_PAUSE_S
        while group:
            try:
                session = await self._ready_session()
                if nonce and await session.has_committed(nonce):
                    break
                nonce = ""
                attempt = uuid.uuid4().hex
                if not await session.run(group, attempt):
                    break
                nonce = attempt
                if await session.commit():
                    break
            except PassingError as error:
                await self._clean_session(error, keep=error.keeps_session)
                self._expire(group, error, is_doubtful=bool(nonce))
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
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

    def poke(self) -> None:
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
        expired = [write for write in group if write.deadline_s <= now_s]
        group[:] = [write for write in group if write.deadline_s > now_s]
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
            f"{self._name} can not be written to ({error}); nothing was written"
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
        while self._queue:
            self._fail(self._queue.popleft(), self._end)
