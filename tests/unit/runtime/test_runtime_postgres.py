"""PostgreSQL as a durable store: what every database promises, and lost connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import pytest
import sqlalchemy as sa
from sqlalchemy.util import await_only
from tests.fakes.postgres import PostgresServer, new_server
from tests.fakes.postgres_proxy import PostgresProxy
from tests.support.postgres_notes import (
    PID,
    add,
    counter,
    in_thread,
    increment,
    numbers,
    open_database,
    start_counter,
)

from tinsmith_runtime.errors import (
    ConfigError,
    InvalidFieldError,
    StorageFullError,
    StorageUnavailableError,
)
from tinsmith_runtime.sql import PostgresDatabase


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server to kill; it syncs its files."""
    server = new_server()
    yield server
    server.remove()


@pytest.fixture
def server(own_server: PostgresServer) -> PostgresServer:
    if not own_server.is_started:
        own_server.start()
    return own_server


class HeldWriter:
    """Keeps the writer inside a write until it is released."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._begun, self._release = asyncio.Event(), asyncio.Event()
        self._write = asyncio.create_task(database.write(self._hold))

    def _hold(self, _: sa.Connection) -> None:
        self._begun.set()
        await_only(self._release.wait())

    async def __aenter__(self) -> HeldWriter:
        await self._begun.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._release.set()
        await self._write


def add_in(number: int, transactions: set[int]) -> Callable[[sa.Connection], int]:
    """Add a number, and note the transaction that it is added in."""

    def statements(connection: sa.Connection) -> int:
        transactions.add(connection.execute(sa.text("SELECT txid_current()")).scalar_one())
        return add(number)(connection)

    return statements


# What every database promises.


async def test_a_write_is_there_when_it_returns(postgres_url: str) -> None:
    database = await open_database(postgres_url)
    assert await database.write(add(1)) == 1
    assert await database.read(numbers) == [1]
    await database.close()
    again = await open_database(postgres_url)
    assert await again.read(numbers) == [1]
    await again.close()


async def test_writes_that_wait_share_one_commit(database: PostgresDatabase) -> None:
    shared: set[int] = set()
    async with HeldWriter(database):
        calls = [add_in(number, shared) for number in range(16)]
        writes = [asyncio.create_task(database.write(call)) for call in calls]
        await asyncio.sleep(0)
    assert await asyncio.gather(*writes) == list(range(16))
    assert len(shared) == 1


async def test_a_write_that_fails_is_rolled_back_alone(database: PostgresDatabase) -> None:
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
    with pytest.raises(InvalidFieldError):
        await database.write(half)
    assert await database.read(numbers) == [1, 2, 3]


async def test_a_write_that_hides_an_error_of_the_database_fails(
    database: PostgresDatabase,
) -> None:
    def hide(connection: sa.Connection) -> None:
        add(2)(connection)
        with contextlib.suppress(sa.exc.IntegrityError):
            add(1)(connection)

    await database.write(add(1))
    with pytest.raises(RuntimeError, match="hid an error"):
        await database.write(hide)
    async with HeldWriter(database):
        writes = [asyncio.create_task(database.write(call)) for call in (hide, add(3))]
        await asyncio.sleep(0)
    failed, added = await asyncio.gather(*writes, return_exceptions=True)
    assert isinstance(failed, Exception)
    assert added == 3
    assert await database.read(numbers) == [1, 3]


async def test_writes_made_together_share_one_commit_and_have_their_own_results(
    database: PostgresDatabase,
) -> None:
    def bug(connection: sa.Connection) -> int:
        raise RuntimeError("bug")

    shared: set[int] = set()
    first, failed, last = await database.write_all([add_in(1, shared), bug, add_in(2, shared)])
    assert (first, last, len(shared)) == (1, 2, 1)
    assert isinstance(failed, RuntimeError)
    assert await database.write_all([]) == []
    assert await database.read(numbers) == [1, 2]


async def test_a_cancelled_caller_does_not_cancel_its_write(database: PostgresDatabase) -> None:
    async with HeldWriter(database):
        write = asyncio.create_task(database.write(add(1)))
        await asyncio.sleep(0)
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
    await database.write(add(2))
    assert await database.read(numbers) == [1, 2]


async def test_readers_see_the_last_commit_and_do_not_wait(database: PostgresDatabase) -> None:
    await database.write(add(1))
    async with HeldWriter(database):
        assert await database.read(numbers) == [1]


async def test_a_cancelled_reader_leaves_no_trace(database: PostgresDatabase) -> None:
    begun = asyncio.Event()

    def sleep(connection: sa.Connection) -> None:
        begun.set()
        connection.execute(sa.text("SELECT pg_sleep(600)"))

    for _ in range(6):  # more than there are sessions
        begun.clear()
        read = asyncio.create_task(database.read(sleep))
        await begun.wait()
        read.cancel()
        with pytest.raises(asyncio.CancelledError):
            await read
    assert await database.read(numbers) == []


async def test_a_read_is_one_state(database: PostgresDatabase) -> None:
    def twice(connection: sa.Connection) -> tuple[list[int], list[int]]:
        before = numbers(connection)
        await_only(database.write(add(1)))
        return before, numbers(connection)

    assert await database.read(twice) == ([], [])
    assert await database.read(numbers) == [1]


async def test_a_reader_can_not_write(database: PostgresDatabase) -> None:
    with pytest.raises(sa.exc.DBAPIError, match="read-only transaction"):
        await database.read(add(1))
    assert await database.read(numbers) == []


async def test_errors_do_not_carry_what_was_written(database: PostgresDatabase) -> None:
    await database.write(add(1))
    with pytest.raises(sa.exc.IntegrityError) as failure:
        await database.write(add(1, "secret prompt"))
    assert "secret" not in str(failure.value)


async def test_a_full_disk_is_typed_and_passes(database: PostgresDatabase) -> None:
    def full(connection: sa.Connection) -> None:
        add(2)(connection)
        raise_53100 = "DO $$ BEGIN RAISE EXCEPTION 'no space' USING ERRCODE = '53100'; END $$"
        connection.exec_driver_sql(raise_53100)

    pid = await database.write(lambda connection: connection.execute(sa.text(PID)).scalar_one())
    for group in ([full], [add(1), full]):
        for result in await database.write_all(group):
            assert isinstance(result, StorageFullError)
            assert "free space" in result.message
    assert await database.write(add(1)) == 1
    assert await database.read(numbers) == [1]
    # The session goes on, and with it the lock that it may hold.
    assert pid == await database.write(
        lambda connection: connection.execute(sa.text(PID)).scalar_one()
    )


async def test_what_waits_is_written_before_the_close(postgres_url: str) -> None:
    database = await open_database(postgres_url)
    writes = [asyncio.create_task(database.write(add(number))) for number in range(3)]
    await asyncio.sleep(0)
    await database.close()
    assert await asyncio.gather(*writes) == [0, 1, 2]
    with pytest.raises(StorageUnavailableError):
        await database.write(add(3))
    again = await open_database(postgres_url)
    assert await again.read(numbers) == [0, 1, 2]
    await again.close()


# Opening.


async def test_a_newer_schema_is_refused(postgres_url: str) -> None:
    await (await open_database(postgres_url, schema_version=2)).close()
    with pytest.raises(ConfigError, match="schema version 2, this release reads 1"):
        await open_database(postgres_url)


async def test_schemas_of_one_database_are_apart(postgres_url: str) -> None:
    first = await open_database(postgres_url, schema="first")
    second = await open_database(postgres_url, schema="second")
    await first.write(add(1))
    assert await second.read(numbers) == []
    await first.close()
    await second.close()


async def test_processes_that_start_together_create_the_tables_once(postgres_url: str) -> None:
    opened = await asyncio.gather(*(open_database(postgres_url) for _ in range(4)))
    await asyncio.gather(*(database.write(add(number)) for number, database in enumerate(opened)))
    assert await opened[0].read(numbers) == [0, 1, 2, 3]
    await asyncio.gather(*(database.close() for database in opened))


async def test_a_server_that_forgets_commits_is_refused(
    postgres: PostgresServer, postgres_url: str
) -> None:
    name = postgres_url.rpartition("/")[2]
    postgres.query(f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    with pytest.raises(ConfigError, match="synchronous_commit=off"):
        await open_database(postgres_url)


async def test_wrong_settings_are_told_at_once(postgres: PostgresServer) -> None:
    with pytest.raises(ConfigError, match="does not exist") as failure:
        await open_database(postgres.url_of("nowhere"))
    assert "password" not in str(failure.value)
    with pytest.raises(ConfigError, match="begins with postgresql"):
        await open_database("mysql://host/database")
    with pytest.raises(ConfigError, match="name of a schema"):
        await open_database(postgres.url, schema='pod"; DROP')


# Lost connections.


async def test_a_session_that_ends_before_the_commit_runs_again(
    database: PostgresDatabase, postgres: PostgresServer
) -> None:
    num_runs = 0

    def die_once(connection: sa.Connection) -> None:
        nonlocal num_runs
        num_runs += 1
        increment(connection)
        if num_runs == 1:
            pid = connection.execute(sa.text(PID)).scalar_one()
            postgres.query(f"SELECT pg_terminate_backend({pid}, 5000)")
        increment(connection)

    await database.write(start_counter)
    await database.write_all([increment, die_once, increment])
    assert num_runs == 2
    assert await database.read(counter) == 4


async def test_an_idle_session_that_ended_is_replaced(
    database: PostgresDatabase, postgres: PostgresServer, postgres_url: str
) -> None:
    await database.write(add(1))
    assert await database.read(numbers) == [1]
    name = postgres_url.rpartition("/")[2]
    postgres.query(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        f"WHERE datname = '{name}' AND pid <> pg_backend_pid()"
    )
    assert await database.read(numbers) == [1]
    assert await database.write(add(2)) == 2


@pytest.mark.parametrize("num_writes", [1, 3])
@pytest.mark.parametrize("lost", ["lose_request", "lose_answer"])
async def test_a_lost_commit_takes_place_once(
    postgres_url: str, lost: str, num_writes: int
) -> None:
    num_runs = 0

    def count(connection: sa.Connection) -> None:
        nonlocal num_runs
        num_runs += 1
        increment(connection)

    async with PostgresProxy(postgres_url) as proxy:
        database = await open_database(proxy.url)
        await database.write(start_counter)
        for _ in range(3):
            setattr(proxy, lost, True)
            await database.write_all([count] * num_writes)
        assert proxy.num_lost == 3
        assert await database.read(counter) == 3 * num_writes
        # A request that arrived is found done; one that did not runs again.
        assert num_runs == (1 if lost == "lose_answer" else 2) * 3 * num_writes
        await database.close()


async def test_a_silent_server_counts_as_gone(postgres_url: str) -> None:
    num_runs = 0

    def hang_once(connection: sa.Connection) -> None:
        nonlocal num_runs
        num_runs += 1
        increment(connection)
        if num_runs == 1:
            await_only(asyncio.get_running_loop().create_future())

    def sleep(connection: sa.Connection) -> None:
        connection.execute(sa.text("SET LOCAL statement_timeout = 0; "))
        connection.execute(sa.text("SELECT pg_sleep(600)"))

    database = await open_database(postgres_url, answer_timeout_s=3, reconnect_timeout_s=1)
    with pytest.raises(StorageUnavailableError):
        await database.read(sleep)
    with pytest.raises(StorageUnavailableError):
        await database.write(sleep)
    await database.close()


async def test_200_writes_survive_the_death_of_the_server(server: PostgresServer) -> None:
    database = await open_database(server.create_database())
    await database.write(start_counter)
    num_done = 0
    is_midway = asyncio.Event()

    async def work() -> None:
        nonlocal num_done
        for _ in range(20):
            await database.write(increment)
            num_done += 1
            if num_done == 60:
                is_midway.set()

    async with asyncio.TaskGroup() as workers:
        for _ in range(10):
            workers.create_task(work())
        await is_midway.wait()
        await in_thread(server.kill)
        assert num_done < 200
        await in_thread(server.start)
    assert await database.read(counter) == 200
    await database.close()


async def test_a_server_that_stays_away_is_told(server: PostgresServer) -> None:
    database = await open_database(server.create_database(), reconnect_timeout_s=3)
    await database.write(add(1))
    server.stop()
    with pytest.raises(StorageUnavailableError, match="nothing was written") as failure:
        await database.write(add(2))
    assert "password" not in str(failure.value)
    with pytest.raises(StorageUnavailableError):
        await database.read(numbers)
    server.start()
    assert await database.write(add(3)) == 3
    assert await database.read(numbers) == [1, 3]
    server.stop()
    await database.close()
    with pytest.raises(StorageUnavailableError):
        await open_database(server.url, reconnect_timeout_s=1)


# One process at a time.


async def test_a_second_holder_waits_for_the_first(postgres_url: str) -> None:
    first = await open_database(postgres_url, exclusive="scheduler")
    second = asyncio.create_task(open_database(postgres_url, exclusive="scheduler"))
    other = await open_database(postgres_url, exclusive="other")
    await other.close()
    await first.write(add(1))
    assert not second.done()
    await first.close()
    database = await second
    assert await database.read(numbers) == [1]
    await database.write(add(2))
    await database.close()


async def test_a_holder_that_lost_its_session_goes_on(postgres_url: str) -> None:
    lost = asyncio.Event()
    async with PostgresProxy(postgres_url) as proxy:
        database = await open_database(proxy.url, exclusive="scheduler", on_lost=lost.set)
        for number in range(3):
            await proxy.close()
            await proxy.open()
            assert await database.write(add(number)) == number
        await database.close()
    assert not lost.is_set()


@pytest.mark.parametrize("is_idle", [False, True])
async def test_a_holder_that_was_replaced_writes_nothing(postgres_url: str, is_idle: bool) -> None:
    lost = asyncio.Event()
    async with PostgresProxy(postgres_url) as proxy:
        zombie = await open_database(
            proxy.url, exclusive="scheduler", on_lost=lost.set, ping_interval_s=0.05
        )
        await zombie.write(add(1))
        await proxy.close()
        successor = await open_database(postgres_url, exclusive="scheduler")
        write: Awaitable[int] | None = None
        if not is_idle:
            write = asyncio.create_task(zombie.write(add(2)))
            await asyncio.sleep(0)
        await proxy.open()
        await lost.wait()
        if write is not None:
            with pytest.raises(StorageUnavailableError):
                await write
        with pytest.raises(StorageUnavailableError, match="must stop"):
            await zombie.write(add(3))
        with pytest.raises(StorageUnavailableError, match="must stop"):
            await zombie.read(numbers)
        await zombie.close()
        assert await successor.write(add(4)) == 4
        assert await successor.read(numbers) == [1, 4]
        await successor.close()
