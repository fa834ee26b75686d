"""Manifests and statuses that mean harm: each says why it does not run, and a neighbour goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import ApiError, Json, Kubelet
from tests.e2e.hostile.manifests import Fate, Hostile, hostile
from tests.e2e.lab import Lab, training

_PATIENCE_S = 20.0
_MAX_EPOCH = 4
"""More assignments than this within a case are a loop."""


@pytest.fixture(scope="module")
def kubelet(lab: Lab) -> Iterator[Kubelet]:
    """Nodes for all cases, and a neighbour that is to run through all of them."""
    with lab.nodes(2) as kubelet:
        lab.jobs.create("neighbour", training(trainers=2, gpus=2))
        before = lab.jobs.wait_phase("neighbour", "Running")
        yield kubelet
        after = lab.jobs.status("neighbour")
        assert after["phase"] == "Running"
        assert after["assignments"] == before["assignments"]
        lab.check_log()


@pytest.mark.parametrize("case", list(hostile()), ids=lambda case: case.name)
def test_a_hostile_manifest_says_why_it_does_not_run(
    lab: Lab, kubelet: Kubelet, case: Hostile
) -> None:
    name = case.job or case.name
    manifest = {
        "apiVersion": "tinsmith.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, **case.metadata},
        "spec": case.spec,
    }
    if problem := _refusal(lab, manifest):
        assert Fate.REFUSED in case.fates, problem
        assert 400 <= problem.status < 500
        return
    try:
        fate, sentence, status = _fate(lab, name)
        assert fate in case.fates, (sentence, status)
        assert fate in (Fate.RUNS, Fate.COLLECTED) or sentence
        assert case.word in sentence
        assert status.get("epoch", 0) < _MAX_EPOCH
        lab.check_log()
    finally:
        lab.cluster.api.delete(lab.jobs.url(name))
        lab.cluster.wait_for(lambda: _sweep(lab, name))


def test_a_status_that_somebody_forged_does_no_harm(lab: Lab, kubelet: Kubelet) -> None:
    lab.jobs.create("forged", training(gpus=2))
    lab.jobs.wait_phase("forged", "Running")
    victim = lab.jobs.pods("neighbour")[0]["metadata"]
    for status in (
        {"assignments": None, "phase": "Running", "epoch": -5},
        {
            "assignments": [
                {"pod": victim["name"], "role": "trainer", "index": 0, "node": "nowhere"},
                {"pod": "../..", "role": "x", "index": -1, "gpus": 10**6, "node": lab.node(0)},
            ]
        },
        {"phase": "Queued", "assignedTime": None, "stopTime": "0001-01-01T00:00:00Z"},
        {"startTime": "9999-12-31T23:59:59Z", "assignedTime": "9999-12-31T23:59:59Z"},
        {"refusals": [{"node": "x"}, {"node": lab.node(0), "time": "9999-12-31T23:59:59Z"}]},
        {"preemptedBy": "a/b/c/d"},
        {"preemptedBy": "TrainingJob/x/y"},
        {"epoch": 2**62, "restartCount": 2**31 - 1},
    ):
        lab.cluster.api.patch(lab.jobs.url("forged", "status"), {"status": status})
        time.sleep(0.3)
        lab.check_log()
    assert lab.jobs.status("neighbour")["phase"] == "Running"
    lab.cluster.api.delete(lab.jobs.url("forged"))
    lab.cluster.wait_for(lambda: _sweep(lab, "forged"))


def test_a_job_that_changes_its_mind_all_the_time_comes_to_rest(lab: Lab, kubelet: Kubelet) -> None:
    lab.jobs.create("fickle", training(gpus=2))
    for number in range(20):
        lab.jobs.patch("fickle", {"suspend": number % 2 == 0})
    lab.jobs.wait_phase("fickle", "Running")
    lab.jobs.patch("fickle", {"suspend": True, "cancel": True})
    lab.jobs.wait_phase("fickle", "Cancelled")
    lab.jobs.patch("fickle", {"suspend": False, "cancel": False})
    time.sleep(0.5)
    assert lab.jobs.status("fickle")["phase"] == "Cancelled"
    assert not lab.jobs.pods("fickle")


def _refusal(lab: Lab, manifest: Json) -> ApiError | None:
    """Create a job; return why the API server does not want it."""
    try:
        lab.cluster.api.create(lab.jobs.url(), manifest)
    except ApiError as error:
        return error
    return None


def _fate(lab: Lab, name: str) -> tuple[Fate, str, Json]:
    """Return what becomes of a job, with its sentence and status."""
    end_s = time.monotonic() + _PATIENCE_S
    while True:
        job = lab.cluster.api.find(lab.jobs.url(name))
        if job is None:
            return Fate.COLLECTED, "", {}
        status = job.get("status", {})
        phase, waiting_for = status.get("phase"), status.get("waitingFor", "")
        if phase == "Running":
            return Fate.RUNS, "", status
        if phase == "Failed":
            return Fate.FAILED, status["failure"]["message"], status
        if phase == "Queued" and waiting_for and "next assignment" not in waiting_for:
            return Fate.WAITS, waiting_for, status
        assert time.monotonic() < end_s, status
        time.sleep(0.05)


def _sweep(lab: Lab, name: str) -> bool:
    """Delete what the cluster's collector would, by and by; say whether nothing was left."""
    pods = [pod for pod in lab.jobs.pods() if pod["metadata"]["name"].startswith(f"{name}-")]
    for pod in pods:
        lab.delete_now(pod)
    return not pods
