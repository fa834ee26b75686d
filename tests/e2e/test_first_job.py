"""The sample for a cluster without a GPU trains to its end.

It has a module of its own: nodes of other tests that only look as if they ran pods would take it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import TestCluster
from tests.e2e.deployment import Jobs
from tests.e2e.training import process_nodes, training_deployment, two_nodes
from tests.fakes.hub import running_hub
from tinsmith_local.tiny_model import build_tiny_model

_SAMPLE = Path(__file__).parents[2] / "k8s" / "samples" / "cpu-lora.yaml"
_TRAINING_S = 420.0

pytestmark = pytest.mark.timeout(600)


def test_the_first_job_of_a_cluster_trains_without_a_gpu(
    cluster: TestCluster, tmp_path: Path
) -> None:
    """What is trained is a tiny model: a mirror gives it out under the name of the sample's."""
    spec = yaml.safe_load(_SAMPLE.read_text())["spec"]
    model = build_tiny_model(tmp_path / "tiny")
    with (
        process_nodes(cluster, two_nodes("processors", gpus=0)),
        cluster.namespace() as namespace,
        training_deployment(cluster, namespace, tmp_path),
        running_hub({spec["model"]["source"].removeprefix("hf://"): model}) as hub,
    ):
        mirrored = {"env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}]}
        spec["roles"]["trainer"]["template"] = mirrored
        jobs = Jobs(cluster, namespace)
        jobs.create("cpu-lora", spec)
        status = jobs.wait_phase("cpu-lora", "Succeeded", timeout_s=_TRAINING_S)

    assert (status["progress"]["summary"], status["assignedGPUs"]) == ("20/20", 0)
