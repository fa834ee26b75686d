from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from tinsmith_runtime.adapters import LoraConfig
from tinsmith_runtime.errors import (
    OutcomeUnknownError,
    RequestIdReusedError,
    StorageUnavailableError,
)
from tinsmith_runtime.records import ReleaseMode, RequestIdentity
from tinsmith_runtime.sql import Database, open_store
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.runs.run_creation import Creations
from tinsmith_scheduler.store.database import (
    REQUEST_RETENTION_S,
    answer_once,
    forget_requests,
    recall,
)
from tinsmith_scheduler.store.records import Run, RunState
from tinsmith_scheduler.store.tables import STORE

REQUEST = RequestIdentity("p", "id", "CreateSession", b"digest")

RUN = Run(
    name="projects/p/trainingRuns/r",
    project="p",
    state=RunState.CREATING,
    session="projects/p/sessions/s",
    base_model="tiny",
    adapter=LoraConfig(),
    display_name="",
    labels={},
    create_time_s=0.0,
)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = await open_store(STORE, tmp_path)
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


async def test_a_deletion_forgets_no_other_trainer(database: Database) -> None:
    """One that was asked first may hold the run; one that adopted it meanwhile does."""
    deleted = replace(RUN, state=RunState.ACTIVE, worker="second", epoch=2)

    def delete(connection: sa.Connection) -> set[tuple[str, int, ReleaseMode]]:
        run_store.insert_run(connection, replace(deleted, worker="third", epoch=3))
        run_store.owe_release(
            connection, replace(deleted, worker="first", epoch=1), ReleaseMode.DELETE
        )
        run_store.owe_release(connection, deleted, ReleaseMode.PARK)
        run_store.delete_run(connection, deleted)
        return {(r.worker, r.epoch, r.mode) for r in run_store.list_releases(connection)}

    assert await database.write(delete) == {
        ("first", 1, ReleaseMode.DELETE),
        ("third", 3, ReleaseMode.DELETE),
    }


async def test_a_creation_outlasts_an_outage_of_the_database(database: Database) -> None:
    outages = iter([StorageUnavailableError("away"), OutcomeUnknownError("lost")])

    class Placing:
        async def choose(self, *_: object) -> None:
            for outage in outages:
                raise outage

    creations = Creations(
        database,
        adoptions=Placing(),  # type: ignore[arg-type]
        trainers=None,  # type: ignore[arg-type]
        encode_error=lambda error: error.message.encode(),
        timeout_s=60.0,
        retry_s=0.0,
        clock=time.monotonic,
    )
    await database.write(lambda connection: run_store.insert_run(connection, RUN))
    creations.start(RUN)
    await creations.wait(RUN.name, timeout_s=20.0)
    found = await database.read(lambda connection: run_store.get_run(connection, RUN.name))
    assert found is not None
    assert found.state is RunState.CREATING
    assert next(outages, None) is None
