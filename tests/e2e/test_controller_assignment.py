"""The controller against a real API server, with pods that run at once: assignment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import FakeNode, TestCluster
from tests.e2e.deployment import (
    Jobs,
    controller_process,
    gang,
    install_resources,
    scheduler_process,
)


@pytest.fixture
def jobs(cluster: TestCluster, namespace: str, tmp_path: Path) -> Iterator[Jobs]:
    """A controller with a scheduler, and the jobs of a namespace."""
    install_resources(cluster)
    with (
        scheduler_process(tmp_path) as scheduler,
        controller_process(cluster, tmp_path, namespace, scheduler.address) as controller,
    ):
        yield Jobs(cluster, namespace)
        assert controller.is_running, controller.log.read_text()[-2000:]


def test_a_gang_gets_nodes_and_runs(cluster: TestCluster, jobs: Jobs) -> None:
    nodes = [FakeNode(name=f"{jobs.namespace}-n{i}", gpus=8) for i in range(2)]
    with cluster.kubelet(nodes, instant=True):
        jobs.create("serving", gang(2, 8))
        status = jobs.wait_phase("serving", "Running")

        assert status["assignedGPUs"] == 16
        assert {entry["node"] for entry in status["assignments"]} == {n.name for n in nodes}
        assert {pod["spec"]["nodeName"] for pod in jobs.pods("serving")} == {n.name for n in nodes}


def test_a_gang_that_does_not_fit_holds_nothing_and_says_why(
    cluster: TestCluster, jobs: Jobs
) -> None:
    with cluster.kubelet([FakeNode(name=f"{jobs.namespace}-n0", gpus=8)], instant=True):
        jobs.create("first", gang(1, 6))
        jobs.wait_phase("first", "Running")
        jobs.create("second", gang(1, 4))
        jobs.wait_phase("second", "Queued")
        cluster.wait_for(lambda: "GPU" in jobs.status("second").get("waitingFor", ""))

        assert not jobs.pods("second")

        jobs.patch("first", {"cancel": True})
        jobs.wait_phase("first", "Cancelled")
        jobs.wait_phase("second", "Running")
