from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import (
    BASE_MODEL,
    Metadata,
    Rig,
    expect_rpc_error,
    new_id,
    running_rig,
)
from tests.support.pod_keys import pod

from tinsmith.v1 import scheduler_pb2, workers_pb2

Code = grpc.StatusCode


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url) as rig:
        await rig.register()
        yield rig


async def create(
    rig: Rig, session: str, metadata: Metadata | None = None, **source: str
) -> scheduler_pb2.SamplingSession:
    request = scheduler_pb2.CreateSamplingSessionRequest(
        parent=session, **{"request_id": new_id(), **source}
    )
    answer: scheduler_pb2.SamplingSession = await rig.stub.CreateSamplingSession(
        request, metadata=metadata or rig.admin, timeout=5
    )
    return answer


async def get(
    rig: Rig, name: str, metadata: Metadata | None = None
) -> scheduler_pb2.SamplingSession:
    request = scheduler_pb2.GetSamplingSessionRequest(name=name)
    answer: scheduler_pb2.SamplingSession = await rig.stub.GetSamplingSession(
        request, metadata=metadata or pod("gateway"), timeout=5
    )
    return answer


async def test_base_model(rig: Rig) -> None:
    await rig.register_sampler()
    session = await rig.session(rig.admin)
    handle = await create(rig, session, base_model=BASE_MODEL)
    assert handle.name.startswith("projects/default/samplingSessions/")
    assert (handle.session, handle.base_model) == (session, BASE_MODEL)
    assert (list(handle.sampler_addresses), handle.trainer_address) == (["s:1"], "")
    assert (handle.checkpoint, handle.run) == ("", "")
    assert await get(rig, handle.name) == handle
    assert await get(rig, handle.name, rig.admin) == handle


async def test_a_chosen_id(rig: Rig) -> None:
    await rig.register_sampler()
    session = await rig.session(rig.admin)
    fields = {"base_model": BASE_MODEL, "sampling_session_id": "mine", "request_id": new_id()}
    handles = await asyncio.gather(*(create(rig, session, **fields) for _ in range(2)))
    assert {handle.name for handle in handles} == {"projects/default/samplingSessions/mine"}
    with expect_rpc_error(Code.ALREADY_EXISTS, reason="RESOURCE_ALREADY_EXISTS"):
        await create(rig, session, base_model=BASE_MODEL, sampling_session_id="mine")
    user = await rig.user("b")
    await create(
        rig, await rig.session(user, "b"), user, base_model=BASE_MODEL, sampling_session_id="mine"
    )
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await create(rig, session, base_model=BASE_MODEL, sampling_session_id="a/b")


async def test_run_and_checkpoint(rig: Rig) -> None:
    await rig.register_sampler()
    session = await rig.session(rig.admin)
    run = await rig.create_run(rig.admin, session)
    checkpoint = f"{run.name}/checkpoints/best"
    rig.trainer.checkpoints[checkpoint] = BASE_MODEL
    live = await create(rig, session, run=run.name)
    saved = await create(rig, session, checkpoint=checkpoint)
    assert (live.run, saved.checkpoint) == (run.name, checkpoint)
    for handle in (live, saved):
        assert handle.base_model == BASE_MODEL
        assert handle.trainer_address == rig.trainer.server.address
        assert await get(rig, handle.name) == handle
    with expect_rpc_error(Code.NOT_FOUND, reason="CHECKPOINT_NOT_FOUND"):
        await create(rig, session, checkpoint=f"{run.name}/checkpoints/none")
    with expect_rpc_error(Code.NOT_FOUND, reason="CHECKPOINT_NOT_FOUND"):
        await create(rig, session, checkpoint="projects/default/trainingRuns/x/checkpoints/a")
    with expect_rpc_error(Code.NOT_FOUND, reason="RUN_NOT_FOUND"):
        await create(rig, session, run="projects/default/trainingRuns/none")


async def test_addresses_follow_the_workers(rig: Rig) -> None:
    await rig.register_sampler(name="sampler-0", address="s:0")
    await rig.register_sampler(name="sampler-1", address="s:1")
    session = await rig.session(rig.admin)
    handle = await create(rig, session, base_model=BASE_MODEL)
    # All replicas serve it.
    assert handle.sampler_addresses == ["s:0", "s:1"]
    await rig.advance(20, keep=("sampler-1",))
    assert (await get(rig, handle.name)).sampler_addresses == ["s:1"]
    await rig.register_sampler(name="sampler-0", address="back:1")
    assert (await get(rig, handle.name)).sampler_addresses == ["back:1", "s:1"]
    await rig.restart()
    assert not (await get(rig, handle.name)).sampler_addresses


async def test_what_samplers_have_to_do_is_told_as_they_told_it(rig: Rig) -> None:
    await rig.register_sampler(name="sampler-0", address="s:0")
    await rig.register_sampler(name="sampler-1", address="s:1")
    handle = await create(rig, await rig.session(rig.admin), base_model=BASE_MODEL)
    assert not handle.sampler_loads
    told = scheduler_pb2.SamplerLoad(num_requests=1, num_sequences=2, num_tokens=3)
    beat = workers_pb2.HeartbeatWorkerRequest(name="workers/sampler-1", load=told)
    await rig.worker_stub.HeartbeatWorker(beat, metadata=pod("sampler"), timeout=5)
    rig.clock.now_s += 2
    (load,) = (await get(rig, handle.name)).sampler_loads
    assert (load.address, load.age.seconds) == ("s:1", 2)
    assert (load.num_requests, load.num_sequences, load.num_tokens) == (1, 2, 3)
    # A heartbeat without a load takes it back.
    beat.ClearField("load")
    await rig.worker_stub.HeartbeatWorker(beat, metadata=pod("sampler"), timeout=5)
    assert not (await get(rig, handle.name)).sampler_loads


async def test_no_sampler_at_the_moment(rig: Rig) -> None:
    session = await rig.session(rig.admin)
    with expect_rpc_error(Code.NOT_FOUND, reason="MODEL_NOT_FOUND"):
        await create(rig, session, base_model=BASE_MODEL + "x")
    await rig.register_sampler()
    await rig.advance(20)
    with expect_rpc_error(Code.UNAVAILABLE, reason="WORKER_UNAVAILABLE") as error:
        await create(rig, session, base_model=BASE_MODEL)
    assert error[0].retry_after_s


async def test_foreign_sources_look_missing(rig: Rig) -> None:
    await rig.register_sampler()
    session = await rig.session(rig.admin)
    run = await rig.create_run(rig.admin, session)
    checkpoint = f"{run.name}/checkpoints/best"
    rig.trainer.checkpoints[checkpoint] = BASE_MODEL
    other = await rig.user("b")
    b_session = await rig.session(other, "b")
    with expect_rpc_error(Code.NOT_FOUND, reason="RUN_NOT_FOUND"):
        await create(rig, b_session, other, run=run.name)
    with expect_rpc_error(Code.NOT_FOUND, reason="CHECKPOINT_NOT_FOUND"):
        await create(rig, b_session, other, checkpoint=checkpoint)
    with expect_rpc_error(Code.NOT_FOUND, reason="SESSION_NOT_FOUND"):
        await create(rig, session, other, base_model=BASE_MODEL)
    handle = await create(rig, session, run=run.name)
    with expect_rpc_error(Code.NOT_FOUND, reason="SAMPLING_SESSION_NOT_FOUND") as foreign:
        await get(rig, handle.name, other)
    missing = "projects/default/samplingSessions/none"
    with expect_rpc_error(Code.NOT_FOUND, reason="SAMPLING_SESSION_NOT_FOUND") as absent:
        await get(rig, missing, rig.admin)
    assert foreign[0].message.replace(handle.name, "") == absent[0].message.replace(missing, "")


async def test_create_is_answered_once(rig: Rig) -> None:
    await rig.register_sampler()
    session = await rig.session(rig.admin)
    identity = new_id()
    first = await create(rig, session, base_model=BASE_MODEL, request_id=identity)
    assert await create(rig, session, base_model=BASE_MODEL, request_id=identity) == first
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await create(rig, session, run="projects/default/trainingRuns/x", request_id=identity)
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await create(rig, session)


async def test_the_sampling_sessions_of_a_project_are_bounded(
    tmp_path: Path, database_url: str
) -> None:
    limits = {"max_sampling_sessions_per_project": 2}
    async with running_rig(tmp_path, database_url=database_url, **limits) as rig:
        await rig.register()
        await rig.register_sampler()
        sessions = [await rig.session(rig.admin) for _ in range(3)]
        for session in sessions[:2]:
            await create(rig, session, base_model=BASE_MODEL)
        with expect_rpc_error(Code.RESOURCE_EXHAUSTED, reason="LIMIT_EXCEEDED") as errors:
            await create(rig, sessions[2], base_model=BASE_MODEL)
        assert "finish a session" in errors[0].message
        finish = scheduler_pb2.FinishSessionRequest(session=sessions[0])
        await rig.stub.FinishSession(finish, metadata=rig.admin, timeout=60)
        await create(rig, sessions[2], base_model=BASE_MODEL)
