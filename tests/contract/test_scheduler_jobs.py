"""Jobs at the scheduler: keys that report for one job, and what they report."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import (
    POD,
    POD_KEY,
    Metadata,
    Rig,
    expect_rpc_error,
    new_id,
    running_rig,
)

from tinsmith.v1 import job_pb2, scheduler_pb2
from tinsmith_runtime.auth import ApiKey, derive_job_key

Code = grpc.StatusCode
Report = job_pb2.TrainingJobReport
JOB = "projects/default/trainingJobs/j"
RUN = "projects/default/trainingRuns/r"


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url) as rig:
        yield rig


async def report(
    rig: Rig, who: Metadata, name: str = JOB, uid: str = "uid-1", **fields: Any
) -> job_pb2.TrainingJobReport:
    request = job_pb2.ReportTrainingJobRequest(name=name, uid=uid, **fields)
    answer: job_pb2.TrainingJobReport = await rig.jobs.ReportTrainingJob(
        request, metadata=who, timeout=5
    )
    return answer


async def read(rig: Rig, who: Metadata, uid: str = "") -> job_pb2.TrainingJobReport:
    request = job_pb2.GetTrainingJobReportRequest(name=JOB, uid=uid)
    answer: job_pb2.TrainingJobReport = await rig.jobs.GetTrainingJobReport(
        request, metadata=who, timeout=5
    )
    return answer


def test_the_key_of_a_job_follows_from_its_uid() -> None:
    key = derive_job_key("secret of the pods", "5a9d")
    assert ApiKey.parse(str(key)) == key == derive_job_key("secret of the pods", "5a9d")
    others = [derive_job_key("secret of the pods", "5a9e"), derive_job_key("another", "5a9d")]
    assert len({key.key_id, *(other.key_id for other in others)}) == 3
    assert len({key.secret, *(other.secret for other in others)}) == 3


async def test_reports_add_up(rig: Rig) -> None:
    driver = await rig.job_key(JOB)
    empty = await read(rig, driver)
    assert empty == Report(name=JOB, uid="uid-1")
    await report(rig, driver, step=1, max_steps=9, metrics={"loss": 2.0, "nan": float("nan")})
    saved = job_pb2.ReportedCheckpoint(name=f"{RUN}/checkpoints/c", step=1)
    await report(rig, driver, run=RUN, checkpoint=saved, state=b"where I am")
    await rig.restart()
    found = await read(rig, driver, uid="uid-1")
    assert (found.step, found.max_steps, dict(found.metrics)) == (1, 9, {"loss": 2.0})
    assert (found.run, found.checkpoint, found.state) == (RUN, saved, b"where I am")
    assert found.HasField("update_time")
    after = await report(rig, driver, step=2, outcome=Report.OUTCOME_SAVED)
    assert after.step_time.ToNanoseconds() >= found.step_time.ToNanoseconds()
    assert (after.outcome, after.state) == (Report.OUTCOME_SAVED, b"where I am")
    # A driver that starts again goes on: its first report takes the end back.
    assert (await report(rig, driver, step=2)).outcome == Report.OUTCOME_UNSPECIFIED


async def test_only_the_key_of_a_job_reports_for_it(rig: Rig) -> None:
    driver, user, foreigner = (
        await rig.job_key(JOB),
        await rig.user(),
        await rig.user("other"),
    )
    other = await rig.job_key("projects/default/trainingJobs/k", "uid-2")
    for who in (user, other):
        with expect_rpc_error(Code.PERMISSION_DENIED, reason="SCOPE_MISSING"):
            await report(rig, who, step=1)
    with expect_rpc_error(Code.NOT_FOUND, reason="KEY_NOT_FOUND"):
        await report(rig, POD, step=1)
    with expect_rpc_error(Code.NOT_FOUND, reason="JOB_NOT_FOUND"):
        await report(rig, foreigner, step=1)
    with expect_rpc_error(Code.NOT_FOUND, reason="JOB_NOT_FOUND"):
        await read(rig, foreigner)
    await report(rig, driver, step=1)
    assert (await read(rig, user)).step == 1


async def test_a_job_of_the_same_name_begins_anew(rig: Rig) -> None:
    old = await rig.job_key(JOB)
    await report(rig, old, step=5, state=b"old")
    new = await rig.job_key(JOB, "uid-2")
    assert await read(rig, new) == Report(name=JOB, uid="uid-2")
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="JOB_REPLACED"):
        await report(rig, old, step=6)
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="JOB_REPLACED"):
        await read(rig, old, uid="uid-1")
    # A controller that is late with the old one does not bring it back.
    await rig.job_key(JOB, "uid-1")
    await report(rig, new, uid="uid-2", step=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1},
        {"state": b"x" * (256 * 1024 + 1)},
        {"run": "r"},
        {"checkpoint": job_pb2.ReportedCheckpoint(name="c")},
        {"metrics": {str(n): 0.0 for n in range(65)}},
        {"outcome": 9},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_reports_that_are_refused(rig: Rig, fields: dict[str, Any]) -> None:
    driver = await rig.job_key(JOB)
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await report(rig, driver, **fields)


async def test_pods_read_many_reports_and_forget_them(rig: Rig) -> None:
    names = [f"projects/{project}/trainingJobs/j" for project in ("default", "b", "c")]
    for number, name in enumerate(names[:2]):
        driver = await rig.job_key(name, f"uid-{number}")
        await report(rig, driver, name, f"uid-{number}", step=number + 1, state=b"secret")
    request = job_pb2.ListTrainingJobReportsRequest(
        jobs=[job_pb2.JobIdentity(name=name, uid=f"uid-{n}") for n, name in enumerate(names)]
    )

    async def listed() -> dict[str, int]:
        answer = await rig.jobs.ListTrainingJobReports(request, metadata=POD, timeout=5)
        assert not any(found.state for found in answer.reports)
        return {found.name: found.step for found in answer.reports}

    assert await listed() == {names[0]: 1, names[1]: 2}
    for uid in ("uid-7", "uid-0", "uid-0"):
        forget = job_pb2.DeleteTrainingJobReportRequest(name=names[0], uid=uid)
        await rig.jobs.DeleteTrainingJobReport(forget, metadata=POD, timeout=5)
    assert await listed() == {names[1]: 2}


async def test_keys_of_jobs_are_the_pods_affair(rig: Rig) -> None:
    driver = await rig.job_key(JOB, pool="space.j")
    await rig.job_key(JOB, pool="space.j")
    key = derive_job_key(POD_KEY, "uid-1")
    name = f"projects/default/keys/{key.key_id}"
    listing = job_pb2.ListJobKeysRequest(page_size=1)
    (listed,) = (await rig.jobs.ListJobKeys(listing, metadata=POD, timeout=5)).keys
    assert (listed.name, listed.job, listed.uid, listed.pool) == (name, JOB, "uid-1", "space.j")
    caller = await rig.stub.GetCallerKey(
        scheduler_pb2.GetCallerKeyRequest(), metadata=driver, timeout=5
    )
    assert (caller.name, caller.pool, list(caller.scopes)) == (name, "space.j", ["user"])
    with expect_rpc_error(Code.ALREADY_EXISTS, reason="RESOURCE_ALREADY_EXISTS"):
        await rig.job_key("projects/default/trainingJobs/k", "uid-2", key=key)
    revoke = job_pb2.RevokeJobKeyRequest(name=name)
    for _ in range(2):
        assert (await rig.jobs.RevokeJobKey(revoke, metadata=POD, timeout=5)).revoked
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_REVOKED"):
        await report(rig, driver, step=1)
    assert not (await rig.jobs.ListJobKeys(listing, metadata=POD, timeout=5)).keys
    users = (
        await rig.stub.CreateKey(
            scheduler_pb2.CreateKeyRequest(parent="projects/default", request_id=new_id()),
            metadata=rig.admin,
            timeout=5,
        )
    ).name
    with expect_rpc_error(Code.NOT_FOUND, reason="KEY_NOT_FOUND"):
        await rig.jobs.RevokeJobKey(
            job_pb2.RevokeJobKeyRequest(name=users), metadata=POD, timeout=5
        )
    for method, request in (
        ("EnsureJobKey", job_pb2.EnsureJobKeyRequest()),
        ("RevokeJobKey", revoke),
        ("ListJobKeys", listing),
        ("ListTrainingJobReports", job_pb2.ListTrainingJobReportsRequest()),
        ("DeleteTrainingJobReport", job_pb2.DeleteTrainingJobReportRequest(name=JOB, uid="u")),
    ):
        with expect_rpc_error(Code.PERMISSION_DENIED, reason="SCOPE_MISSING"):
            await getattr(rig.jobs, method)(request, metadata=rig.admin, timeout=5)


async def test_a_deployment_without_jobs_says_so(rig: Rig) -> None:
    request = job_pb2.ListTrainingJobsRequest(parent="projects/default")
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="JOBS_DISABLED") as found:
        await rig.jobs.ListTrainingJobs(request, metadata=rig.admin, timeout=5)
    assert "job_launcher" in found[0].message
