"""Jobs whose pods are containers made from our images."""

from __future__ import annotations

import pytest

from tests.e2e.cluster import TestCluster
from tests.e2e.training import TrainingDeployment

_TRAINING_S = 240.0

pytestmark = pytest.mark.timeout(600)


def test_a_job_trains_in_containers_and_leaves_its_checkpoint(
    cluster: TestCluster, deployment: TrainingDeployment
) -> None:
    jobs = deployment.jobs
    jobs.create("words", deployment.supervised(num_steps=8))

    status = jobs.wait_phase("words", "Succeeded", timeout_s=_TRAINING_S)

    assert status["progress"]["summary"] == "8/8"
    assert deployment.final_weights("words")
