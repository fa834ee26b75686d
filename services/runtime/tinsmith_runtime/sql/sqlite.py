"""SQLite as a durable store: one writer thread, group commit, one process for each file.

Every write is a function of a connection. The writer takes the functions that are next (see
`fair_groups`) and runs them in one transaction, each under a savepoint of its own. It commits, and
only then tells the callers; by
`synchronous=FULL` a commit is an fsync of the log. There is no timer: a lone write commits at once,
and while a commit runs, the next group gathers. A write that raises is rolled back alone.

Reads go to a second connection, which in WAL mode sees the last commit and never waits for it.
Both connections stay open, and transactions are begun and ended in the driver: through SQLAlchemy
that costs more than the one statement that many of them hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast

import sqlalchemy as sa

from tinsmith_runtime.errors import ConfigError, StorageBusyError, StorageFullError, TinsmithError
from tinsmith_runtime.observability.metrics import LEDGER_COMMIT_SECONDS, LEDGER_COMMIT_WRITES
from tinsmith_runtime.sql.fair_groups import FairGroups
from tinsmith_runtime.sql.schema_versions import prepare_schema
from tinsmith_runtime.tenant import current_tenant

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Statements = Callable[[sa.Connection], ResultT]

_BUSY_CODES = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_DAMAGED_CODES = frozenset({sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT})
_CLOSED_CODES = frozenset(
    {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL}
)
_FULL_CODES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_IOERR_WRITE})


class SqliteDatabase:
    """One SQLite file, open for as long as the process holds its lock.

    Args:
        path: The file; its folder is created.
        metadata: The tables, created where they are missing.
        schema_version: Compared with the file's; a newer one is refused.
        migrations: The package that upgrades older files; without one they are refused.

    Raises:
        ConfigError: If the file cannot be made, read or written, is of a newer release, or belongs
            to another process.
    """

    def __init__(
        self, path: Path, metadata: sa.MetaData, *, schema_version: int, migrations: str = ""
    ) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_file = _lock(path)
        except OSError as error:
            raise ConfigError(
                f"data directory {path.parent} cannot be written: {error.strerror}; give it to the"
                " user of this process, or name another one"
            ) from error
        self._path = path
        try:
            self._engine = _create_engine(path)
            with self._engine.connect() as connection:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                prepare_schema(
                    connection,
                    metadata,
                    name=str(path),
                    schema_version=schema_version,
                    migrations=migrations,
                )
                connection.exec_driver_sql("COMMIT")
        except sa.exc.DBAPIError as error:
            self._lock_file.close()
            problem = _unusable(path, error)
            if problem is None:
                raise
            raise problem from error
        except BaseException:
            self._lock_file.close()
            raise
        self._waiting: FairGroups[_Write[Any]] = FairGroups()
        self._is_closing = False
        self._change = threading.Condition()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sql-read")
        self._read_connection: sa.Connection | None = None
        """Of the reader's thread, once it has read."""
        self._writer = threading.Thread(target=self._write_forever, name="sql-write", daemon=True)
        self._writer.start()

    async def write(self, statements: Statements[ResultT]) -> ResultT:
        """Run statements in the next group commit; return once they are on disk.

        A cancelled caller does not cancel the write.

        Raises:
            StorageFullError: If the disk is full; nothing was written.
            Exception: What the statements raised; nothing was written.
        """
        [future] = self._enqueue([statements])
        return await asyncio.shield(asyncio.wrap_future(future))

    async def write_all(
        self, group: Sequence[Statements[ResultT]]
    ) -> list[ResultT | BaseException]:
        """Run several writes in one group commit; each has a result or an error of its own.

        The writer never sees only a part of them, so that they cost one sync.
        """
        futures = [asyncio.wrap_future(future) for future in self._enqueue(group)]
        return await asyncio.shield(asyncio.gather(*futures, return_exceptions=True))

    def write_sync(self, statements: Statements[ResultT]) -> ResultT:
        """Do the same from a plain thread."""
        [future] = self._enqueue([statements])
        return future.result()

    async def read(self, statements: Statements[ResultT]) -> ResultT:
        """Run statements that change nothing, on the state of the last commit."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, self._read, statements)

    async def close(self) -> None:
        """Finish the writes that wait, and release the file."""
        await asyncio.to_thread(self.close_sync)

    def close_sync(self) -> None:
        """Do the same from a plain thread."""
        with self._change:
            was_closing, self._is_closing = self._is_closing, True
            self._change.notify()
        self._writer.join()
        if not was_closing:
            self._reader.submit(self._end_reads)
        self._reader.shutdown()
        self._engine.dispose()
        self._lock_file.close()

    def _enqueue(self, group: Sequence[Statements[ResultT]]) -> list[Future[ResultT]]:
        writes: list[_Write[ResultT]] = [_Write(statements) for statements in group]
        if writes:
            with self._change:
                self._waiting.add(current_tenant(), writes)
                self._change.notify()
        return [write.future for write in writes]

    def _read(self, statements: Statements[ResultT]) -> ResultT:
        if self._read_connection is None:
            self._read_connection = self._engine.connect()
        connection = self._read_connection
        try:
            _driver_of(connection).execute("BEGIN")
            return statements(connection)
        finally:
            try:
                _driver_of(connection).execute("ROLLBACK")
            except sqlite3.Error:
                # It may be inside a transaction or out of one: the next read begins with another.
                self._end_reads()

    def _end_reads(self) -> None:
        connection, self._read_connection = self._read_connection, None
        if connection is not None:
            connection.close()

    def _write_forever(self) -> None:
        with self._engine.connect() as connection:
            while group := self._next_group():
                self._commit(connection, group)

    def _next_group(self) -> list[_Write[Any]]:
        """Return at least one write; nothing once the database is closing and all is written."""
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.take()

    def _commit(self, connection: sa.Connection, group: list[_Write[Any]]) -> None:
        begin_s = time.perf_counter()
        driver = _driver_of(connection)
        try:
            driver.execute("BEGIN IMMEDIATE")
            for write in group:
                write.run(connection)
            written_s = time.perf_counter()
            driver.execute("COMMIT")
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):
                driver.execute("ROLLBACK")
            failure = self._typed(error)
            if isinstance(failure, StorageFullError):
                logger.warning("disk is full", extra={"num_writes": len(group)})
            else:
                logger.error(
                    "group commit failed", exc_info=error, extra={"num_writes": len(group)}
                )
            for write in group:
                write.fail(failure)
            return
        end_s = time.perf_counter()
        LEDGER_COMMIT_SECONDS.observe(end_s - begin_s)
        LEDGER_COMMIT_WRITES.observe(len(group))
        with self._change:
            self._waiting.note(len(group), writes_s=written_s - begin_s, commit_s=end_s - written_s)
        for write in group:
            write.finish()

    def _typed(self, error: Exception) -> Exception:
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
        if isinstance(cause, sqlite3.Error) and cause.sqlite_errorcode & 0xFF in _FULL_CODES:
            return StorageFullError(
                f"the disk of {self._path.parent} is full; free space, then send the request again",
                path=self._path,
            )
        if isinstance(cause, sqlite3.Error) and cause.sqlite_errorcode & 0xFF in _BUSY_CODES:
            return StorageBusyError(
                f"{self._path} is held by another program; close it, then send the request again",
                path=self._path,
            )
        return error


class _Write(Generic[ResultT]):
    """One function that waits for the writer, and the future of its result."""

    def __init__(self, statements: Statements[ResultT]) -> None:
        self.future: Future[ResultT] = Future()
        self._statements = statements
        self._result: ResultT | None = None
        self._error: Exception | None = None

    def run(self, connection: sa.Connection) -> None:
        """Run inside the group's transaction; an error undoes this write alone.

        Raises:
            sa.exc.OperationalError: If the disk is full, which ends the whole group.
            sqlite3.OperationalError: The same, where the savepoint found it.
        """
        driver = _driver_of(connection)
        driver.execute("SAVEPOINT one")
        try:
            self._result = self._statements(connection)
        except TinsmithError as error:
            self._error = error
            driver.execute("ROLLBACK TO one")
        except sa.exc.OperationalError:
            raise
        except Exception as error:
            self._error = error
            driver.execute("ROLLBACK TO one")
        driver.execute("RELEASE one")

    def finish(self) -> None:
        """Tell the caller, after the commit."""
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(cast(ResultT, self._result))

    def fail(self, error: Exception) -> None:
        """Tell the caller that nothing was written."""
        self.future.set_exception(self._error or error)


def _driver_of(connection: sa.Connection) -> sqlite3.Connection:
    return cast(sqlite3.Connection, connection.connection.driver_connection)


def _create_engine(path: Path) -> sa.Engine:
    # Transactions are begun and ended by this module; the driver must not begin its own.
    engine = sa.create_engine(
        f"sqlite:///{path}",
        isolation_level="AUTOCOMMIT",
        poolclass=sa.pool.QueuePool,
        pool_size=2,
        max_overflow=1,
        # Parameters hold prompts; an error must not carry them into a log.
        hide_parameters=True,
        connect_args={"check_same_thread": False, "timeout": 10},
    )

    @sa.event.listens_for(engine, "connect")
    def set_pragmas(connection: sqlite3.Connection, _: object) -> None:
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            "busy_timeout=10000",
            "wal_autocheckpoint=1000",
        ):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _unusable(path: Path, error: sa.exc.DBAPIError) -> ConfigError | None:
    """Return what to tell of a file that is no usable database; None if the error is another."""
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
    if code in _DAMAGED_CODES:
        return ConfigError(f"{path} cannot be read: {error.orig}; restore it from a backup")
    if code in _CLOSED_CODES:
        return ConfigError(
            f"{path} cannot be written: {error.orig}; give it to the user of this process, and"
            " room to its disk"
        )
    return None


def _lock(path: Path) -> IO[bytes]:
    """Take the lock of a database file, held until the returned file is closed."""
    lock_file = open(path.with_suffix(".lock"), "wb")  # noqa: SIM115 - held for the life of the object
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock_file.close()
        raise ConfigError(
            f"{path} is in use by another process; stop it, or choose another data folder"
        ) from error
    return lock_file
