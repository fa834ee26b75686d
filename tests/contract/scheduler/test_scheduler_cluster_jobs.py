"""Jobs as resources of a cluster, against the HTTP of an API server."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator

import pytest
from tests.fakes.kubernetes_api import FakeKubernetes
from tests.support.wait import eventually

from tinsmith.names import JobName
from tinsmith_jobs.naming import (
    EPOCH_LABEL,
    INDEX_LABEL,
    ROLE_LABEL,
    UID_LABEL,
    flat_role,
    pod_name,
)
from tinsmith_runtime.errors import (
    AlreadyExistsError,
    ClusterRefusedError,
    ClusterUnavailableError,
    InvalidFieldError,
    JobFinishedError,
    JobLogMissingError,
    JobNotFoundError,
    JobsDisabledError,
    TinsmithError,
)
from tinsmith_runtime.records import RequestIdentity
from tinsmith_scheduler.jobs.kubernetes_launcher import KubernetesLauncher
from tinsmith_scheduler.store.records import LogPosition, PageRequest

J = JobName("p", "j")
SPEC = {"method": {"type": "supervised"}, "model": {"name": "tiny"}}


def request(text: str = "first") -> RequestIdentity:
    digest = hashlib.sha256(text.encode()).digest()
    return RequestIdentity("p", "id", "CreateTrainingJob", digest)


@pytest.fixture
def cluster() -> Iterator[FakeKubernetes]:
    fake = FakeKubernetes()
    yield fake
    fake.stop()


@pytest.fixture
async def launcher(cluster: FakeKubernetes) -> AsyncIterator[KubernetesLauncher]:
    launcher = KubernetesLauncher({"p": "space"}, timeout_s=1.0, api=cluster.start())
    await launcher.start("")
    yield launcher
    await launcher.stop()


async def test_a_job_is_a_resource(launcher: KubernetesLauncher, cluster: FakeKubernetes) -> None:
    made = await launcher.create(J, SPEC, {"team": "a"}, request())
    assert (made.name, made.labels, made.spec) == (str(J), {"team": "a"}, SPEC)
    assert cluster.jobs["j"]["kind"] == "TrainingJob"
    again = await launcher.create(J, SPEC, {"team": "a"}, request())
    assert again.uid == made.uid
    with pytest.raises(AlreadyExistsError, match="exists"):
        await launcher.create(J, SPEC, {}, request("second"))
    assert (await launcher.set_suspended(J, suspended=True)).spec["suspend"] is True
    assert (await launcher.set_suspended(J, suspended=False)).spec["suspend"] is False
    assert (await launcher.cancel(J)).spec["cancel"] is True
    cluster.update("j", phase="Cancelled")
    assert (await launcher.cancel(J)).status["phase"] == "Cancelled"
    with pytest.raises(JobFinishedError):
        await launcher.set_suspended(J, suspended=True)
    await launcher.delete(J)
    await launcher.delete(J)
    with pytest.raises(JobNotFoundError):
        await launcher.get(J)


async def test_a_failed_job_is_tried_again(
    launcher: KubernetesLauncher, cluster: FakeKubernetes
) -> None:
    await launcher.create(J, SPEC, {}, request())
    assert not (await launcher.retry(J)).status, "it has not ended, so there is nothing to undo"
    cluster.update("j", phase="Failed", completionTime="2026-11-22T09:00:00Z")

    await launcher.retry(J)

    annotations = cluster.jobs["j"]["metadata"]["annotations"]
    assert annotations["tinsmith.dev/retry"] == "2026-11-22T09:00:00Z"
    assert len(annotations) == 2, "the one of its creation stays"
    cluster.update("j", phase="Succeeded")
    with pytest.raises(JobFinishedError, match="only one that failed"):
        await launcher.retry(J)


async def test_jobs_are_listed_in_pages(launcher: KubernetesLauncher) -> None:
    for name in "abc":
        await launcher.create(JobName("p", name), SPEC, {}, request(name))
    first, token = await launcher.list("p", PageRequest(2, ""))
    rest, end = await launcher.list("p", PageRequest(2, token))
    assert [JobName.parse(job.name).job for job in [*first, *rest]] == ["a", "b", "c"]
    assert (bool(token), end) == (True, "")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidFieldError),
        (401, ClusterRefusedError),
        (403, ClusterRefusedError),
        (410, InvalidFieldError),
        (422, InvalidFieldError),
        (404, JobsDisabledError),
        (500, ClusterUnavailableError),
        (429, ClusterUnavailableError),
    ],
)
async def test_what_the_api_server_says_is_typed(
    launcher: KubernetesLauncher,
    cluster: FakeKubernetes,
    status: int,
    error: type[TinsmithError],
) -> None:
    cluster.refusals.append((status, "spec.model is\nneeded"))
    with pytest.raises(error) as failure:
        await launcher.create(J, SPEC, {}, request())
    assert "\n" not in failure.value.message
    if status == 422:
        assert "spec.model is needed" in failure.value.message


async def test_an_api_server_that_hangs_or_is_gone_is_unavailable(
    launcher: KubernetesLauncher, cluster: FakeKubernetes
) -> None:
    cluster.delay_s = 2.0
    with pytest.raises(ClusterUnavailableError):
        await launcher.get(J)
    gone = FakeKubernetes()
    api = gone.start()
    gone.stop()
    lost = KubernetesLauncher({"p": "space"}, timeout_s=1.0, api=api)
    with pytest.raises(ClusterUnavailableError):
        await lost.get(J)


async def test_a_project_without_a_namespace_has_no_jobs(launcher: KubernetesLauncher) -> None:
    with pytest.raises(JobsDisabledError, match="job_namespaces"):
        await launcher.list("q", PageRequest(10, ""))


async def test_a_job_is_watched_to_its_end(
    launcher: KubernetesLauncher, cluster: FakeKubernetes
) -> None:
    made = await launcher.create(J, SPEC, {}, request())
    seen: list[str] = []

    async def watch() -> None:
        async for job in launcher.watch(J, made.revision):
            seen.append(str(job.status["phase"]))
            if job.status["phase"] == "Running":
                cluster.update("j", phase="Succeeded")

    async with asyncio.timeout(10):
        task = asyncio.create_task(watch())
        await eventually(lambda: any("watch=" in path for path in cluster.paths))
        assert not seen
        cluster.update("j", phase="Running")
        await task
    assert seen == ["Running", "Succeeded"]


def pod_of(uid: str, role: str, epoch: int) -> dict[str, object]:
    """Return the metadata of a pod as the controller makes it."""
    return {
        "name": pod_name("j", role, 0, epoch),
        "labels": {
            UID_LABEL: uid,
            ROLE_LABEL: flat_role(role),
            INDEX_LABEL: "0",
            EPOCH_LABEL: str(epoch),
        },
        "annotations": {ROLE_LABEL: role},
    }


async def test_logs_of_a_job_that_ended_are_those_of_its_last_pod(
    launcher: KubernetesLauncher, cluster: FakeKubernetes
) -> None:
    made = await launcher.create(J, SPEC, {}, request())
    agent = "agent/red/trainer"
    cluster.pods = [
        *(pod_of(made.uid, "driver", epoch) for epoch in (9, 10)),
        pod_of(made.uid, agent, 11),
        pod_of("of an earlier job", "driver", 12),
    ]
    for pod in cluster.pods:
        cluster.logs[pod["name"]] = [("2026-11-22T08:00:00.123456789Z", f"of {pod['name']}")]
    # Its places are given back by then.
    cluster.update("j", phase="Succeeded", assignments=[])

    for role, name in (("driver", "j-driver-0-e10"), (agent, "j-red-trainer-0-e11")):
        parts = launcher.read_log(J, LogPosition(role=role))
        assert [part.text async for part in parts] == [f"of {name}\n"]
    for role in ("trainer", "red-trainer", "driver,x=y"):
        with pytest.raises(JobLogMissingError, match=f"has no pod {role} 0; it is Succeeded"):
            await anext(launcher.read_log(J, LogPosition(role=role)))


async def test_logs_are_read_where_they_were_left(
    launcher: KubernetesLauncher, cluster: FakeKubernetes
) -> None:
    made = await launcher.create(J, SPEC, {}, request())
    with pytest.raises(JobLogMissingError, match="has no pod driver 0"):
        await anext(launcher.read_log(J, LogPosition()))
    cluster.update("j", phase="Running")
    cluster.pods = [pod_of(made.uid, "driver", 1)]
    with pytest.raises(JobLogMissingError, match="has no log yet"):
        await anext(launcher.read_log(J, LogPosition()))
    moments = [f"2026-11-22T08:00:0{second}.123456789Z" for second in range(4)]
    cluster.logs["j-driver-0-e1"] = [(moments[n], f"line {n}") for n in range(3)]

    async def read(**wanted: object) -> str:
        parts = launcher.read_log(J, LogPosition(**wanted))  # type: ignore[arg-type]
        return "".join([part.text async for part in parts])

    assert await read() == "line 0\nline 1\nline 2\n"
    assert await read(tail_lines=1) == "line 2\n"
    assert await read(position=moments[1]) == "line 2\n"
    with pytest.raises(InvalidFieldError):
        await read(position="7")
    async with asyncio.timeout(10):
        followed = launcher.read_log(J, LogPosition(follow=True, position=moments[2]))
        cluster.logs["j-driver-0-e1"].append((moments[3], "line 3"))
        assert (await anext(followed)).text == "line 3\n"
        # Another driver is made, whose container has not begun.
        cluster.pods.append(pod_of(made.uid, "driver", 2))
        later = asyncio.create_task(anext(followed))
        await eventually(lambda: any("/j-driver-0-e2/log" in path for path in cluster.paths))
        assert not later.done()
        cluster.logs["j-driver-0-e2"] = [("2026-11-22T08:00:09.123456789Z", "again")]
        assert (await later).text == "again\n"
        cluster.update("j", phase="Succeeded")
        assert [part async for part in followed] == []
