"""Jobs whose pods are containers made from our images, on a release of the chart."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.cluster import Json, TestCluster
from tests.e2e.cluster.processes import send_signal
from tests.e2e.release import Release
from tests.e2e.training import MODEL, TrainingDeployment
from tests.node.container_node import ContainerNode

_TRAINING_S = 300.0
_STEPS = 12
_TRY = """
import os, pathlib
status = dict(line.split(":\t") for line in pathlib.Path("/proc/1/status").read_text().splitlines())
print(status["Uid"].split()[0], status["CapEff"].strip(), status["Seccomp"].strip(),
      status["NoNewPrivs"].strip(), os.access("/opt", os.W_OK),
      os.path.exists("/var/run/secrets/kubernetes.io"))
try:
    open("/opt/tinsmith/written", "w")
except OSError as error:
    print(error.strerror)
"""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def undisturbed(deployment: TrainingDeployment) -> dict[str, bytes]:
    """The weights of a job that ran through."""
    deployment.jobs.create("undisturbed", deployment.supervised(num_steps=_STEPS))
    deployment.jobs.wait_phase("undisturbed", "Succeeded", timeout_s=_TRAINING_S)
    return deployment.final_weights("undisturbed")


def _pod(deployment: TrainingDeployment, job: str, role: str) -> Json:
    [pod] = [
        pod
        for pod in deployment.jobs.pods(job)
        if pod["metadata"]["labels"]["tinsmith.dev/role"] == role
    ]
    return pod


def test_a_job_trains_in_confined_containers_and_leaves_its_checkpoint(
    cluster: TestCluster, deployment: TrainingDeployment
) -> None:
    jobs = deployment.jobs
    jobs.create("words", deployment.supervised(num_steps=8))
    jobs.wait_step("words", 1, _TRAINING_S)
    trainer = _pod(deployment, "words", "trainer")["metadata"]["name"]
    seen = cluster.kubectl("exec", "-n", jobs.namespace, trainer, "--", "python", "-c", _TRY)

    status = jobs.wait_phase("words", "Succeeded", timeout_s=_TRAINING_S)

    # A user without rights, in mode 2 of seccomp (a filter), without a token for the API server.
    assert seen.splitlines() == [
        "65532 0000000000000000 2 1 False False",
        "Read-only file system",
    ]
    assert status["progress"]["summary"] == "8/8"
    assert deployment.final_weights("words")
    with deployment.client() as client:
        assert "step 8/8" in "".join(client.jobs.logs("words"))


def test_a_killed_trainer_starts_again_and_the_weights_have_the_same_bits(
    node: ContainerNode, deployment: TrainingDeployment, undisturbed: dict[str, bytes]
) -> None:
    jobs = deployment.jobs
    jobs.create("killed", deployment.supervised(num_steps=_STEPS))
    jobs.wait_step("killed", 3, _TRAINING_S)
    for pid in node.processes_of(_pod(deployment, "killed", "trainer")):
        send_signal(pid, signal.SIGKILL)

    status = jobs.wait_phase("killed", "Succeeded", timeout_s=_TRAINING_S)

    assert status["restartCount"] == 1, status.get("failure")
    assert deployment.final_weights("killed") == undisturbed


def test_a_deleted_trainer_drains_and_the_weights_have_the_same_bits(
    cluster: TestCluster, deployment: TrainingDeployment, undisturbed: dict[str, bytes]
) -> None:
    jobs = deployment.jobs
    jobs.create("drained", deployment.supervised(num_steps=_STEPS))
    jobs.wait_step("drained", 3, _TRAINING_S)
    trainer = _pod(deployment, "drained", "trainer")["metadata"]["name"]
    cluster.kubectl("delete", "pod", "-n", jobs.namespace, trainer, "--wait=false")

    status = jobs.wait_phase("drained", "Succeeded", timeout_s=_TRAINING_S)

    assert status["restartCount"] == 0, status.get("failure")
    assert deployment.final_weights("drained") == undisturbed


def test_a_trainer_beyond_its_memory_is_said_to_be(deployment: TrainingDeployment) -> None:
    spec = deployment.supervised(num_steps=8)
    little = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
    spec["roles"]["trainer"]["resources"] = little
    spec["backoffLimit"] = 0
    deployment.jobs.create("greedy", spec)

    status = deployment.jobs.wait_phase("greedy", "Failed", timeout_s=_TRAINING_S)

    assert "trainer 0 ended with exit code 137: OOMKilled" in status["failure"]["message"]


def test_weights_that_the_pod_may_not_read_are_said_to_be_so(
    deployment: TrainingDeployment, model: Path
) -> None:
    weights = model / "model.safetensors"
    spec = deployment.supervised(num_steps=8)
    spec["backoffLimit"] = 0
    weights.chmod(0o600)
    try:
        deployment.jobs.create("locked-out", spec)
        status = deployment.jobs.wait_phase("locked-out", "Failed", timeout_s=_TRAINING_S)
    finally:
        weights.chmod(0o644)

    assert (
        f"/models/{MODEL}/model.safetensors cannot be read by user 65532"
        in (status["failure"]["message"])
    )


def test_the_ranks_of_a_trainer_find_each_other_by_name(deployment: TrainingDeployment) -> None:
    spec = deployment.supervised(num_steps=2, adapter={"type": "full"})
    spec["method"]["parameters"]["learning_rate"] = 1e-3
    spec["roles"]["trainer"] = deployment.role(replicas=2)
    deployment.jobs.create("ranks", spec)

    status = deployment.jobs.wait_phase("ranks", "Succeeded", timeout_s=_TRAINING_S)

    assert status["progress"]["summary"] == "2/2"


def test_a_frozen_gateway_is_found_by_its_probe_and_replaced(
    cluster: TestCluster, node: ContainerNode, deployment: TrainingDeployment, release: Release
) -> None:
    selector = "app.kubernetes.io/component=gateway"
    url = f"/api/v1/namespaces/{release.namespace}/pods"

    def gateway() -> Json:
        [pod] = cluster.api.list(url, labelSelector=selector)
        return pod

    def num_restarts() -> int:
        return int(gateway()["status"]["containerStatuses"][0]["restartCount"])

    before = num_restarts()
    for pid in node.processes_of(gateway()):
        send_signal(pid, signal.SIGSTOP)
    cluster.wait_for(
        lambda: num_restarts() > before,
        "the gateway to be started again",
        timeout_s=_TRAINING_S,
    )
    release.wait_for_rollout("gateway")
    with (
        deployment.client() as client,
        client.environments.create_instance("math", seed=1) as instance,
    ):
        assert instance.name
