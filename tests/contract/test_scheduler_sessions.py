from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import (
    POD,
    Metadata,
    Rig,
    eventually,
    expect_rpc_error,
    new_id,
    running_rig,
)

from tinsmith.v1 import scheduler_pb2
from tinsmith_runtime.errors import UnavailableError

Code = grpc.StatusCode
Session = scheduler_pb2.Session


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url) as rig:
        yield rig


def create(project: str = "default", **fields: Any) -> scheduler_pb2.CreateSessionRequest:
    fields = {"request_id": new_id(), **fields}
    return scheduler_pb2.CreateSessionRequest(parent=f"projects/{project}", **fields)


async def heartbeat(
    rig: Rig, session: str, metadata: Metadata | None = None
) -> scheduler_pb2.Session:
    request = scheduler_pb2.HeartbeatSessionRequest(session=session)
    answer: scheduler_pb2.Session = await rig.stub.HeartbeatSession(
        request, metadata=metadata or rig.admin, timeout=5
    )
    return answer


async def finish(rig: Rig, session: str) -> scheduler_pb2.Session:
    request = scheduler_pb2.FinishSessionRequest(session=session, outcome="success")
    answer: scheduler_pb2.Session = await rig.stub.FinishSession(
        request, metadata=rig.admin, timeout=5
    )
    return answer


async def is_finished(rig: Rig, session: str) -> bool:
    """Say whether a session ended, without keeping it alive."""
    try:
        await rig.begin_run(rig.admin, session, base_model="none")
    except grpc.aio.AioRpcError as error:
        return error.code() is Code.FAILED_PRECONDITION
    raise AssertionError("no trainer serves this model")


async def test_session_life(rig: Rig) -> None:
    request = create(display_name="mine", labels={"a": "b"})
    session = await rig.stub.CreateSession(request, metadata=rig.admin)
    assert session.state == Session.STATE_ACTIVE
    assert (session.display_name, dict(session.labels)) == ("mine", {"a": "b"})
    assert session.heartbeat_interval.seconds == 10
    assert session.heartbeat_timeout.seconds == 60
    assert await heartbeat(rig, session.name) == session
    for _ in range(2):
        assert (await finish(rig, session.name)).state == Session.STATE_FINISHED
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="SESSION_FINISHED"):
        await heartbeat(rig, session.name)


async def test_create_is_answered_once(rig: Rig) -> None:
    request = create(display_name="one", labels={"b": "2", "a": "1"})
    first, second = await asyncio.gather(
        *(rig.stub.CreateSession(request, metadata=rig.admin) for _ in range(2))
    )
    assert first == second
    await rig.restart()
    assert await rig.stub.CreateSession(request, metadata=rig.admin) == first
    request.display_name = "two"
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await rig.stub.CreateSession(request, metadata=rig.admin)


async def test_request_ids_of_projects_do_not_meet(rig: Rig) -> None:
    user = await rig.user("b")
    request = create()
    first = await rig.stub.CreateSession(request, metadata=rig.admin)
    request.parent = "projects/b"
    assert (await rig.stub.CreateSession(request, metadata=user)).name != first.name


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": ""},
        {"request_id": "not-a-uuid"},
        {"display_name": "x" * 1025},
        {"display_name": "zero\0"},
        {"client_version": "zero\0"},
        {"labels": {str(number): "" for number in range(65)}},
        {"labels": {"a": "x" * 1025}},
    ],
    ids=[
        *("no-id", "bad-id", "long-name", "zero-in-name", "zero-in-version"),
        *("many-labels", "long-label"),
    ],
)
async def test_invalid_fields(rig: Rig, fields: dict[str, Any]) -> None:
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.stub.CreateSession(create(**fields), metadata=rig.admin)


async def test_foreign_session_looks_missing(rig: Rig) -> None:
    user = await rig.user("b")
    session = await rig.session(rig.admin)
    with expect_rpc_error(Code.NOT_FOUND, reason="RESOURCE_NOT_FOUND"):
        await rig.stub.CreateSession(create(), metadata=user)
    with expect_rpc_error(Code.NOT_FOUND, reason="SESSION_NOT_FOUND") as foreign:
        await heartbeat(rig, session, user)
    missing = "projects/default/sessions/ses-000000000000"
    with expect_rpc_error(Code.NOT_FOUND, reason="SESSION_NOT_FOUND") as absent:
        await heartbeat(rig, missing)
    assert foreign[0].message.replace(session, "") == absent[0].message.replace(missing, "")


async def test_lost_session_expires_and_parks_its_runs(rig: Rig) -> None:
    await rig.register()
    await rig.register_sampler()
    lost, kept = await rig.session(rig.admin), await rig.session(rig.admin)
    run = await rig.create_run(rig.admin, lost)
    request = scheduler_pb2.CreateSamplingSessionRequest(
        parent=lost, request_id=new_id(), run=run.name
    )
    handle = await rig.stub.CreateSamplingSession(request, metadata=rig.admin)
    await rig.advance(59)
    await heartbeat(rig, kept)
    await rig.advance(2)
    await eventually(lambda: is_finished(rig, lost))
    assert (await finish(rig, lost)).state == Session.STATE_EXPIRED
    await eventually(lambda: rig.trainer.parked == [run.name])
    with expect_rpc_error(Code.NOT_FOUND, reason="SAMPLING_SESSION_NOT_FOUND"):
        await rig.stub.GetSamplingSession(
            scheduler_pb2.GetSamplingSessionRequest(name=handle.name), metadata=POD
        )
    await heartbeat(rig, kept)
    # The run outlives its session.
    assert (await rig.get_run(rig.admin, run.name)).state == scheduler_pb2.TrainingRun.STATE_ACTIVE


async def test_restart_gives_sessions_one_timeout(rig: Rig) -> None:
    session = await rig.session(rig.admin)
    rig.clock.now_s += 59
    await rig.restart()
    rig.clock.now_s += 59
    await asyncio.sleep(0.1)  # Several rounds of the reaper, which must not end it.
    await heartbeat(rig, session)
    rig.clock.now_s += 61
    await eventually(lambda: is_finished(rig, session))


async def test_parking_is_repeated_until_the_trainer_confirms(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    run = await rig.create_run(rig.admin, session)
    rig.trainer.release_errors = [UnavailableError("busy")] * 3
    await finish(rig, session)
    await rig.restart()
    await asyncio.sleep(0.05)
    assert rig.trainer.parked == []
    await rig.register()
    await eventually(lambda: rig.trainer.parked == [run.name])
    assert rig.trainer.release_errors == []
    await asyncio.sleep(0.1)
    assert rig.trainer.parked == [run.name]
