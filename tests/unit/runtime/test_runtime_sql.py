from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tinsmith_runtime.errors import ConfigError, InvalidFieldError, StorageFullError
from tinsmith_runtime.sql import SqliteDatabase

metadata = sa.MetaData()
notes = sa.Table(
    "notes",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("text", sa.Text, nullable=False),
)


def add(number: int, text: str = "x") -> Callable[[sa.Connection], int]:
    def statements(connection: sa.Connection) -> int:
        connection.execute(sa.insert(notes).values(number=number, text=text))
        return number

    return statements


def numbers(connection: sa.Connection) -> list[int]:
    return list(connection.execute(sa.select(notes.c.number).order_by(notes.c.number)).scalars())


@pytest.fixture
def database(tmp_path: Path) -> Iterator[SqliteDatabase]:
    database = SqliteDatabase(tmp_path / "folder" / "pod.db", metadata, schema_version=1)
    yield database
    database.close_sync()


class HeldWriter:
    """Keeps the writer inside a write until it is released."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._begun, self._release = threading.Event(), threading.Event()
        self._write = asyncio.create_task(database.write(self._hold))

    def _hold(self, _: sa.Connection) -> None:
        self._begun.set()
        self._release.wait()

    async def __aenter__(self) -> HeldWriter:
        await asyncio.to_thread(self._begun.wait)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._release.set()
        await self._write


async def watched_commits(database: SqliteDatabase) -> list[str]:
    """Return a list that each commit of the database from now on is added to."""
    commits: list[str] = []

    def note(statement: str) -> None:
        if statement == "COMMIT":
            commits.append(statement)

    def watch(connection: sa.Connection) -> None:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.set_trace_callback(note)

    await database.write(watch)
    commits.clear()
    return commits


async def test_a_write_is_on_disk_when_it_returns(database: SqliteDatabase, tmp_path: Path) -> None:
    assert await database.write(add(1)) == 1
    assert await asyncio.to_thread(database.write_sync, add(2)) == 2
    assert await database.read(numbers) == [1, 2]
    database.close_sync()
    again = SqliteDatabase(tmp_path / "folder" / "pod.db", metadata, schema_version=1)
    assert await again.read(numbers) == [1, 2]
    again.close_sync()


async def test_a_commit_is_synced_to_disk(database: SqliteDatabase) -> None:
    async def pragma(name: str) -> object:
        return await database.write(
            lambda connection: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
        )

    assert (await pragma("journal_mode"), await pragma("synchronous")) == ("wal", 2)


async def test_writes_that_wait_share_one_commit(database: SqliteDatabase) -> None:
    commits = await watched_commits(database)
    async with HeldWriter(database):
        writes = [asyncio.create_task(database.write(add(number))) for number in range(16)]
        await asyncio.sleep(0)
    assert await asyncio.gather(*writes) == list(range(16))
    assert len(commits) == 2  # that of the held write, and one for all the others


async def test_a_write_that_fails_is_rolled_back_alone(database: SqliteDatabase) -> None:
    def half(connection: sa.Connection) -> None:
        add(100)(connection)
        raise InvalidFieldError("field", "is wrong")

    def bug(connection: sa.Connection) -> None:
        add(101)(connection)
        raise RuntimeError("bug")

    async with HeldWriter(database):
        calls = (add(1), half, add(2), bug, add(1), add(3))
        writes = [asyncio.create_task(database.write(call)) for call in calls]
        await asyncio.sleep(0)
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [result for result in results if isinstance(result, int)] == [1, 2, 3]
    kinds = [type(result) for result in results if not isinstance(result, int)]
    assert kinds == [InvalidFieldError, RuntimeError, sa.exc.IntegrityError]
    assert await database.read(numbers) == [1, 2, 3]


async def test_writes_made_together_share_one_commit_and_have_their_own_results(
    database: SqliteDatabase,
) -> None:
    def bug(connection: sa.Connection) -> int:
        raise RuntimeError("bug")

    commits = await watched_commits(database)
    first, failed, last = await database.write_all([add(1), bug, add(2)])
    assert (first, last, len(commits)) == (1, 2, 1)
    assert isinstance(failed, RuntimeError)
    assert await database.read(numbers) == [1, 2]


async def test_a_cancelled_caller_does_not_cancel_its_write(database: SqliteDatabase) -> None:
    async with HeldWriter(database):
        write = asyncio.create_task(database.write(add(1)))
        await asyncio.sleep(0)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
    await database.write(add(2))
    assert await database.read(numbers) == [1, 2]


async def test_readers_see_the_last_commit_and_do_not_wait(database: SqliteDatabase) -> None:
    await database.write(add(1))
    async with HeldWriter(database):
        assert await database.read(numbers) == [1]


async def test_a_reader_can_not_write(database: SqliteDatabase) -> None:
    await database.read(add(1))
    assert await database.read(numbers) == []


async def test_a_full_disk_is_typed_and_passes(database: SqliteDatabase, caplog: object) -> None:
    await database.write(add(1))

    def limit(num_pages: int) -> Callable[[sa.Connection], None]:
        def statements(connection: sa.Connection) -> None:
            connection.exec_driver_sql(f"PRAGMA max_page_count={num_pages}")

        return statements

    pages = await database.write(
        lambda connection: connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    )
    await database.write(limit(pages))
    large = "secret prompt " * 5_000
    async with HeldWriter(database):
        writes = [asyncio.create_task(database.write(add(n, large))) for n in (2, 3)]
        await asyncio.sleep(0)
    for result in await asyncio.gather(*writes, return_exceptions=True):
        assert isinstance(result, StorageFullError)
        assert "free space" in result.message
        assert result.retry_after_s is not None
    assert await database.read(numbers) == [1]
    await database.write(limit(2**30))
    await database.write(add(2, large))
    assert await database.read(numbers) == [1, 2]


async def test_errors_do_not_carry_what_was_written(database: SqliteDatabase) -> None:
    await database.write(add(1))
    with pytest.raises(sa.exc.IntegrityError) as failure:
        await database.write(add(1, "secret prompt"))
    assert "secret" not in str(failure.value)


def test_a_second_process_is_refused(database: SqliteDatabase, tmp_path: Path) -> None:
    script = (
        "import sys, pathlib, sqlalchemy\n"
        "from tinsmith_runtime.sql import SqliteDatabase\n"
        "SqliteDatabase(pathlib.Path(sys.argv[1]), sqlalchemy.MetaData(), schema_version=1)\n"
    )
    path = tmp_path / "folder" / "pod.db"
    child = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, check=False
    )
    assert child.returncode == 1
    assert "in use by another process" in child.stderr.splitlines()[-1]


def test_a_closed_file_can_be_opened_again_and_an_open_one_not(tmp_path: Path) -> None:
    path = tmp_path / "pod.db"
    first = SqliteDatabase(path, metadata, schema_version=1)
    with pytest.raises(ConfigError, match="in use"):
        SqliteDatabase(path, metadata, schema_version=1)
    first.close_sync()
    SqliteDatabase(path, metadata, schema_version=1).close_sync()


def test_another_schema_version_is_refused_and_the_lock_released(tmp_path: Path) -> None:
    path = tmp_path / "pod.db"
    SqliteDatabase(path, metadata, schema_version=1).close_sync()
    with pytest.raises(ConfigError, match="schema version 1, this release reads 2"):
        SqliteDatabase(path, metadata, schema_version=2)
    SqliteDatabase(path, metadata, schema_version=1).close_sync()


def test_what_waits_is_written_before_the_close(tmp_path: Path) -> None:
    path = tmp_path / "pod.db"
    database = SqliteDatabase(path, metadata, schema_version=1)
    threads = [threading.Thread(target=database.write_sync, args=(add(n),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    database.close_sync()
    again = SqliteDatabase(path, metadata, schema_version=1)
    assert again.write_sync(numbers) == [0, 1, 2]
    again.close_sync()


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/data cannot be written: Not a directory; give"):
        SqliteDatabase(tmp_path / "file" / "data" / "pod.db", metadata, schema_version=1)


def test_a_file_that_is_no_database_is_named_and_the_lock_released(tmp_path: Path) -> None:
    path = tmp_path / "pod.db"
    path.write_bytes(b"x" * 4096)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"pod\.db cannot be read: file is not a database"):
            SqliteDatabase(path, metadata, schema_version=1)


def test_a_file_that_can_not_be_opened_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pod.db"
    path.mkdir()
    with pytest.raises(ConfigError, match=r"pod\.db cannot be written: unable to open"):
        SqliteDatabase(path, metadata, schema_version=1)
