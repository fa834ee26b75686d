"""Every sample is taken by a real API server and planned by the controller."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.cluster import Json, TestCluster
from tests.e2e.lab import Lab, start_lab

_SAMPLES = sorted((Path(__file__).parents[2] / "k8s" / "samples").glob("*.yaml"))
_PLURALS = {"TrainingJob": "trainingjobs", "TrainerPool": "trainerpools"}
_HELD = frozenset({"Starting", "Running", "Ready"})
_WAITING = frozenset({"Queued", "Suspended"})

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def operated(resources: TestCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A controller whose operators allow what samples ask for."""
    folder = tmp_path_factory.mktemp("samples")
    settings = {"kueue": True, "allowed_tolerations": "example.com/spot"}
    with (
        resources.namespace() as name,
        start_lab(resources, name, folder, **settings) as lab,
        lab.nodes(2),
    ):
        lab.jobs.create("shared-qwen", _spec("trainer-pool"), kind="TrainerPool")
        yield lab


def _ours(sample: Path) -> Json:
    [found] = [each for each in yaml.safe_load_all(sample.read_text()) if each["kind"] in _PLURALS]
    return dict(found)


def _spec(sample: str) -> Json:
    [found] = [_ours(each)["spec"] for each in _SAMPLES if each.stem == sample]
    return dict(found)


@pytest.mark.parametrize("sample", _SAMPLES, ids=lambda sample: sample.stem)
def test_a_sample_gets_pods_or_says_what_it_waits_for(operated: Lab, sample: Path) -> None:
    cluster, jobs = operated.cluster, operated.jobs
    cluster.kubectl("apply", "-n", operated.namespace, "-f", str(sample))
    manifest = _ours(sample)
    name, plural = manifest["metadata"]["name"], _PLURALS[manifest["kind"]]

    def settled() -> Json:
        status = jobs.status(name, plural=plural)
        is_planned = status.get("phase") in _HELD or (
            status.get("phase") in _WAITING
            and status["waitingFor"] != "waits for the next assignment of nodes"
        )
        return status if is_planned or status.get("failure") else {}

    status = cluster.wait_for(settled, f"{name} to be planned")

    assert "failure" not in status, status["failure"]
    if status["phase"] in _HELD:
        cluster.wait_for(lambda: jobs.pods(name), f"pods of {name}")
        if plural == "trainingjobs":
            # The next sample gets the nodes.
            cluster.api.delete(jobs.url(name))
    else:
        assert status["waitingFor"]
