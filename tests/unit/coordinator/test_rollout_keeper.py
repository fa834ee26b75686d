"""Results of rollouts go when they are old, or when those of their project take too much."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tinsmith_coordinator.rollouts.keeper import RolloutKeeper
from tinsmith_coordinator.store.tables import STORE, rollout_batches, rollout_episodes
from tinsmith_runtime.sql import Database, open_store

NOW_S = 1000.0


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await open_store(STORE, tmp_path)
    yield opened
    await opened.close()


def keeper_of(database: Database, *, max_bytes: int = 100) -> RolloutKeeper:
    return RolloutKeeper(database, clock=lambda _: NOW_S, retention_s=60.0, max_bytes=max_bytes)


async def add(
    database: Database,
    name: str,
    *,
    end_time_s: float | None,
    num_bytes: int = 0,
    project: str = "p",
) -> None:
    """Keep a batch with one episode."""

    def write(connection: sa.Connection) -> None:
        empty = dict.fromkeys(("num_tasks", "num_episodes", "num_tokens", "revision"), 0)
        row = sa.insert(rollout_batches).values(
            batch_id=name,
            project=project,
            request_id=name,
            request_digest=b"",
            key_id="k",
            content=b"",
            groups={},
            state="completed",
            report={},
            taken={},
            num_bytes=num_bytes,
            deadline_s=0.0,
            create_time_s=0.0,
            end_time_s=end_time_s,
            **empty,
        )
        serial = connection.execute(row.returning(rollout_batches.c.serial)).scalar_one()
        connection.execute(
            sa.insert(rollout_episodes).values(
                serial=serial,
                revision=1,
                task=0,
                member=0,
                attempt=0,
                reason="",
                problem="",
                may_repeat=True,
                content=b"",
            )
        )

    await database.write(write)


async def left(database: Database) -> list[str]:
    """Return what is kept; the episodes are those of the batches."""

    def read(connection: sa.Connection) -> list[str]:
        query = sa.select(rollout_batches.c.serial, rollout_batches.c.batch_id)
        rows = connection.execute(query.order_by(rollout_batches.c.serial)).all()
        episodes = connection.execute(sa.select(rollout_episodes.c.serial)).scalars().all()
        assert sorted(episodes) == [row.serial for row in rows]
        return [row.batch_id for row in rows]

    return await database.read(read)


async def test_old_results_go_however_many_there_are(database: Database) -> None:
    for number in range(41):
        await add(database, f"old-{number}", end_time_s=NOW_S - 60.5)
    await add(database, "just-in-time", end_time_s=NOW_S - 60)
    await add(database, "playing", end_time_s=None)
    await keeper_of(database).tidy()
    assert await left(database) == ["just-in-time", "playing"]


async def test_of_too_many_bytes_the_oldest_go_first(database: Database) -> None:
    await add(database, "newest", end_time_s=NOW_S - 1, num_bytes=60)
    await add(database, "oldest", end_time_s=NOW_S - 5, num_bytes=30)
    # These take nothing, whatever their age, or are not done.
    await add(database, "empty", end_time_s=NOW_S - 9)
    await add(database, "playing", end_time_s=None, num_bytes=500)
    await add(database, "second", end_time_s=NOW_S - 3, num_bytes=40)
    await add(database, "of-another", end_time_s=NOW_S - 9, num_bytes=99, project="q")
    await keeper_of(database, max_bytes=130).tidy()
    assert len(await left(database)) == 6
    await keeper_of(database, max_bytes=99).tidy()
    assert await left(database) == ["newest", "empty", "playing", "of-another"]


async def test_a_single_byte_too_many_is_one(database: Database) -> None:
    await add(database, "one-byte", end_time_s=NOW_S - 1, num_bytes=1)
    await add(database, "empty", end_time_s=NOW_S - 2)
    await keeper_of(database, max_bytes=0).tidy()
    assert await left(database) == ["empty"]


async def test_no_time_limit_of_a_batch_is_the_keepers(database: Database) -> None:
    assert await keeper_of(database).expire() == float("inf")
