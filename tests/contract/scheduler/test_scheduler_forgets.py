"""The scheduler forgets what ended: sessions, rows of deleted runs, keys that are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.scheduler_fake_trainer import Metadata, Rig, bearer, new_id, running_rig
from tests.fakes.trainer_harness import refusal
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.v1 import job_pb2, keys_pb2, scheduler_pb2

_SWEEP_S = 601.0
_LIVES_ON = {"session_timeout_s": 1e9, "worker_timeout_s": 1e9}


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    settings = {"ended_retention_s": 0.001, **_LIVES_ON}
    async with running_rig(tmp_path, database_url=database_url, **settings) as rig:
        await rig.register()
        yield rig


async def swept(rig: Rig, call: Any, reason: str) -> None:
    """Let sweeps pass until a call is refused for a reason."""

    async def is_so() -> bool:
        rig.clock.now_s += _SWEEP_S
        return (await refusal(call())).reason == reason

    await eventually(is_so)


def job_keys(rig: Rig, **fields: Any) -> Any:
    return rig.jobs.ListJobKeys(
        job_pb2.ListJobKeysRequest(**fields), metadata=pod("controller"), timeout=5
    )


async def finished_session(rig: Rig, who: Metadata) -> str:
    session = await rig.session(who)
    request = scheduler_pb2.FinishSessionRequest(session=session)
    await rig.stub.FinishSession(request, metadata=who, timeout=60)
    return session


async def test_ended_sessions_and_deleted_runs_are_forgotten_live_ones_are_not(rig: Rig) -> None:
    who = await rig.user()
    live = await rig.session(who)
    kept = await rig.create_run(who, live, training_run_id="kept")
    gone = await rig.create_run(who, live, training_run_id="gone")
    await rig.delete_run(who, gone.name)
    assert (await refusal(rig.begin_run(who, live, training_run_id="gone"))).reason == (
        "RESOURCE_ALREADY_EXISTS"
    )
    ended = await finished_session(rig, who)

    async def renewed() -> bool:
        rig.clock.now_s += _SWEEP_S
        try:
            again = await rig.create_run(who, live, training_run_id="gone")
        except Exception:
            return False
        return again.name == gone.name

    await eventually(renewed)
    request = scheduler_pb2.HeartbeatSessionRequest(session=ended)
    await swept(
        rig,
        lambda: rig.stub.HeartbeatSession(request, metadata=who, timeout=60),
        "SESSION_NOT_FOUND",
    )
    assert (await rig.get_run(who, kept.name)).name == kept.name
    request = scheduler_pb2.HeartbeatSessionRequest(session=live)
    await rig.stub.HeartbeatSession(request, metadata=who, timeout=60)


async def test_refused_keys_are_forgotten_those_of_the_settings_stay_refused(rig: Rig) -> None:
    admin = rig.admin
    request = keys_pb2.CreateKeyRequest(
        parent="projects/default", request_id=new_id(), role="admin"
    )
    other = await rig.key_stub.CreateKey(request, metadata=admin, timeout=60)
    who = bearer(other.secret)
    bootstrap = f"projects/default/keys/{rig.admin_key.split('_')[1]}"
    for name in (
        (
            await rig.key_stub.CreateKey(
                keys_pb2.CreateKeyRequest(parent="projects/default", request_id=new_id()),
                metadata=admin,
                timeout=5,
            )
        ).name,
        bootstrap,
    ):
        await rig.key_stub.RevokeKey(keys_pb2.RevokeKeyRequest(name=name), metadata=who, timeout=60)

    async def listed() -> set[str]:
        answer = await rig.key_stub.ListKeys(
            keys_pb2.ListKeysRequest(parent="projects/default"), metadata=who, timeout=5
        )
        return {key.name for key in answer.keys}

    assert len(await listed()) == 3

    async def is_forgotten() -> bool:
        rig.clock.now_s += _SWEEP_S
        return await listed() == {other.name, bootstrap}

    await eventually(is_forgotten)
    await rig.restart()
    assert await listed() == {other.name, bootstrap}
    call = rig.key_stub.ListKeys(
        keys_pb2.ListKeysRequest(parent="projects/default"), metadata=admin, timeout=5
    )
    assert (await refusal(call)).reason == "KEY_REVOKED"


async def test_keys_of_jobs_are_listed_in_pages_without_the_revoked_ones(rig: Rig) -> None:
    jobs = [f"projects/default/trainingJobs/job-{number}" for number in range(6)]
    for number, job in enumerate(jobs):
        await rig.job_key(job, f"uid-{number}")
    page = await job_keys(rig)
    assert [key.job for key in page.keys] == jobs
    for key in page.keys[:4]:
        request = job_pb2.RevokeJobKeyRequest(name=key.name)
        await rig.jobs.RevokeJobKey(request, metadata=pod("controller"), timeout=60)
    first = await job_keys(rig, page_size=1)
    second = await job_keys(rig, page_size=1, page_token=first.next_page_token)
    found = [key.job for each in (first, second) for key in each.keys]
    assert (found, second.next_page_token) == (jobs[4:], "")
    assert [key.job for key in (await job_keys(rig, job=jobs[5])).keys] == [jobs[5]]
    assert not (await job_keys(rig, job=jobs[0])).keys
