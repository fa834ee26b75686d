"""PostgreSQL as a durable store: several processes, one schema for each kind of pod.

Writes go through one session of this object; see `group_commit`. Reads have sessions of their
own, which follow the writer to a new primary, so that a read sees all that was acknowledged before.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from tinsmith_runtime.errors import ConfigError, StorageUnavailableError
from tinsmith_runtime.sql.advisory_lock import Hold
from tinsmith_runtime.sql.group_commit import GroupCommitWriter
from tinsmith_runtime.sql.postgres_sessions import (
    Connection,
    PassingError,
    PostgresTarget,
    answer_within,
    is_passing,
    is_read_only,
)
from tinsmith_runtime.sql.postgres_transactions import Statements, WriterSession
from tinsmith_runtime.sql.schema_versions import prepare_schema

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_NUM_READERS = 4
_RETRY_PAUSE_S = 0.1
_PING_INTERVAL_S = 5.0
_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"

# One row for each writer; and for each role that one process holds, one that names it. Rows of
# writers that ended without a word are of no use after a while.
_WRITERS_TABLE = """
CREATE TABLE IF NOT EXISTS tinsmith_writers (
    writer text PRIMARY KEY,
    last_commit text NOT NULL,
    seen timestamptz NOT NULL DEFAULT now()
);
DELETE FROM tinsmith_writers WHERE seen < now() - interval '30 days' AND writer NOT LIKE 'hold:%'
"""
# Only where it is missing: a role that may not create schemas can be given one.
_CREATE_SCHEMA = """
DO $$ BEGIN
    IF to_regnamespace('"{schema}"') IS NULL THEN
        PERFORM pg_advisory_xact_lock(hashtextextended('tinsmith {schema}', 0));
        CREATE SCHEMA IF NOT EXISTS "{schema}";
    END IF;
END $$
"""
# Processes that start together would create the same tables, so that they do it in turn.
_BEGIN_UPGRADE = """
BEGIN;
SET LOCAL statement_timeout = 0;
SET LOCAL lock_timeout = 0;
SELECT pg_advisory_xact_lock(hashtextextended('tinsmith {schema}', 0))
"""

# The sessions that were made for the connection that this task is taking.
_made: contextvars.ContextVar[list[Connection]] = contextvars.ContextVar("made")


class PostgresDatabase:
    """A schema of a PostgreSQL database; made by `open`."""

    def __init__(self, target: PostgresTarget, *, reconnect_timeout_s: float) -> None:
        self._target = target
        self._reconnect_timeout_s = reconnect_timeout_s
        self._id = f"{target.application_name}:{uuid.uuid4().hex}"
        self._hold: Hold | None = None
        self._writer: GroupCommitWriter | None = None
        self._writers = _create_engine(self._connect_writer, poolclass=sa.pool.NullPool)
        self._readers = _create_engine(self._connect_reader, pool_size=_NUM_READERS, max_overflow=0)

    @classmethod
    async def open(
        cls,
        url: str,
        metadata: sa.MetaData,
        *,
        schema: str,
        schema_version: int,
        migrations: str = "",
        exclusive: str = "",
        on_lost: Callable[[], None] = lambda: None,
        application_name: str = "tinsmith",
        reconnect_timeout_s: float = 60.0,
        answer_timeout_s: float = 30.0,
        ping_interval_s: float = _PING_INTERVAL_S,
    ) -> PostgresDatabase:
        """Connect, wait for the lock if there is one, and create or upgrade the tables.

        Args:
            url: `postgresql://user:password@host:port,host:port/database`; of several hosts, that
                which takes writes is found, now and whenever the connection is lost.
            metadata: The tables.
            schema: The PostgreSQL schema that holds them, made where it is missing.
            schema_version: The version of the tables that this release reads.
            migrations: The package that upgrades older ones.
            exclusive: A role that one process holds at a time: another one waits here until the
                first has ended. Empty for none.
            on_lost: Called when another process took the role over while this one was cut off from
                the database. Nothing is written from then on, and the process must exit.
            application_name: What `pg_stat_activity` shows.
            reconnect_timeout_s: Time that a call may wait for a server that cannot be reached.
            answer_timeout_s: Time after which a silent server counts as gone.
            ping_interval_s: How often the holder of a role looks whether it still is.

        Raises:
            ConfigError: If the URL, the credentials or a setting of the server are wrong, or
                another release wrote the tables.
            StorageUnavailableError: If the server cannot be reached in time.
        """
        target = PostgresTarget(
            url=url,
            schema=schema,
            application_name=application_name,
            answer_timeout_s=answer_timeout_s,
        )
        self = cls(target, reconnect_timeout_s=reconnect_timeout_s)
        if exclusive:
            self._hold = Hold(target, exclusive, holder=self._id)

        def prepare(connection: sa.Connection) -> None:
            prepare_schema(
                connection,
                metadata,
                name=target.name,
                schema_version=schema_version,
                migrations=migrations,
            )

        try:
            first_session = await self._retry(lambda: self._prepare(prepare))
            self._writer = GroupCommitWriter(
                target.name,
                self._reopen,
                # The lock of a role stays with the session that took it.
                first_session,
                on_lost=on_lost,
                is_watched=bool(exclusive),
                reconnect_timeout_s=reconnect_timeout_s,
                ping_interval_s=ping_interval_s,
            )
        except BaseException:
            await self._dispose()
            raise
        return self

    async def write(self, statements: Statements[ResultT]) -> ResultT:
        """Run statements in the next group commit; return once they are on disk; see `Database`.

        They may run several times, and take effect once.

        Raises:
            StorageFullError: If the disk is full; nothing was written.
            StorageUnavailableError: If the server cannot be reached in time; nothing was written.
            OutcomeUnknownError: If it was lost during the commit, and did not come back in time.
            Exception: What the statements raised; nothing was written.
        """
        [write] = self._open_writer().enqueue([statements])
        return await asyncio.shield(write.future)

    async def write_all(
        self, group: Sequence[Statements[ResultT]]
    ) -> list[ResultT | BaseException]:
        """Run several writes in one group commit; each has a result or an error of its own."""
        writes = self._open_writer().enqueue(group)
        futures = [write.future for write in writes]
        return await asyncio.shield(asyncio.gather(*futures, return_exceptions=True))

    async def read(self, statements: Statements[ResultT]) -> ResultT:
        """Run statements that change nothing, on the state of the last commit.

        Raises:
            StorageUnavailableError: If the server cannot be reached in time.
            Exception: What the statements raised.
        """
        if (end := self._open_writer().end) is not None:
            raise end
        return await self._retry(lambda: self._read(statements))

    def hurry(self, within_s: float) -> None:
        """Let calls wait for a server that is away this long at most; the process stops."""
        self._reconnect_timeout_s = min(self._reconnect_timeout_s, within_s)
        self._open_writer().hurry(within_s)

    async def close(self) -> None:
        """Finish the writes that wait, and release the database."""
        if self._writer is not None:
            await self._writer.close()
        await self._dispose()

    def _open_writer(self) -> GroupCommitWriter:
        assert self._writer is not None, "made by open()"
        return self._writer

    async def _retry(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Repeat a call that a lost connection does not spoil."""
        deadline_s = time.monotonic() + self._reconnect_timeout_s
        while True:
            try:
                return await call()
            except (PassingError, sa.exc.TimeoutError) as error:
                if time.monotonic() > deadline_s:
                    raise StorageUnavailableError(
                        f"{self._target.name} cannot be reached: {error}"
                    ) from error
                logger.warning(
                    "the database cannot be reached",
                    extra={"database": self._target.name, "why": str(error)},
                )
                await asyncio.sleep(_RETRY_PAUSE_S)

    async def _read(self, statements: Statements[ResultT]) -> ResultT:
        async with contextlib.aclosing(await _connect(self._readers)) as connection:
            raw = await _raw(connection)
            try:
                return await answer_within(
                    raw, self._target.answer_timeout_s, _run_read(connection, raw, statements)
                )
            except Exception as error:
                if not is_passing(error, raw) or is_read_only(error):
                    raise
                await _cut(connection, raw)
                raise PassingError(str(error) or type(error).__name__) from error
            except BaseException:
                # Cancelled in the middle: the next reader gets another session.
                await _cut(connection, raw)
                raise

    async def _prepare(self, prepare: Callable[[sa.Connection], None]) -> WriterSession:
        """Open the first session of the writer, and bring the tables to their version."""
        schema = self._target.schema
        async with self._session() as session:
            if self._hold is not None:
                await self._hold.wait(session.raw)
            await session.raw.execute(_BEGIN_UPGRADE.format(schema=schema))
            await session.raw.execute(_WRITERS_TABLE)
            await session.connection.run_sync(prepare)
            await session.raw.execute("COMMIT")
            if self._hold is not None:
                await self._hold.sign(session.raw)
        return session

    async def _reopen(self) -> WriterSession:
        """Open a session of the writer after one was lost."""
        try:
            async with asyncio.timeout(self._target.answer_timeout_s), self._session() as session:
                if self._hold is not None:
                    await self._hold.take_again(session.raw)
        except (TimeoutError, ConfigError) as error:
            # Settings that are wrong now were right at the start: they are being changed.
            raise PassingError(str(error) or "no answer") from error
        # Readers that are connected to the former primary would not see what is written from now.
        await self._readers.dispose()
        return session

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[WriterSession]:
        """Open a session of the writer, which is cut if the block raises."""
        connection = await _connect(self._writers)
        raw = await _raw(connection)
        try:
            await self._target.check_durable(raw)
            session = WriterSession(
                connection,
                raw,
                writer=self._id,
                answer_timeout_s=self._target.answer_timeout_s,
                on_end=self._look_after_session,
            )
            yield session
        except BaseException as error:
            is_over = isinstance(error, Exception) and is_passing(error, raw)
            await _cut(connection, raw)
            if is_over:
                raise PassingError(str(error) or type(error).__name__) from error
            raise

    async def _connect_writer(self) -> Connection:
        session = await self._target.connect(is_leading=True)
        _made.get().append(session)
        # SQLAlchemy looks at the schema as soon as it has the connection.
        try:
            await session.execute(_CREATE_SCHEMA.format(schema=self._target.schema))
        except Exception as error:
            if is_passing(error, session):
                session.terminate()
                raise PassingError(str(error) or type(error).__name__) from error
            raise
        return session

    async def _connect_reader(self) -> Connection:
        session = await self._target.connect()
        _made.get().append(session)
        return session

    def _look_after_session(self) -> None:
        if self._writer is not None:
            self._writer.wake()

    async def _dispose(self) -> None:
        await self._writers.dispose()
        await self._readers.dispose()


async def _run_read(
    connection: AsyncConnection, raw: Connection, statements: Statements[ResultT]
) -> ResultT:
    await raw.execute(_BEGIN_READ)
    try:
        result = await connection.run_sync(statements)
    except Exception:
        await raw.execute("ROLLBACK")
        raise
    await raw.execute("ROLLBACK")
    return result


def _create_engine(connect: Callable[[], Awaitable[Connection]], **pool: Any) -> AsyncEngine:
    # Transactions are begun and ended by this package; the driver must not begin its own.
    return create_async_engine(
        "postgresql+asyncpg://",
        async_creator=connect,
        isolation_level="AUTOCOMMIT",
        # Parameters hold prompts; an error must not carry them into a log.
        hide_parameters=True,
        **pool,
    )


async def _connect(engine: AsyncEngine) -> AsyncConnection:
    """Take a connection, and cut what was made for it if that fails or is cancelled on the way.

    SQLAlchemy loses a connection that it was about to ask for the version of its server.
    """
    made: list[Connection] = []
    token = _made.set(made)
    try:
        return await engine.connect()
    except BaseException:
        for session in made:
            session.terminate()
        raise
    finally:
        _made.reset(token)


async def _raw(connection: AsyncConnection) -> Connection:
    pooled = await connection.get_raw_connection()
    return cast(Connection, pooled.driver_connection)


async def _cut(connection: AsyncConnection, raw: Connection) -> None:
    raw.terminate()
    with contextlib.suppress(sa.exc.SQLAlchemyError):
        await connection.invalidate()
        await connection.close()
