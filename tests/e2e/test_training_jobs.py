"""Jobs that train for real, applied with kubectl to a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import TestCluster
from tests.e2e.deployment import GROUP_VERSION
from tests.e2e.training import MODEL, TrainingDeployment, training_deployment

_TRAINING_S = 180.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def deployment(
    cluster: TestCluster, namespace: str, tmp_path: Path
) -> Iterator[TrainingDeployment]:
    with training_deployment(cluster, namespace, tmp_path) as started:
        yield started


def test_a_job_trains_reports_and_leaves_a_checkpoint_that_loads(
    cluster: TestCluster, deployment: TrainingDeployment
) -> None:
    manifest = {
        "apiVersion": GROUP_VERSION,
        "kind": "TrainingJob",
        "metadata": {"name": "words"},
        "spec": deployment.supervised(num_steps=8),
    }
    cluster.kubectl("apply", "-n", deployment.jobs.namespace, "-f", "-", stdin=yaml.dump(manifest))

    status = deployment.jobs.wait_phase("words", "Succeeded", timeout_s=_TRAINING_S)

    assert status["progress"]["summary"] == "8/8"
    assert {entry["role"] for entry in status["assignments"]} <= {"trainer", "sampler", "driver"}
    with deployment.client() as client:
        checkpoint = client.get_checkpoint(status["checkpoint"]["final"]["name"])
        assert checkpoint.base_model == MODEL
    assert deployment.final_weights("words")
    cluster.wait_for(lambda: not deployment.jobs.pods("words"), "the pods to be gone")
