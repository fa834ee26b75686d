"""What was done to the resources of a project can be listed, by its admins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import (
    Metadata,
    Rig,
    bearer,
    expect_rpc_error,
    new_id,
    running_rig,
)
from tests.support.pod_keys import pod

from tinsmith.v1 import audit_pb2, keys_pb2, scheduler_pb2
from tinsmith_runtime.errors import UnavailableError
from tinsmith_runtime.rpc.auth import ApiKey

Code = grpc.StatusCode


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url) as rig:
        await rig.register()
        yield rig


async def new_key(rig: Rig, project: str, role: str = "member") -> keys_pb2.Key:
    request = keys_pb2.CreateKeyRequest(
        parent=f"projects/{project}", request_id=new_id(), role=role
    )
    key: keys_pb2.Key = await rig.key_stub.CreateKey(request, metadata=rig.admin)
    return key


async def list_events(
    rig: Rig, project: str = "default", metadata: Metadata | None = None, **fields: Any
) -> list[audit_pb2.AuditEvent]:
    """Return all pages of a list."""
    request = scheduler_pb2.ListAuditEventsRequest(parent=f"projects/{project}", **fields)
    events: list[audit_pb2.AuditEvent] = []
    while True:
        answer = await rig.stub.ListAuditEvents(request, metadata=metadata or rig.admin, timeout=60)
        assert len(answer.events) <= (request.page_size or 100)
        events += answer.events
        request.page_token = answer.next_page_token
        if not answer.next_page_token:
            return events


def actions(events: list[audit_pb2.AuditEvent]) -> list[tuple[str, str]]:
    return [(event.action, event.resource) for event in events]


async def test_each_action_is_listed_once_under_the_project_of_its_resource(rig: Rig) -> None:
    admin = await new_key(rig, "b", "admin")
    user = await new_key(rig, "b")
    who = bearer(user.secret)
    session = await rig.session(who, "b")
    fields = {"request_id": new_id(), "training_run_id": "mine"}
    for _ in range(2):
        await rig.begin_run(who, session, **fields)
    run = f"{admin.name.partition('/keys')[0]}/trainingRuns/mine"
    await rig.wait(who, f"{run}/operations/create")
    for _ in range(2):
        await rig.delete_run(who, run)
        finish = scheduler_pb2.FinishSessionRequest(session=session)
        await rig.stub.FinishSession(finish, metadata=who)
    await rig.key_stub.RevokeKey(keys_pb2.RevokeKeyRequest(name=user.name), metadata=who)

    for metadata in (bearer(admin.secret), rig.admin):
        events = await list_events(rig, "b", metadata)
        assert actions(events) == [
            ("create_key", admin.name),
            ("create_key", user.name),
            ("create_session", session),
            ("create_run", run),
            ("delete_run", run),
            ("finish_session", session),
            ("revoke_key", user.name),
        ]
    operator, caller = ApiKey.parse(rig.admin_key).key_id, ApiKey.parse(user.secret).key_id
    assert [event.key_id for event in events] == [operator] * 2 + [caller] * 5
    assert await list_events(rig, "default") == []


async def test_what_failed_is_not_listed(rig: Rig) -> None:
    session = await rig.session(rig.admin)
    run = await rig.create_run(rig.admin, session)
    rig.trainer.release_errors = [UnavailableError("busy")]
    with pytest.raises(grpc.aio.AioRpcError):
        await rig.delete_run(rig.admin, run.name)
    with expect_rpc_error(Code.NOT_FOUND, reason="RUN_NOT_FOUND"):
        await rig.delete_run(rig.admin, "projects/default/trainingRuns/none")
    with expect_rpc_error(Code.NOT_FOUND, reason="MODEL_NOT_FOUND"):
        await rig.begin_run(rig.admin, session, base_model="none")
    assert actions(await list_events(rig)) == [
        ("create_session", session),
        ("create_run", run.name),
    ]


async def test_pages_and_windows(rig: Rig) -> None:
    names = [await rig.session(rig.admin) for _ in range(5)]
    events = await list_events(rig, page_size=2)
    assert [event.resource for event in events] == names
    second, fourth = events[1].time, events[3].time
    window = await list_events(rig, page_size=1, start_time=second, end_time=fourth)
    assert [event.resource for event in window] == names[1:3]
    assert await list_events(rig, end_time=events[0].time) == []
    request = scheduler_pb2.ListAuditEventsRequest(parent="projects/default", page_token="x")
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.stub.ListAuditEvents(request, metadata=rig.admin)


async def test_only_admins_of_the_project_read_them(rig: Rig) -> None:
    admin_of_b = bearer((await new_key(rig, "b", "admin")).secret)
    request = scheduler_pb2.ListAuditEventsRequest(parent="projects/default")
    for metadata in (await rig.user(), admin_of_b, pod("gateway")):
        with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
            await rig.stub.ListAuditEvents(request, metadata=metadata)
