"""Clients that vanished make room for new runs; those that are heard of keep theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import sqlalchemy as sa
from tests.fakes.scheduler_fake_trainer import Rig, expect_rpc_error, running_rig

from tinsmith.v1 import scheduler_pb2
from tinsmith_scheduler.runs import run_store

LIMIT = 3
SILENT_S = 25
"""Two heartbeats were missed, and the life of a session is not over."""


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url, max_runs_per_project=LIMIT) as rig:
        await rig.register(max_runs=LIMIT)
        yield rig


async def heartbeat(rig: Rig, session: str) -> None:
    request = scheduler_pb2.HeartbeatSessionRequest(session=session)
    await rig.stub.HeartbeatSession(request, metadata=rig.admin, timeout=60)


async def test_the_longest_silent_run_makes_room(rig: Rig) -> None:
    sessions = [await rig.session(rig.admin) for _ in range(LIMIT)]
    idle = await rig.session(rig.admin)
    for session in sessions:
        await rig.create_run(rig.admin, session)
    await rig.advance(5)
    for session in sessions[1:]:
        await heartbeat(rig, session)
    await rig.advance(SILENT_S)
    new = await rig.session(rig.admin)
    await rig.create_run(rig.admin, new)
    with expect_rpc_error(grpc.StatusCode.FAILED_PRECONDITION, reason="SESSION_FINISHED"):
        await heartbeat(rig, sessions[0])
    # Those that were silent for a shorter time, or hold nothing, go on.
    for session in (*sessions[1:], idle):
        await heartbeat(rig, session)


async def test_where_there_is_room_runs_are_counted_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = run_store.count_project_runs
    counted: list[int] = []

    def note(connection: sa.Connection, project: str) -> int:
        counted.append(count(connection, project))
        return counted[-1]

    monkeypatch.setattr(run_store, "count_project_runs", note)
    await rig.create_run(rig.admin, await rig.session(rig.admin))
    assert counted == [0]


async def test_runs_whose_clients_are_heard_of_refuse(rig: Rig) -> None:
    sessions = [await rig.session(rig.admin) for _ in range(LIMIT)]
    for session in sessions:
        await rig.create_run(rig.admin, session)
    await rig.advance(SILENT_S)
    for session in sessions:
        await heartbeat(rig, session)
    new = await rig.session(rig.admin)
    with expect_rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="LIMIT_EXCEEDED"):
        await rig.begin_run(rig.admin, new)


async def test_a_session_that_is_asked_for_a_run_is_not_ended_for_it(rig: Rig) -> None:
    session = await rig.session(rig.admin)
    for _ in range(LIMIT):
        await rig.create_run(rig.admin, session)
    await rig.advance(SILENT_S)
    with expect_rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="LIMIT_EXCEEDED"):
        await rig.begin_run(rig.admin, session)
    await heartbeat(rig, session)
