from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tinsmith_runtime.errors import RequestIdReusedError
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.records import RequestIdentity
from tinsmith_scheduler.store import (
    REQUEST_RETENTION_S,
    answer_once,
    forget_requests,
    open_database,
    recall,
)

REQUEST = RequestIdentity("p", "id", "CreateSession", b"digest")


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = await open_database(tmp_path)
    yield database
    await database.close()


async def test_answer_is_kept_for_more_than_a_day(database: Database) -> None:
    answers = iter([b"one", b"two"])

    def create(_: sa.Connection) -> bytes:
        return next(answers)

    assert REQUEST_RETENTION_S > 24 * 3600
    for now_s in (0.0, 24 * 3600.0):
        await database.write(lambda connection: forget_requests(connection, now_s=now_s))  # noqa: B023
        assert await answer_once(database, REQUEST, create, now_s=now_s) == b"one"
    await database.write(
        lambda connection: forget_requests(connection, now_s=REQUEST_RETENTION_S + 1)
    )
    assert await answer_once(database, REQUEST, create, now_s=0.0) == b"two"


async def test_failed_creation_keeps_no_answer(database: Database) -> None:
    def refuse(_: sa.Connection) -> bytes:
        raise RequestIdReusedError("for example")

    with pytest.raises(RequestIdReusedError):
        await answer_once(database, REQUEST, refuse, now_s=0.0)
    assert await database.read(lambda connection: recall(connection, REQUEST)) is None
