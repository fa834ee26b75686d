"""Commits that wait for a standby, and writes that go on with the one that was promoted."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.postgres import PostgresServer, new_server
from tests.support.postgres_notes import (
    counter,
    in_thread,
    increment,
    open_database,
    start_counter,
)

from tinsmith_runtime.errors import (
    OutcomeUnknownError,
    StorageUnavailableError,
)

IN_SYNC_WAIT = "SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.fixture
def pair() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """A primary and its synchronous standby."""
    primary = new_server()
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir=primary.folder.parent))
    try:
        standby = primary.make_standby(folder)
        yield primary, standby
        standby.remove()
    finally:
        primary.remove()
        shutil.rmtree(folder, ignore_errors=True)


async def test_writes_go_on_with_the_promoted_standby(
    pair: tuple[PostgresServer, PostgresServer],
) -> None:
    primary, standby = pair
    # The standby comes first in the URL: which server takes writes is found out.
    hosts = f"127.0.0.1:{standby.port},127.0.0.1:{primary.port}"
    url = primary.url.replace(f"127.0.0.1:{primary.port}", hosts)
    database = await open_database(f"{url}?target_session_attrs=read-write")
    await database.write(start_counter)
    assert await database.read(counter) == 0
    is_midway = asyncio.Event()
    num_done = 0

    async def work() -> None:
        nonlocal num_done
        for _ in range(10):
            await database.write(increment)
            num_done += 1
            acknowledged = num_done
            assert await database.read(counter) >= acknowledged
            if acknowledged == 30:
                is_midway.set()

    async with asyncio.TaskGroup() as workers:
        for _ in range(8):
            workers.create_task(work())
        await is_midway.wait()
        await in_thread(primary.kill)
        await in_thread(standby.promote)
    assert await database.read(counter) == 80
    await database.close()


async def test_a_commit_that_the_standby_lacks_is_not_acknowledged(
    pair: tuple[PostgresServer, PostgresServer],
) -> None:
    primary, standby = pair
    database = await open_database(primary.url)
    await database.write(start_counter)
    standby.stop()
    write = asyncio.create_task(database.write(increment))
    await in_thread(primary.wait_for, IN_SYNC_WAIT)
    # Cancelled, the commit stands on the primary alone, and says so in a warning.
    canceled = primary.query(
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    )
    assert canceled == "t"
    # What waits for the standby now is the confirmation.
    await in_thread(
        primary.wait_for,
        "SELECT count(*) = 1 FROM pg_stat_activity "
        "WHERE wait_event = 'SyncRep' AND query LIKE 'INSERT%RETURNING%'",
    )
    assert not write.done()
    await in_thread(standby.start)
    await write
    assert await database.read(counter) == 1
    await database.close()


async def test_an_outcome_that_stays_unknown_is_told_as_such(
    pair: tuple[PostgresServer, PostgresServer],
) -> None:
    primary, standby = pair
    database = await open_database(primary.url, answer_timeout_s=3, reconnect_timeout_s=1)
    await database.write(start_counter)
    standby.stop()
    with pytest.raises(OutcomeUnknownError, match="send the same request again"):
        await database.write(increment)
    await in_thread(standby.start)
    while True:
        with contextlib.suppress(StorageUnavailableError, OutcomeUnknownError):
            await database.write(increment)
            break
    # The first one took place when the standby came back; it was never called a failure.
    assert await database.read(counter) >= 2
    await database.close()
