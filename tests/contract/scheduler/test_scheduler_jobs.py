"""Jobs at the scheduler: keys that report for one job, and what they report."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import (
    POD_KEY,
    Metadata,
    Rig,
    expect_rpc_error,
    new_id,
    running_rig,
)
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.v1 import job_pb2, keys_pb2
from tinsmith_runtime.rpc.auth import ApiKey, derive_job_key

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
    assert after.outcome == Report.OUTCOME_SAVED
    assert (await read(rig, driver)).state == b"where I am"
    assert not after.replay_diverged
    assert (await report(rig, driver, replay_diverged=True)).replay_diverged
    # A driver that starts again goes on: its first report takes the end back, and nothing else.
    assert (await report(rig, driver, step=2)).replay_diverged
    assert (await report(rig, driver, step=2)).outcome == Report.OUTCOME_UNSPECIFIED


async def test_a_key_that_is_asked_for_by_controllers_that_die_exists_once(rig: Rig) -> None:
    """A controller is killed at any point, and the next one asks for the same key."""
    key = derive_job_key(POD_KEY, "uid-1")
    request = job_pb2.EnsureJobKeyRequest(
        job=JOB, uid="uid-1", key_id=key.key_id, secret_sha256=key.secret_sha256
    )
    for pause_s in (0.0, 0.001, 0.002, 0.005, 0.01, 0.02):
        calls = [
            asyncio.ensure_future(
                rig.jobs.EnsureJobKey(request, metadata=pod("controller"), timeout=60)
            )
            for _ in range(5)
        ]
        await asyncio.sleep(pause_s)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    answers = await asyncio.gather(
        *(rig.jobs.EnsureJobKey(request, metadata=pod("controller"), timeout=60) for _ in range(5))
    )

    assert {answer.name for answer in answers} == {f"projects/default/keys/{key.key_id}"}
    await report(rig, (("authorization", f"Bearer {key}"),), step=1)


async def test_only_the_key_of_a_job_reports_for_it(rig: Rig) -> None:
    driver, user, foreigner = (
        await rig.job_key(JOB),
        await rig.user(),
        await rig.user("other"),
    )
    other = await rig.job_key("projects/default/trainingJobs/k", "uid-2")
    for who in (user, other):
        with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
            await report(rig, who, step=1)
    with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
        await report(rig, pod("controller"), step=1)
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
        answer = await rig.jobs.ListTrainingJobReports(
            request, metadata=pod("controller"), timeout=5
        )
        assert not any(found.state for found in answer.reports)
        return {found.name: found.step for found in answer.reports}

    assert await listed() == {names[0]: 1, names[1]: 2}
    # Ordered by name, whatever the order asked in: "b" comes before "default".
    request.page_size = 1
    assert await listed() == {names[1]: 2}
    answer = await rig.jobs.ListTrainingJobReports(request, metadata=pod("controller"), timeout=60)
    request.page_token = answer.next_page_token
    answer = await rig.jobs.ListTrainingJobReports(request, metadata=pod("controller"), timeout=60)
    assert [(found.name, found.step) for found in answer.reports] == [(names[0], 1)]
    assert not answer.next_page_token
    request.page_token = "another list's"
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await listed()
    request.page_size, request.page_token = 0, ""
    for uid in ("uid-7", "uid-0", "uid-0"):
        forget = job_pb2.DeleteTrainingJobReportRequest(name=names[0], uid=uid)
        await rig.jobs.DeleteTrainingJobReport(forget, metadata=pod("controller"), timeout=60)
    assert await listed() == {names[1]: 2}


async def test_keys_of_jobs_are_the_pods_affair(rig: Rig) -> None:
    driver = await rig.job_key(JOB, pool="space.j")
    await rig.job_key(JOB, pool="space.j")
    key = derive_job_key(POD_KEY, "uid-1")
    name = f"projects/default/keys/{key.key_id}"
    listing = job_pb2.ListJobKeysRequest(page_size=1)
    (listed,) = (await rig.jobs.ListJobKeys(listing, metadata=pod("controller"), timeout=60)).keys
    assert (listed.name, listed.job, listed.uid, listed.pool) == (name, JOB, "uid-1", "space.j")
    caller = await rig.key_stub.GetCallerKey(
        keys_pb2.GetCallerKeyRequest(), metadata=driver, timeout=5
    )
    assert (caller.name, caller.pool, caller.role) == (name, "space.j", "member")
    with expect_rpc_error(Code.ALREADY_EXISTS, reason="RESOURCE_ALREADY_EXISTS"):
        await rig.job_key("projects/default/trainingJobs/k", "uid-2", key=key)
    revoke = job_pb2.RevokeJobKeyRequest(name=name)
    for _ in range(2):
        assert (await rig.jobs.RevokeJobKey(revoke, metadata=pod("controller"), timeout=60)).revoked
    with expect_rpc_error(Code.UNAUTHENTICATED, reason="KEY_REVOKED"):
        await report(rig, driver, step=1)
    assert not (await rig.jobs.ListJobKeys(listing, metadata=pod("controller"), timeout=60)).keys
    users = (
        await rig.key_stub.CreateKey(
            keys_pb2.CreateKeyRequest(parent="projects/default", request_id=new_id()),
            metadata=rig.admin,
            timeout=5,
        )
    ).name
    with expect_rpc_error(Code.NOT_FOUND, reason="KEY_NOT_FOUND"):
        await rig.jobs.RevokeJobKey(
            job_pb2.RevokeJobKeyRequest(name=users), metadata=pod("controller"), timeout=5
        )
    for method, request in (
        ("EnsureJobKey", job_pb2.EnsureJobKeyRequest()),
        ("RevokeJobKey", revoke),
        ("ListJobKeys", listing),
        ("ListTrainingJobReports", job_pb2.ListTrainingJobReportsRequest()),
        ("DeleteTrainingJobReport", job_pb2.DeleteTrainingJobReportRequest(name=JOB, uid="u")),
    ):
        with expect_rpc_error(Code.PERMISSION_DENIED, reason="ROLE_MISSING"):
            await getattr(rig.jobs, method)(request, metadata=rig.admin, timeout=60)


async def test_a_deployment_without_jobs_says_so(rig: Rig) -> None:
    request = job_pb2.ListTrainingJobsRequest(parent="projects/default")
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="JOBS_DISABLED") as found:
        await rig.jobs.ListTrainingJobs(request, metadata=rig.admin, timeout=60)
    assert "job_launcher" in found[0].message


@pytest.fixture
async def local(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    settings = {"job_launcher": "local", "local_job_stop_timeout_s": 5.0}
    async with running_rig(tmp_path, database_url=database_url, **settings) as rig:
        await rig.register()
        yield rig


METHODS = [method.name for method in job_pb2.DESCRIPTOR.services_by_name["JobService"].methods]
TAKE_NOTHING = {"ListJobKeys", "ListTrainingJobReports"}
FOR_PODS = {"EnsureJobKey", "RevokeJobKey", "DeleteTrainingJobReport", *TAKE_NOTHING}


@pytest.mark.parametrize("method", METHODS)
async def test_malformed_and_empty_requests_are_typed(local: Rig, method: str) -> None:
    is_stream = method in ("WatchTrainingJob", "ReadTrainingJobLog")
    make = local.channel.unary_stream if is_stream else local.channel.unary_unary
    stub: Any = make(f"/tinsmith.v1.JobService/{method}", request_serializer=bytes)

    async def call(body: bytes) -> None:
        sent = stub(
            body, metadata=pod("controller") if method in FOR_PODS else local.admin, timeout=5
        )
        await (sent.read() if is_stream else sent)

    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="MALFORMED_REQUEST"):
        await call(b"\xff\xff\xff")
    if method not in TAKE_NOTHING:
        with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
            await call(b"")


def script(text: str) -> job_pb2.TrainingJob:
    """Return a job whose driver is a script of the shell."""
    spec = job_pb2.TrainingJobSpec(model=job_pb2.JobModel(name="tiny"))
    spec.method.type = "custom"
    spec.roles.driver.template.command.extend(["/bin/sh", "-c", text])
    return job_pb2.TrainingJob(spec=spec, labels={"team": "a"})


async def create(
    rig: Rig, who: Metadata, job: job_pb2.TrainingJob, name: str = "j", **fields: Any
) -> job_pb2.TrainingJob:
    request = job_pb2.CreateTrainingJobRequest(
        parent=fields.pop("parent", "projects/default"),
        request_id=fields.pop("request_id", new_id()),
        training_job_id=name,
        training_job=job,
    )
    answer: job_pb2.TrainingJob = await rig.jobs.CreateTrainingJob(
        request, metadata=who, timeout=60
    )
    return answer


async def watched(rig: Rig, who: Metadata, name: str = JOB) -> list[str]:
    """Return the phases that a job goes through until its end."""
    request = job_pb2.WatchTrainingJobRequest(name=name)
    stream = rig.jobs.WatchTrainingJob(request, metadata=who, timeout=20)
    return [job.status.phase async for job in stream]


async def log_of(
    rig: Rig, who: Metadata, **fields: Any
) -> list[job_pb2.ReadTrainingJobLogResponse]:
    request = job_pb2.ReadTrainingJobLogRequest(name=JOB, **fields)
    return [part async for part in rig.jobs.ReadTrainingJobLog(request, metadata=who, timeout=20)]


async def test_a_job_is_created_once_and_watched_to_its_end(local: Rig) -> None:
    user, request_id = await local.user(), new_id()
    made = await create(local, user, script("echo one; echo two"), request_id=request_id)
    assert (made.name, dict(made.labels)) == (JOB, {"team": "a"})
    again = await create(local, user, script("echo one; echo two"), request_id=request_id)
    assert again.uid == made.uid
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="REQUEST_ID_REUSED"):
        await create(local, user, script("echo three"), request_id=request_id)
    with expect_rpc_error(Code.ALREADY_EXISTS, reason="RESOURCE_ALREADY_EXISTS"):
        await create(local, user, script("echo three"))
    assert (await watched(local, user))[-1] == "Succeeded"
    parts = await log_of(local, user, follow=True)
    assert "".join(part.text for part in parts) == "one\ntwo\n"
    assert [part.text for part in await log_of(local, user, tail_lines=1)] == ["two\n"]
    assert [part.text for part in await log_of(local, user, position="4")] == ["two\n"]
    # Its key is good for nothing any more.
    assert not (
        await local.jobs.ListJobKeys(job_pb2.ListJobKeysRequest(), metadata=pod("controller"))
    ).keys
    for _ in range(2):
        delete = job_pb2.DeleteTrainingJobRequest(name=JOB)
        await local.jobs.DeleteTrainingJob(delete, metadata=user, timeout=60)
    with expect_rpc_error(Code.NOT_FOUND, reason="JOB_NOT_FOUND"):
        await watched(local, user)
    assert not list((local.settings["data_dir"] / "jobs").iterdir())


async def test_a_failed_job_is_tried_again_with_a_new_key(local: Rig) -> None:
    user = await local.user()
    job = script("echo $TINSMITH_API_KEY; test -e here || { touch here; exit 1; }")
    job.spec.backoff_limit = 0
    made = await create(local, user, job)
    assert (await watched(local, user))[-1] == "Failed"
    request = job_pb2.RetryTrainingJobRequest(name=JOB)

    again = await local.jobs.RetryTrainingJob(request, metadata=user, timeout=10)

    assert (again.uid, again.status.phase) == (made.uid, "Pending")
    assert (await watched(local, user))[-1] == "Succeeded"
    (part,) = await log_of(local, user)
    assert len(set(part.text.split())) == 2, "the first key was revoked"
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="JOB_FINISHED"):
        await local.jobs.RetryTrainingJob(request, metadata=user, timeout=10)


async def test_jobs_of_another_project_are_not_there(local: Rig) -> None:
    user, foreigner = await local.user(), await local.user("other")
    await create(local, user, script("sleep 30"))
    name = job_pb2.GetTrainingJobRequest(name=JOB)
    for method in ("Get", "Cancel", "Suspend", "Resume", "Retry", "Delete"):
        call = getattr(local.jobs, f"{method}TrainingJob")
        request = getattr(job_pb2, f"{method}TrainingJobRequest")(name=JOB)
        with expect_rpc_error(Code.NOT_FOUND, reason="JOB_NOT_FOUND"):
            await call(request, metadata=foreigner, timeout=60)
    with expect_rpc_error(Code.NOT_FOUND, reason="JOB_NOT_FOUND"):
        await watched(local, foreigner)
    with expect_rpc_error(Code.NOT_FOUND, reason="JOB_NOT_FOUND"):
        await log_of(local, foreigner)
    assert (await local.jobs.GetTrainingJob(name, metadata=user, timeout=60)).name == JOB


async def test_jobs_are_listed_newest_first(local: Rig) -> None:
    user = await local.user()
    for name in "abc":
        await create(local, user, script("true"), name)
    request = job_pb2.ListTrainingJobsRequest(parent="projects/default", page_size=2)
    found: list[str] = []
    while True:
        page = await local.jobs.ListTrainingJobs(request, metadata=user, timeout=60)
        found += [job.name.rpartition("/")[2] for job in page.training_jobs]
        request.page_token = page.next_page_token
        if not request.page_token:
            break
    assert found == ["c", "b", "a"]


@pytest.mark.parametrize("name", ["", "A", "1a", "a" * 41, "a-", "a.b"])
async def test_ids_that_can_not_begin_the_names_of_pods(local: Rig, name: str) -> None:
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await create(local, local.admin, script("true"), name)


async def test_what_has_no_json_is_refused(local: Rig) -> None:
    job = script("true")
    job.spec.method.parameters.update({"learning_rate": float("inf")})
    with expect_rpc_error(Code.INVALID_ARGUMENT, reason="INVALID_FIELD") as found:
        await create(local, local.admin, job)
    assert "no JSON" in found[0].message


REPORTING = (
    "import os, sys, urllib.request; "
    "assert os.environ['TINSMITH_JOB'].endswith('/j') and os.environ['TINSMITH_JOB_UID']; "
    "assert os.environ['TINSMITH_PROJECT'] == 'default'; "
    "print(os.environ['TINSMITH_ADDRESS'], os.environ['TINSMITH_JOB_METHOD'], sep='|', flush=True)"
)


async def test_a_driver_is_told_where_it_is(local: Rig) -> None:
    user = await local.user()
    await create(local, user, script(f'{sys.executable} -c "{REPORTING}"; sleep 30'))

    async def has_printed() -> bool:
        try:
            return bool(await log_of(local, user))
        except grpc.aio.AioRpcError:
            return False

    await eventually(has_printed)
    (part,) = await log_of(local, user)
    address, method = part.text.split("|")
    assert address == local.pod.address
    assert '"type": "custom"' in method
    (key,) = (
        await local.jobs.ListJobKeys(job_pb2.ListJobKeysRequest(), metadata=pod("controller"))
    ).keys
    assert (key.job, key.pool) == (JOB, "")
    with expect_rpc_error(Code.FAILED_PRECONDITION, reason="JOB_LOG_MISSING"):
        await log_of(local, user, role="trainer")
    cancel = job_pb2.CancelTrainingJobRequest(name=JOB)
    await local.jobs.CancelTrainingJob(cancel, metadata=user, timeout=60)
    async with asyncio.timeout(10):
        assert (await watched(local, user))[-1] == "Cancelled"
