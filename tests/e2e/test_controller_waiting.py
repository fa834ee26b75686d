"""What a job waits for, and which job gives way to which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Json, TestCluster
from tests.e2e.history import History
from tests.e2e.kueue import install_kueue, playing_kueue
from tests.e2e.lab import Lab, pool, start_lab, training
from tests.fakes.kueue_admitter import FakeQueue

_PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture(scope="module")
def queues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operators' file, with the one queue that jobs are in by default."""
    target = tmp_path_factory.mktemp("queues") / "queues.toml"
    target.write_text("[queues.default]\n")
    return target


@pytest.fixture(scope="module")
def lab(
    resources: TestCluster, tmp_path_factory: pytest.TempPathFactory, queues: Path
) -> Iterator[Lab]:
    """A controller with queues."""
    folder = tmp_path_factory.mktemp("lab")
    with (
        resources.namespace() as name,
        start_lab(resources, name, folder, queues_path=queues, kueue=True) as lab,
    ):
        yield lab


@pytest.fixture(scope="module")
def urgent(cluster: TestCluster) -> Iterator[str]:
    """A PriorityClass above that of jobs without one."""
    name = "test-urgent"
    _make_priority(cluster, name, 1000)
    yield name
    cluster.api.delete(f"{_PRIORITIES}/{name}")


def test_a_higher_priority_gets_the_nodes_once_the_driver_has_saved(lab: Lab, urgent: str) -> None:
    def ending(pod: Json) -> float:
        return 1.0 if pod["metadata"]["labels"].get("tinsmith.dev/role") == "driver" else 0.0

    with (
        lab.nodes(2, ending=ending) as kubelet,
        History(lab.cluster, [lab.namespace]) as history,
    ):
        lab.jobs.create("modest", training(trainers=2, gpus=8))
        first = lab.jobs.wait_phase("modest", "Running")
        lab.jobs.create(
            "urgent", training(trainers=2, gpus=8, scheduling={"priorityClassName": urgent})
        )
        status = lab.jobs.wait_phase("modest", "Preempting")
        assert status["preemptedBy"].endswith("/urgent")
        lab.jobs.wait_phase("urgent", "Running")
        lab.jobs.wait_phase("modest", "Queued")
        lab.waits("modest", "GPU")
        lab.end(kubelet, "urgent", "driver", 0)
        again = lab.jobs.wait_phase("modest", "Running")
        assert again["epoch"] > first["epoch"]
        assert again.get("restartCount", 0) == 0
    _check_order(history, "modest")
    assert not history.violations()


def test_a_job_that_may_not_be_preempted_is_waited_for(lab: Lab, urgent: str) -> None:
    with lab.nodes(1) as kubelet:
        lab.jobs.create("firm", training(gpus=8, scheduling={"preemptionPolicy": "Never"}))
        lab.jobs.wait_phase("firm", "Running")
        lab.jobs.create("eager", training(gpus=8, scheduling={"priorityClassName": urgent}))
        lab.waits("eager", "GPU")
        assert lab.jobs.status("firm")["phase"] == "Running"
        lab.end(kubelet, "firm", "driver", 0)
        lab.jobs.wait_phase("eager", "Running")


def test_a_priority_class_that_is_missing_is_waited_for(lab: Lab) -> None:
    with lab.nodes(1):
        lab.jobs.create("ranked", training(scheduling={"priorityClassName": "test-later"}))
        lab.waits("ranked", "test-later", "does not exist")
        assert not lab.jobs.pods("ranked")
        _make_priority(lab.cluster, "test-later", 5)
        try:
            lab.jobs.wait_phase("ranked", "Running")
        finally:
            lab.cluster.api.delete(f"{_PRIORITIES}/test-later")


def test_a_queue_that_does_not_exist_is_waited_for(lab: Lab, queues: Path) -> None:
    with lab.nodes(1):
        lab.jobs.create("lined-up", training(scheduling={"queueName": "research"}))
        lab.waits("lined-up", "queue", "research")
        assert not lab.jobs.pods("lined-up")
        queues.write_text("[queues.default]\n[queues.research]\nmax_gpus = 4\n")
        lab.jobs.wait_phase("lined-up", "Running")
        lab.jobs.create("over", training(gpus=4, scheduling={"queueName": "research"}))
        lab.waits("over", "research", "4")


def test_a_job_in_a_pool_waits_for_it_and_has_a_driver_alone(lab: Lab) -> None:
    spec = training()
    del spec["model"], spec["roles"]["trainer"]
    with lab.nodes(1):
        lab.jobs.create("guest", {**spec, "poolRef": {"name": "shared"}})
        lab.waits("guest", "TrainerPool shared", "does not exist")
        lab.jobs.create("shared", pool(1), kind="TrainerPool")
        lab.jobs.wait_phase("guest", "Running")
        assert {entry["role"] for entry in lab.jobs.status("guest")["assignments"]} == {"driver"}
        [key] = lab.good_keys("guest")
        assert not key.pool  # it reaches what all share


def test_a_job_is_left_to_who_manages_it(lab: Lab) -> None:
    with lab.nodes(1):
        lab.jobs.create("theirs", training(managedBy="example.com/other"))
        lab.jobs.create("ours", training())
        lab.jobs.wait_phase("ours", "Running")
        assert not lab.jobs.status("theirs")
        assert not lab.jobs.pods("theirs")


def test_a_job_of_kueue_starts_when_kueue_says_so(lab: Lab) -> None:
    install_kueue(lab.cluster)
    flavor: Json = {"metadata": {"name": "e2e-any"}, "spec": {}}
    queues = {"team": FakeQueue(quotas={"e2e-any": {}})}
    quota = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "8"}
    with lab.nodes(1), playing_kueue(lab.cluster, lab.namespace, queues, [flavor]) as kueue:
        spec = training(scheduling={"queueName": "nobody-has-this"})
        kueue.submit("queued", "team", spec)
        lab.jobs.wait_phase("queued", "Suspended", timeout_s=60.0)
        lab.waits("queued", "Kueue", "insufficient unused quota")
        kueue.admitter.queues["team"] = FakeQueue(quotas={"e2e-any": quota})
        lab.jobs.wait_phase("queued", "Running")


def _make_priority(cluster: TestCluster, name: str, value: int) -> None:
    manifest = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": value,
    }
    cluster.api.create(_PRIORITIES, manifest)


def _check_order(history: History, job: str) -> None:
    """Check that no trainer of a job was told to go before its driver was gone."""
    drivers: dict[str, bool] = {}
    for moment, _ in history.moments():
        for pods in moment.pods.values():
            mine = [pod for pod in pods.values() if pod.name.startswith(f"{job}-")]
            if any(pod.role == "trainer" and pod.is_deleting for pod in mine):
                drivers |= {pod.name: pod.is_live for pod in mine if pod.role == "driver"}
                break
        if drivers:
            break
    assert not any(drivers.values()), drivers
