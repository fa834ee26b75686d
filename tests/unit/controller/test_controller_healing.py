"""Nodes that a workload was given and cannot have are given back, and looked for anew."""

from __future__ import annotations

import pytest
from tests.unit.controller.cluster_in_memory import NAMESPACE, World
from tests.unit.controller.process_in_memory import Process, status_of


@pytest.fixture
def world() -> World:
    world = World()
    world.node("n0")
    world.node("n1")
    return world


def nodes_of(world: World, name: str) -> list[str]:
    entries = status_of(world, name).get("assignments", [])
    return sorted(entry["node"] for entry in entries if entry.get("node"))


def take_the_place(world: World, pod: str, gpus: int = 8) -> None:
    """Have a pod of another owner be faster than the replacement of a pod that is deleted."""
    node = world.get("pods", NAMESPACE, pod)["spec"]["nodeName"]
    world.delete("pods", NAMESPACE, pod, at_once=True)
    world.foreign_pod("theirs", node, gpus)


@pytest.mark.parametrize("num_taken", [8, 1])
def test_a_pod_whose_gpus_others_took_is_placed_anew(world: World, num_taken: int) -> None:
    process = Process(world)
    world.job("ours")
    process.settle()
    take_the_place(world, "ours-trainer-0-e1", num_taken)

    process.settle()

    assert status_of(world, "ours")["phase"] == "Running"
    assert nodes_of(world, "ours") == ["n1"]


def test_a_gang_that_fits_nowhere_any_more_gives_back_all_and_waits(world: World) -> None:
    process = Process(world)
    world.job("wide", trainers=2)
    process.settle()
    take_the_place(world, "wide-trainer-0-e1")
    world.job("small", gpus=4)

    process.settle()

    status = status_of(world, "wide")
    assert status["phase"] == "Queued"
    assert not status.get("assignments")
    assert status["waitingFor"].startswith("needs 2 pods with 8 GPUs")
    reasons = [reason for name, reason, _ in process.events.told if name == "wide"]
    assert "NodesOverdrawn" in reasons
    assert status_of(world, "small")["phase"] == "Running"
    world.delete("pods", NAMESPACE, "theirs", at_once=True)
    world.edit("trainingjobs", "small", cancel=True)
    process.settle(20)
    assert status_of(world, "wide")["phase"] == "Running"


def test_a_pod_that_is_bound_as_its_node_is_given_back_is_deleted() -> None:
    """The decision cannot know of it: the watch has not told that it is bound."""
    world = World()
    world.node("n0")
    process = Process(world)
    world.job("ours", gpus=4, samplers=1)
    process.deliver("trainingjobs")
    process.look("ours")
    process.assignment.decide()
    process.look("ours")
    world.foreign_pod("theirs", "n0", 7)
    process.deliver("pods")
    world.advance(world.get("pods", NAMESPACE, "ours-sampler-0-e1"))
    assert world.used() == {"n0": 8}

    process.assignment.decide()

    assert nodes_of(world, "ours") == []
    process.settle()
    assert status_of(world, "ours")["phase"] == "Queued"
    assert world.used() == {"n0": 7}


def test_gpus_that_were_given_twice_are_given_back_by_the_youngest(world: World) -> None:
    """However it came to be: here a status was written by hand."""
    process = Process(world)
    world.job("old")
    process.settle()
    world.now_s += 10
    world.job("young")
    process.deliver("trainingjobs")
    process.look("young")
    process.assignment.decide()
    job = world.get("trainingjobs", NAMESPACE, "young")
    for entry in job["status"]["assignments"]:
        if entry.get("node"):
            entry["node"] = "n0"
    world.replace("trainingjobs", NAMESPACE, job, "status")
    assert world.assigned() == {"n0": 16}

    process.settle()

    assert nodes_of(world, "old") == ["n0"]
    assert nodes_of(world, "young") == ["n1"]
    assert status_of(world, "young")["phase"] == "Running"


def test_a_pod_that_runs_keeps_its_node(world: World) -> None:
    """A device that fails takes GPUs away under pods that have them."""
    process = Process(world)
    world.job("ours")
    process.settle()
    [node] = nodes_of(world, "ours")
    world.node(node, 4)

    process.settle()

    assert nodes_of(world, "ours") == [node]
    assert status_of(world, "ours")["phase"] == "Running"


def test_a_replacement_waits_for_the_pod_before_it(world: World) -> None:
    """The one that ends still has its GPUs, and that is no reason to go elsewhere."""
    process = Process(world)
    world.job("ours")
    process.settle()
    [node] = nodes_of(world, "ours")
    world.delete("pods", NAMESPACE, "ours-trainer-0-e1")
    for _ in range(6):
        process.deliver("pods")
        process.look("ours")
        process.assignment.decide()
        process.deliver("trainingjobs")

    assert nodes_of(world, "ours") == [node]
    process.settle()
    assert status_of(world, "ours")["phase"] == "Running"


@pytest.mark.parametrize("has_room", [True, False])
def test_a_pod_that_stays_unschedulable_goes_where_there_is_room(
    world: World, has_room: bool
) -> None:
    """Why it is refused on its node, only the cluster's scheduler knows."""
    world.refused_nodes.add("n0")
    process = Process(world)
    world.job("ours")
    if not has_room:
        world.job("theirs")
    process.settle()
    assert "n0" in nodes_of(world, "ours")
    process.settle(20, step_s=5.0)

    phase = status_of(world, "ours")["phase"]
    assert (phase, nodes_of(world, "ours")) == (
        ("Running", ["n1"]) if has_room else ("Starting", ["n0"])
    )


def test_a_replica_of_a_pool_whose_gpus_others_took_is_placed_anew(world: World) -> None:
    process = Process(world)
    world.pool("shared", replicas=1, gpus=8)
    process.settle()
    take_the_place(world, "shared-trainer-0-e1")

    process.settle()

    status = status_of(world, "shared", "trainerpools")
    assert status["phase"] == "Ready"
    assert [entry["node"] for entry in status["assignments"]] == ["n1"]


def test_what_a_job_gives_back_is_given_to_others_once(world: World) -> None:
    """In one decision `ours` gives its node back, and `small` gets what is left of it."""
    process = Process(world)
    world.job("ours")
    process.settle()
    world.job("other")
    process.settle()
    most: list[int] = []
    world.listeners.append(lambda *_: most.append(max(world.assigned().values(), default=0)))
    take_the_place(world, "ours-trainer-0-e1", gpus=5)
    world.job("small", gpus=3)

    process.settle(20)

    assert max(most) == 8
    assert status_of(world, "ours")["phase"] == "Queued"
    assert status_of(world, "small")["phase"] == "Running"
