"""The controller is killed at its writes, over and over, while a job and a pool live their lives.

`TINSMITH_E2E_KILLS` sets how often in all; `make controller-chaos` has the long size.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import FakeNode, Json, Kubelet, TestCluster, path
from tests.e2e.deployment import Jobs, controller_process, scheduler_process
from tests.e2e.history import History, leftovers
from tests.e2e.lab import Lab, pool, training
from tests.e2e.reaper import Reaper, points

_NUM_KILLS = int(os.environ.get("TINSMITH_E2E_KILLS", "25"))
_KILLS_OF_A_LIFE = 25
_PATIENCE_S = 90.0
_PRIORITY = "test-crash-urgent"
_POOLS = "trainerpools"


@pytest.fixture(scope="module")
def urgent(resources: TestCluster) -> Iterator[str]:
    """A PriorityClass above that of jobs without one."""
    url = "/apis/scheduling.k8s.io/v1/priorityclasses"
    manifest = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    resources.api.create(url, {**manifest, "metadata": {"name": _PRIORITY}})
    yield _PRIORITY
    resources.api.delete(f"{url}/{_PRIORITY}")


@pytest.mark.parametrize("seed", range(-(-_NUM_KILLS // _KILLS_OF_A_LIFE)))
def test_no_kill_leaves_an_orphan_or_makes_a_double(
    resources: TestCluster, namespace: str, tmp_path: Path, urgent: str, seed: int
) -> None:
    with _dying_lab(resources, namespace, tmp_path, seed) as (lab, kubelet, reaper):
        with History(resources, [namespace]) as history:
            _live(lab, kubelet, urgent)
            resources.wait_for(
                lambda: not leftovers(resources, namespace), "the rest to go", _PATIENCE_S
            )
        assert reaper.num_kills >= min(_NUM_KILLS, _KILLS_OF_A_LIFE) * 0.8
        assert not lab.good_keys("brave")

    assert not history.violations()
    brave = history.last_status("brave")
    assert brave["phase"] == "Succeeded"
    assert brave.get("restartCount", 0) == 0
    assert not brave.get("assignments")
    assert history.phases("urgent")[-1] == "Cancelled"
    log = lab.controller.log.read_text()
    assert "by a bug" not in log, log[log.index("by a bug") - 500 :][:4000]


def _live(lab: Lab, kubelet: Kubelet, urgent: str) -> None:
    """Let a job and a pool go through everything that can happen to them."""
    jobs = lab.jobs
    jobs.create("shared", pool(1), kind="TrainerPool")
    jobs.create("brave", training(trainers=2, gpus=4, samplers=1, ttlSecondsAfterFinished=2))
    jobs.wait_phase("brave", "Running", timeout_s=_PATIENCE_S)
    jobs.wait_phase("shared", "Ready", plural=_POOLS, timeout_s=_PATIENCE_S)

    jobs.create("urgent", training(trainers=2, gpus=7, scheduling={"priorityClassName": urgent}))
    jobs.wait_phase("urgent", "Running", timeout_s=_PATIENCE_S)
    jobs.patch("urgent", {"cancel": True})
    jobs.wait_phase("brave", "Running", timeout_s=_PATIENCE_S)

    node = lab.pod("brave", "trainer", 1)["spec"]["nodeName"]
    kubelet.lose_node(node)
    _wait(lab, lambda: node not in _nodes(jobs.status("brave")), "another node")
    jobs.wait_phase("brave", "Running", timeout_s=_PATIENCE_S)
    kubelet.return_node(node)

    lab.cluster.kubectl("scale", "trainingjob", "brave", "--replicas=3", "-n", lab.namespace)
    jobs.patch("shared", {"trainer": {"replicas": 2}}, plural=_POOLS)
    _wait(lab, lambda: jobs.status("brave").get("samplerReplicas") == 3, "three samplers")
    _wait(lab, lambda: jobs.status("shared", plural=_POOLS)["assignedGPUs"] == 2, "a replica")

    gone = jobs.status("shared", plural=_POOLS)["assignments"][0]["pod"]
    url = path("v1", "pods", lab.namespace, gone)
    _wait(lab, lambda: lab.cluster.api.find(url), "the pod that will go")
    lab.cluster.api.delete(url)
    jobs.patch("brave", {"suspend": True})
    jobs.wait_phase("brave", "Suspended", timeout_s=_PATIENCE_S)
    jobs.patch("brave", {"suspend": False})
    jobs.wait_phase("brave", "Running", timeout_s=_PATIENCE_S)
    jobs.wait_phase("shared", "Ready", plural=_POOLS, timeout_s=_PATIENCE_S)

    lab.end(kubelet, "brave", "driver", 0)
    jobs.wait_phase("urgent", "Cancelled", timeout_s=_PATIENCE_S)
    _wait(lab, lambda: lab.cluster.api.find(jobs.url("brave")) is None, "the job to be deleted")


@contextlib.contextmanager
def _dying_lab(
    cluster: TestCluster, namespace: str, folder: Path, seed: int
) -> Iterator[tuple[Lab, Kubelet, Reaper]]:
    nodes = [FakeNode(name=f"{namespace}-n{i}", gpus=8) for i in range(3)]
    with scheduler_process(folder) as scheduler, cluster.kubelet(nodes, instant=True) as kubelet:
        controller = controller_process(
            cluster,
            folder,
            namespace,
            scheduler.address,
            lease_ttl_s=1.5,
            resync_interval_s=2,
        )
        lab = Lab(
            cluster=cluster,
            jobs=Jobs(cluster, namespace),
            controller=controller,
            scheduler=scheduler,
            folder=folder,
        )
        with Reaper(controller, points(seed, _KILLS_OF_A_LIFE)) as reaper:
            yield lab, kubelet, reaper


def _nodes(status: Json) -> set[str]:
    return {entry.get("node", "") for entry in status.get("assignments", [])}


def _wait(lab: Lab, condition: Callable[[], object], what: str) -> None:
    lab.cluster.wait_for(condition, what, _PATIENCE_S)
