"""One transaction for a group of writes, on the session of a PostgreSQL writer.

The transaction also sets the writer's own row to a nonce, by which a later session finds out
whether it took place; see `group_commit`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_runtime.sql.postgres_sessions import (
    Connection,
    PassingError,
    answer_within,
    is_disk_full,
    is_passing,
    is_refusal,
    is_session_over,
)

ResultT = TypeVar("ResultT")
Statements = Callable[[sa.Connection], ResultT]


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
        on_end: Called when the connection is closed, by either side.
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
        """Whether a transaction took place, which cannot begin or end any more.

        Changing the row waits for an old session that still holds it. The change is itself a
        commit: when it is acknowledged without a warning, so is all that came before it.

        Raises:
            PassingError: If that cannot be found out now.
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
