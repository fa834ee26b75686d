"""Jobs in a queue of Kueue on a real API server: they train, give way, go on and end.

Kueue itself is played by `tests.fakes.kueue_admitter`, which follows the protocol of its sources.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.cluster import FakeNode, Json, Kubelet, TestCluster, path
from tests.e2e.kueue import KUEUE, FakeKueue, install_kueue, playing_kueue
from tests.e2e.training import TrainingDeployment, process_nodes, training_deployment
from tests.fakes.chart_harness import ROOT
from tests.fakes.kueue_admitter import FakeQueue, condition_of, is_true

_TRAINING_S = 300.0
_STEPS = 12
_QUEUE = "team-a"
_FLAVOR = "e2e-fast"
_KIND = "example.com/kueue-kind"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def nodes(cluster: TestCluster) -> Iterator[Kubelet]:
    """Nodes of two kinds; the queue has quota of one of them."""
    nodes = [
        FakeNode(name=f"kueue-{kind}-{number}", gpus=2, labels={_KIND: kind})
        for kind in ("slow", "fast")
        for number in range(2)
    ]
    with process_nodes(cluster, nodes) as kubelet:
        yield kubelet


@pytest.fixture(scope="module")
def deployment(
    cluster: TestCluster, nodes: Kubelet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainingDeployment]:
    """A deployment whose operators use Kueue, with the rights that the chart gives it then."""
    install_kueue(cluster)
    with (
        cluster.namespace() as namespace,
        training_deployment(
            cluster, namespace, tmp_path_factory.mktemp("kueue"), has_kueue=True
        ) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def kueue(cluster: TestCluster, deployment: TrainingDeployment) -> Iterator[FakeKueue]:
    """Kueue, with quota for one job."""
    flavor = {"metadata": {"name": _FLAVOR}, "spec": {"nodeLabels": {_KIND: "fast"}}}
    quota = {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": "2"}
    queues = {_QUEUE: FakeQueue(quotas={_FLAVOR: quota})}
    with playing_kueue(cluster, deployment.jobs.namespace, queues, [flavor]) as started:
        yield started


def test_a_job_is_admitted_preempted_admitted_again_and_succeeds(
    cluster: TestCluster, deployment: TrainingDeployment, kueue: FakeKueue
) -> None:
    jobs = deployment.jobs
    urgent: Json = {
        "apiVersion": KUEUE,
        "kind": "WorkloadPriorityClass",
        "metadata": {"name": "e2e-urgent"},
        "value": 1000,
    }
    cluster.api.create(path(KUEUE, "workloadpriorityclasses"), urgent)
    kueue.submit("patient", _QUEUE, deployment.supervised(num_steps=_STEPS))
    jobs.wait_step("patient", 3, _TRAINING_S)
    first = jobs.status("patient")["assignments"]
    assert {entry["node"].rpartition("-")[0] for entry in first if entry.get("node")} == {
        "kueue-fast"
    }

    kueue.submit(
        "hurried",
        _QUEUE,
        deployment.supervised(num_steps=4),
        {"kueue.x-k8s.io/priority-class": "e2e-urgent"},
    )
    status = jobs.wait_phase("patient", "Suspended", timeout_s=_TRAINING_S)
    saved = status["checkpoint"]["latest"]
    assert "waits for Kueue to admit it to team-a" in status["waitingFor"]
    assert not status.get("assignments")
    released = cluster.wait_for(
        lambda: (body := kueue.workload("patient")) and not is_true(body, "QuotaReserved") and body,
        "the quota to be released",
    )
    assert "admission" not in released["status"]
    assert condition_of(released, "Requeued")["reason"] == "Preempted"

    jobs.wait_phase("hurried", "Succeeded", timeout_s=_TRAINING_S)
    status = jobs.wait_phase("patient", "Succeeded", timeout_s=_TRAINING_S)
    assert saved, "it went on from what it saved"
    assert status["progress"]["summary"] == f"{_STEPS}/{_STEPS}"
    for name in ("hurried", "patient"):
        told = cluster.wait_for(
            lambda name=name: condition_of(kueue.workload(name), "Finished"), "the end to be told"
        )
        assert told["reason"] == "Succeeded"


def test_the_sample_runs_to_its_end(
    cluster: TestCluster, deployment: TrainingDeployment, kueue: FakeKueue
) -> None:
    sample = yaml.safe_load((ROOT / "k8s/samples/kueue.yaml").read_text())
    tiny = deployment.supervised(num_steps=4)
    # Its queue, its label and that it begins suspended; the model and the sizes are a test's.
    sample["spec"] = {**tiny, "suspend": sample["spec"]["suspend"], "data": sample["spec"]["data"]}
    cluster.kubectl(
        "apply", "-n", deployment.jobs.namespace, "-f", "-", stdin=yaml.safe_dump(sample)
    )
    name = sample["metadata"]["name"]
    deployment.jobs.wait_phase(name, "Succeeded", timeout_s=_TRAINING_S)
    cluster.wait_for(lambda: condition_of(kueue.workload(name), "Finished"), "the end to be told")
