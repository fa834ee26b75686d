from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import (
    Metadata,
    Rig,
    expect_rpc_error,
    new_id,
    running_rig,
)
from tests.support.metrics import metric
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.v1 import scheduler_pb2, trainer_pb2
from tinsmith_runtime.errors import RunNotFoundError, UnavailableError

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


async def get(rig: Rig, name: str, metadata: Metadata | None = None) -> scheduler_pb2.Session:
    request = scheduler_pb2.GetSessionRequest(name=name)
    answer: scheduler_pb2.Session = await rig.stub.GetSession(
        request, metadata=metadata or rig.admin, timeout=5
    )
    return answer


async def test_a_session_names_what_was_created_in_it(rig: Rig) -> None:
    await rig.register()
    await rig.register_sampler()
    session, other = await rig.session(rig.admin), await rig.session(rig.admin)
    runs = [await rig.create_run(rig.admin, session) for _ in range(3)]
    await rig.create_run(rig.admin, other)
    await rig.delete_run(rig.admin, runs[1].name)
    handles = []
    # Chosen so that the order of the names is not that of their creation.
    for chosen_id in ("z", "m", "a"):
        request = scheduler_pb2.CreateSamplingSessionRequest(
            parent=session, request_id=new_id(), base_model="tiny", sampling_session_id=chosen_id
        )
        handles.append((await rig.stub.CreateSamplingSession(request, metadata=rig.admin)).name)
    found = await get(rig, session)
    assert found.state == Session.STATE_ACTIVE
    assert list(found.training_runs) == [runs[0].name, runs[2].name]
    assert list(found.sampling_sessions) == handles
    assert not (await heartbeat(rig, session)).training_runs
    finished = await finish(rig, session)
    assert finished.outcome == "success"
    await rig.restart()
    found = await get(rig, session)
    assert (found.state, found.outcome) == (Session.STATE_FINISHED, "success")
    assert list(found.training_runs) == [runs[0].name, runs[2].name]
    assert not found.sampling_sessions
    with expect_rpc_error(Code.NOT_FOUND, reason="SESSION_NOT_FOUND"):
        await get(rig, session, await rig.user("b"))
    with expect_rpc_error(Code.NOT_FOUND, reason="SESSION_NOT_FOUND"):
        await get(rig, "projects/default/sessions/none")


async def test_sessions_are_listed_in_pages_newest_first(rig: Rig) -> None:
    user = await rig.user("b")
    names = [await rig.session(rig.admin) for _ in range(5)]
    foreign = await rig.session(user, "b")
    await finish(rig, names[1])
    request = scheduler_pb2.ListSessionsRequest(parent="projects/default", page_size=2)
    found: list[scheduler_pb2.Session] = []
    while True:
        answer = await rig.stub.ListSessions(request, metadata=rig.admin)
        assert len(answer.sessions) <= 2
        found += answer.sessions
        request.page_token = answer.next_page_token
        if not answer.next_page_token:
            break
        # What is created meanwhile does not move the pages.
        await rig.session(rig.admin)
    assert [session.name for session in found] == names[::-1]
    assert found[-2].state == Session.STATE_FINISHED
    own = scheduler_pb2.ListSessionsRequest(parent="projects/b")
    assert [s.name for s in (await rig.stub.ListSessions(own, metadata=user)).sessions] == [foreign]
    with expect_rpc_error(Code.NOT_FOUND, reason="RESOURCE_NOT_FOUND"):
        await rig.stub.ListSessions(request, metadata=user)
    own.page_token = "nonsense"
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await rig.stub.ListSessions(own, metadata=user)


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
            scheduler_pb2.GetSamplingSessionRequest(name=handle.name), metadata=pod("gateway")
        )
    await heartbeat(rig, kept)
    # The run outlives its session.
    assert (await rig.get_run(rig.admin, run.name)).state == scheduler_pb2.TrainingRun.STATE_ACTIVE


async def resume(
    rig: Rig, session: str, metadata: Metadata | None = None
) -> scheduler_pb2.ResumeSessionResponse:
    request = scheduler_pb2.ResumeSessionRequest(session=session)
    answer: scheduler_pb2.ResumeSessionResponse = await rig.stub.ResumeSession(
        request, metadata=metadata or rig.admin, timeout=5
    )
    return answer


def a_status(run: str) -> trainer_pb2.RunStatus:
    waiting = trainer_pb2.PendingOperation(sequence_number=6, kind="optim_step")
    return trainer_pb2.RunStatus(
        run=run,
        version=2,
        next_sequence_number=7,
        num_pending_operations=1,
        pending_operations=[waiting],
        latest_revision=5,
    )


@pytest.mark.parametrize("has_expired", [False, True], ids=["active", "expired"])
async def test_a_session_is_resumed_with_its_runs(rig: Rig, has_expired: bool) -> None:
    await rig.register()
    session, other = await rig.session(rig.admin), await rig.session(rig.admin)
    first = await rig.create_run(rig.admin, session)
    second = await rig.create_run(rig.admin, session)
    deleted = await rig.create_run(rig.admin, session)
    await rig.delete_run(rig.admin, deleted.name)
    await rig.create_run(rig.admin, other)
    rig.trainer.statuses[first.name] = a_status(first.name)
    if has_expired:
        await rig.advance(61)
        await eventually(lambda: is_finished(rig, session))
        await eventually(lambda: len(rig.trainer.parked) == 3)
    answer = await resume(rig, session)
    assert answer.session.state == Session.STATE_ACTIVE
    assert answer.session.heartbeat_interval.seconds == 10
    assert [each.run.name for each in answer.runs] == [first.name, second.name]
    assert answer.runs[0].run.trainer_address == rig.trainer.server.address
    assert answer.runs[0].status == a_status(first.name)
    assert answer.runs[1].status.next_sequence_number == 1
    assert await resume(rig, session) == answer
    # It lives as long as any other one, and things are created in it.
    await rig.advance(50)
    assert (await heartbeat(rig, session)).state == Session.STATE_ACTIVE
    await rig.create_run(rig.admin, session)
    await rig.restart()
    assert (await heartbeat(rig, session)).state == Session.STATE_ACTIVE


async def test_a_session_that_was_finished_is_not_resumed(rig: Rig) -> None:
    session = await rig.session(rig.admin)
    await finish(rig, session)
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="SESSION_FINISHED"):
        await resume(rig, session)
    assert (await finish(rig, session)).state == Session.STATE_FINISHED
    user = await rig.user("b")
    for name in (session, "projects/b/sessions/ses-000000000000"):
        with expect_rpc_error(Code.NOT_FOUND, reason="SESSION_NOT_FOUND"):
            await resume(rig, name, user)


async def test_a_run_whose_trainer_is_away_is_named_and_the_session_goes_on(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    run = await rig.create_run(rig.admin, session)
    await rig.advance(61)
    await eventually(lambda: is_finished(rig, session))
    rig.trainer.resume_errors = [UnavailableError("busy"), RunNotFoundError("not yet")]
    for _ in range(2):
        with expect_rpc_error(Code.UNAVAILABLE, reason="WORKER_UNAVAILABLE") as errors:
            await resume(rig, session)
        assert errors[0].metadata["run"] == run.name
        assert errors[0].retry_after_s is not None
    assert (await heartbeat(rig, session)).state == Session.STATE_ACTIVE
    assert [each.run.name for each in (await resume(rig, session)).runs] == [run.name]
    # No word of the trainer at all: the scheduler was restarted and it has not come back.
    await rig.restart()
    with expect_rpc_error(Code.UNAVAILABLE, reason="WORKER_UNAVAILABLE"):
        await resume(rig, session)
    await rig.register()
    assert (await resume(rig, session)).runs[0].run.name == run.name


async def test_a_run_that_is_being_placed_is_waited_for(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    rig.trainer.gate.clear()
    operation = await rig.begin_run(rig.admin, session)
    with expect_rpc_error(Code.UNAVAILABLE, reason="WORKER_UNAVAILABLE"):
        await resume(rig, session)
    rig.trainer.gate.set()
    await rig.wait(rig.admin, operation.name)
    assert len((await resume(rig, session)).runs) == 1


async def test_a_resumed_session_is_not_parked_after_all(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    await rig.create_run(rig.admin, session)
    await rig.restart()  # The trainer is not back, so that the parking stays owed.
    rig.clock.now_s += 61
    await eventually(lambda: is_finished(rig, session))
    with expect_rpc_error(Code.UNAVAILABLE, reason="WORKER_UNAVAILABLE"):
        await resume(rig, session)
    await rig.register()
    await resume(rig, session)
    await rig.reap()
    assert rig.trainer.parked == []


async def test_a_run_is_parked_whose_session_ended_while_it_was_created(rig: Rig) -> None:
    await rig.register()
    session = await rig.session(rig.admin)
    rig.trainer.gate.clear()
    operation = await rig.begin_run(rig.admin, session)
    await eventually(lambda: len(rig.trainer.adopt_calls) == 1)
    await finish(rig, session)
    rig.trainer.gate.set()
    await rig.wait(rig.admin, operation.name)
    [name] = rig.trainer.adopted
    await eventually(lambda: rig.trainer.parked == [name])


async def test_a_run_is_parked_whose_trainer_restarted_while_its_session_ended(rig: Rig) -> None:
    await rig.register(incarnation="one", ledger="shared")
    session = await rig.session(rig.admin)
    run = await rig.create_run(rig.admin, session)
    # The session ends while the run is on its way to the next process of the trainer.
    rig.trainer.gate.clear()
    await rig.register(incarnation="two", ledger="shared")
    await eventually(lambda: len(rig.trainer.adopt_calls) == 2)
    assert (await rig.get_run(rig.admin, run.name)).state == scheduler_pb2.TrainingRun.STATE_MOVING
    with expect_rpc_error(Code.UNAVAILABLE, reason="WORKER_UNAVAILABLE") as errors:
        await resume(rig, session)
    assert errors[0].metadata["run"] == run.name
    await finish(rig, session)
    await rig.reap()
    assert rig.trainer.parked == []
    rig.trainer.gate.set()
    await eventually(lambda: rig.trainer.parked == [run.name])
    # A round that finds nothing to release asks for nothing again.
    await eventually(lambda: metric("tinsmith_scheduler_pending_releases") == 0)
    assert rig.trainer.parked == [run.name]


async def test_restart_gives_sessions_one_timeout(rig: Rig) -> None:
    session = await rig.session(rig.admin)
    rig.clock.now_s += 59
    await rig.restart()
    rig.clock.now_s += 59
    await rig.reap()
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
    await rig.reap()
    assert rig.trainer.parked == []
    await rig.register()
    await eventually(lambda: rig.trainer.parked == [run.name])
    assert rig.trainer.release_errors == []
    # A round that finds nothing to release asks for nothing again.
    await eventually(lambda: metric("tinsmith_scheduler_pending_releases") == 0)
    assert rig.trainer.parked == [run.name]


async def test_the_sessions_of_a_project_are_bounded(tmp_path: Path, database_url: str) -> None:
    limits = {"max_sessions_per_project": 2}
    async with running_rig(tmp_path, database_url=database_url, **limits) as rig:
        first = create()
        session = await rig.stub.CreateSession(first, metadata=rig.admin)
        await rig.stub.CreateSession(create(), metadata=rig.admin)
        with expect_rpc_error(Code.RESOURCE_EXHAUSTED, reason="LIMIT_EXCEEDED") as errors:
            await rig.stub.CreateSession(create(), metadata=rig.admin)
        assert "finish one" in errors[0].message
        assert await rig.stub.CreateSession(first, metadata=rig.admin) == session
        other = await rig.user("other")
        await rig.stub.CreateSession(create("other"), metadata=other)
        await finish(rig, session.name)
        await rig.stub.CreateSession(create(), metadata=rig.admin)
