"""Runs of the past cost the scheduler little: they are counted, found and moved after live ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from tests.unit.scheduler.test_scheduler_store import RUN

from tinsmith_runtime.sql import Database, open_store
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.store.records import RunState, SessionState
from tinsmith_scheduler.store.tables import STORE, projects, runs, sessions

_NUM_PAST = 400
_LIVE = replace(
    RUN,
    name="projects/p/trainingRuns/live",
    session="projects/p/sessions/live",
    state=RunState.ACTIVE,
    worker="workers/t",
)


@pytest.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """A database with many runs of ended sessions, and one that goes on, made last."""
    url = "" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    database = await open_store(STORE, tmp_path, url)

    def fill(connection: sa.Connection) -> None:
        connection.execute(sa.insert(projects).values(project="p", create_time_s=0.0))
        names = [f"past-{number}" for number in range(_NUM_PAST)]
        for serial, name in enumerate([*names, "live"], 1):
            is_live = name == "live"
            state = SessionState.ACTIVE if is_live else SessionState.FINISHED
            connection.execute(
                sa.insert(sessions).values(
                    name=f"projects/p/sessions/{name}",
                    project="p",
                    state=state.value,
                    display_name="",
                    labels={},
                    client_version="",
                    create_time_s=0.0,
                    serial=serial,
                )
            )
            past = replace(
                _LIVE, name=f"projects/p/trainingRuns/{name}", session=f"projects/p/sessions/{name}"
            )
            run_store.insert_run(connection, past)
        connection.execute(sa.update(runs).values(incarnation="one", ledger="shared"))

    await database.write(fill)
    yield database
    await database.close()


async def test_live_runs_alone_are_counted(database: Database) -> None:
    assert await database.read(lambda c: run_store.count_project_runs(c, "p")) == 1
    assert await database.read(lambda c: run_store.count_project_runs(c, "q")) == 0
    assert await database.read(run_store.count_runs_by_worker) == {"workers/t": 1}


async def test_a_run_is_found_by_its_id(database: Database) -> None:
    [found] = await database.read(lambda c: run_store.list_by_id(c, "past-7"))
    assert found.name == "projects/p/trainingRuns/past-7"
    assert await database.read(lambda c: run_store.list_by_id(c, "past")) == []


async def test_live_runs_move_first(database: Database) -> None:
    moved = await database.write(lambda c: run_store.begin_moves(c, "workers/t", "one"))
    assert (len(moved), moved[0].name) == (_NUM_PAST + 1, _LIVE.name)
    assert [run.serial for run in moved[1:]] == sorted(run.serial for run in moved[1:])
    assert await database.read(run_store.list_moving) == moved


async def test_live_runs_are_counted_by_index(tmp_path: Path) -> None:
    database = await open_store(STORE, tmp_path)
    plans = {}
    for name, count in _counts().items():
        plans[name] = await database.read(count)
    await database.close()
    for name, plan in plans.items():
        assert all("SEARCH" in step or "USE TEMP" in step for step in plan), (name, plan)
        assert any("runs_by_session" in step for step in plan), (name, plan)


def _counts() -> dict[str, Callable[[sa.Connection], list[str]]]:
    def plan_of(call: Callable[[sa.Connection], Any]) -> Callable[[sa.Connection], list[str]]:
        def explain(connection: sa.Connection) -> list[str]:
            seen: list[tuple[str, Any]] = []

            def note(*event: Any) -> None:
                seen.append((event[2], event[3]))

            sa.event.listen(connection.engine, "before_cursor_execute", note)
            try:
                call(connection)
            finally:
                sa.event.remove(connection.engine, "before_cursor_execute", note)
            [(statement, parameters)] = seen
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            return [row[-1] for row in rows]

        return explain

    return {
        "of a project": plan_of(lambda c: run_store.count_project_runs(c, "p")),
        "by worker": plan_of(run_store.count_runs_by_worker),
    }
