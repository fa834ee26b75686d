"""Nodes that are lost, return, are cordoned or deleted under the pods of jobs and pools."""

from __future__ import annotations

from tests.e2e.cluster import FakeNode, Json, path
from tests.e2e.history import History
from tests.e2e.lab import Lab, pool, training


def test_placed_pods_of_a_lost_node_go_on_elsewhere_under_a_new_epoch_at_once(lab: Lab) -> None:
    with lab.nodes(3) as kubelet, History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("lost", training(trainers=2, gpus=8))
        before = lab.jobs.wait_phase("lost", "Running")
        held = {entry["index"]: entry for entry in _of(before, "trainer")}
        node = held[1]["node"]
        kubelet.lose_node(node)
        lab.cluster.wait_for(lambda: _node_of(lab, "lost", 1) not in ("", node))
        after = lab.jobs.wait_phase("lost", "Running")

        moved = {entry["index"]: entry for entry in _of(after, "trainer")}
        assert moved[0] == held[0]
        assert moved[1]["epoch"] > held[1]["epoch"]
        assert after.get("restartCount", 0) == 0  # a lost node is no fault of the job

        # The old pod cannot end while its node is silent, and goes when the node is back.
        old = path("v1", "pods", lab.namespace, held[1]["pod"])
        assert "deletionTimestamp" in lab.cluster.api.get(old)["metadata"]
        kubelet.return_node(node)
        lab.cluster.wait_for(lambda: lab.cluster.api.find(old) is None, "the old pod to go")
        assert _of(lab.jobs.status("lost"), "trainer") == list(moved.values())
    assert not history.violations()


def test_a_job_that_lost_a_node_waits_for_another_and_says_so(lab: Lab) -> None:
    with lab.nodes(2) as kubelet, History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("patient", training(trainers=2, gpus=8))
        lab.jobs.wait_phase("patient", "Running")
        kubelet.lose_node(lab.node(1))
        lab.jobs.wait_phase("patient", "Restarting")
        lab.waits("patient", "GPU")
        kubelet.return_node(lab.node(1))
        lab.jobs.wait_phase("patient", "Running")
    assert not history.violations()


def test_a_cordoned_node_keeps_its_pods_and_gets_no_new_ones(lab: Lab) -> None:
    with lab.nodes(2) as kubelet:
        lab.jobs.create("stays", training(gpus=8))
        node = _of(lab.jobs.wait_phase("stays", "Running"), "trainer")[0]["node"]
        other = next(lab.node(i) for i in range(2) if lab.node(i) != node)
        kubelet.cordon(node)
        kubelet.cordon(other)
        lab.jobs.create("waits", training(gpus=8))
        lab.waits("waits", "cordoned")
        assert lab.jobs.status("stays")["phase"] == "Running"
        kubelet.cordon(other, on=False)
        assert _of(lab.jobs.wait_phase("waits", "Running"), "trainer")[0]["node"] == other


def test_a_pod_that_fails_on_a_cordoned_node_goes_on_elsewhere(lab: Lab) -> None:
    with lab.nodes(2) as kubelet:
        lab.jobs.create("moves", training(gpus=8))
        node = _of(lab.jobs.wait_phase("moves", "Running"), "trainer")[0]["node"]
        kubelet.cordon(node)
        lab.end(kubelet, "moves", "trainer", 1)
        lab.cluster.wait_for(lambda: _node_of(lab, "moves", 0) not in ("", node))
        lab.jobs.wait_phase("moves", "Running")


def test_a_node_that_refuses_a_pod_is_left_alone_though_it_says_that_it_has_room(
    lab: Lab,
) -> None:
    with lab.nodes(2), History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("refused", training(gpus=8))
        nodes = [_of(lab.jobs.wait_phase("refused", "Running"), "trainer")[0]["node"]]
        _refuse(lab, "refused")
        lab.cluster.wait_for(lambda: _node_of(lab, "refused", 0) not in ("", *nodes))
        nodes += [_of(lab.jobs.wait_phase("refused", "Running"), "trainer")[0]["node"]]
        _refuse(lab, "refused")
        lab.waits("refused", "2 that refused its pods lately")
        status = lab.jobs.status("refused")
        assert {entry["node"] for entry in status["refusals"]} == set(nodes)
        assert "UnexpectedAdmissionError: GPU 3 is broken" in status["failure"]["message"]
        # Others are not concerned.
        lab.jobs.create("other", training(gpus=8))
        lab.jobs.wait_phase("other", "Running")
    assert not history.violations()


def test_a_node_that_is_deleted_is_a_lost_one(lab: Lab) -> None:
    with lab.nodes(2), History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("gone", training(gpus=8))
        node = _of(lab.jobs.wait_phase("gone", "Running"), "trainer")[0]["node"]
        lab.cluster.api.delete(f"/api/v1/nodes/{node}")
        lab.cluster.wait_for(lambda: _node_of(lab, "gone", 0) not in ("", node))
        lab.jobs.wait_phase("gone", "Running")
    assert not history.violations()


def test_a_pool_is_placed_replica_by_replica_and_outlives_nodes(lab: Lab) -> None:
    plural = "trainerpools"
    with lab.nodes(1) as kubelet, History(lab.cluster, [lab.namespace]) as history:
        lab.jobs.create("shared", pool(2, gpus=8), kind="TrainerPool")
        status = lab.jobs.wait_phase("shared", "Degraded", plural=plural)
        assert status["assignedGPUs"] == 8
        lab.waits("shared", "GPU", plural=plural)
        kubelet.add_node(_another(lab))
        lab.jobs.wait_phase("shared", "Ready", plural=plural)
        kubelet.lose_node(lab.node(0))
        lab.jobs.wait_phase("shared", "Degraded", plural=plural)
        kubelet.return_node(lab.node(0))
        lab.jobs.wait_phase("shared", "Ready", plural=plural)
        lab.jobs.patch("shared", {"trainer": {"replicas": 1}}, plural=plural)
        lab.cluster.wait_for(lambda: len(lab.jobs.pods("shared")) == 1)
        lab.cluster.wait_for(lambda: lab.jobs.status("shared", plural=plural)["assignedGPUs"] == 8)
        # A replica that fails is made again after a pause.
        kubelet.end_pod(lab.namespace, lab.jobs.pods("shared")[0]["metadata"]["name"], 3)
        lab.cluster.wait_for(
            lambda: lab.jobs.status("shared", plural=plural).get("restartCount") == 1
        )
        lab.jobs.wait_phase("shared", "Ready", plural=plural)
    assert not history.violations()


def _of(status: Json, role: str) -> list[Json]:
    return [entry for entry in status.get("assignments", []) if entry["role"] == role]


def _node_of(lab: Lab, job: str, index: int) -> str:
    entries = _of(lab.jobs.status(job), "trainer")
    return str(next((e["node"] for e in entries if e["index"] == index), ""))


def _another(lab: Lab) -> FakeNode:
    return FakeNode(name=lab.node(1), gpus=8)


def _refuse(lab: Lab, job: str) -> None:
    """Say what a kubelet says that does not take a pod."""
    name = lab.pod(job, "trainer")["metadata"]["name"]
    told = {"reason": "UnexpectedAdmissionError", "message": "GPU 3 is broken"}
    url = path("v1", "pods", lab.namespace, name)
    lab.cluster.api.patch(f"{url}/status", {"status": {"phase": "Failed", **told}})
