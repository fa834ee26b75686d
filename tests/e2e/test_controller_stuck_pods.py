"""A pod that stays in Terminating on a node that is there: its job ends without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Json, TestCluster
from tests.e2e.lab import Lab, start_lab, training

_NEVER_S = 3600.0
_TIMEOUT_S = 240.0
"""The driver's grace, the margin of a cluster, and a minute of each other pod's own."""


@pytest.fixture
def lab(resources: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A controller that gives pods a second to end in."""
    folder = tmp_path_factory.mktemp("lab")
    with (
        resources.namespace() as name,
        start_lab(resources, name, folder, termination_s=1) as lab,
    ):
        yield lab


def test_a_cancelled_job_ends_and_its_keys_are_revoked(lab: Lab) -> None:
    with lab.nodes(1, ending=lambda _: _NEVER_S):
        lab.jobs.create("stuck", training(scheduling={"preemptionGraceSeconds": 1}))
        lab.jobs.wait_phase("stuck", "Running")
        assert lab.good_keys("stuck")
        lab.jobs.patch("stuck", {"cancel": True})

        status = lab.jobs.wait_phase("stuck", "Cancelled", timeout_s=_TIMEOUT_S)

        assert not status.get("assignments")
        condition = _condition(status)
        assert condition["status"] == "True"
        assert condition["reason"] == "PodStuck"
        pods = lab.jobs.pods("stuck")
        assert pods
        for pod in pods:
            assert pod["metadata"]["deletionTimestamp"]
            assert pod["metadata"]["name"] in condition["message"]
        lab.cluster.wait_for(lambda: not lab.good_keys("stuck"), "the keys to be revoked")
        for pod in pods:
            lab.delete_now(pod)
        lab.cluster.wait_for(
            lambda: _condition(lab.jobs.status("stuck"))["status"] == "False", "the pods to be gone"
        )
        lab.check_log()


def _condition(status: Json) -> Json:
    [found] = [entry for entry in status["conditions"] if entry["type"] == "TerminationOverdue"]
    return dict(found)
