"""What a workload holds is what was given to it, whatever its spec says now."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.controller.cluster_in_memory import NAMESPACE, World, gpus_of
from tests.unit.controller.process_in_memory import Process, status_of


@pytest.fixture
def world() -> World:
    world = World()
    world.node("n0")
    return world


def test_gpus_that_an_edit_takes_back_are_not_free(world: World) -> None:
    process = Process(world)
    world.job("large")
    process.settle()
    world.edit_trainer("large", gpus=1)
    world.job("late", gpus=7)

    process.settle()

    assert world.assigned() == {"n0": 8}
    assert status_of(world, "large")["phase"] == "Running"
    assert status_of(world, "late")["phase"] == "Queued"


def test_a_quota_counts_what_was_given(world: World, tmp_path: Path) -> None:
    queues = tmp_path / "queues.toml"
    queues.write_text("[queues.default]\nmax_gpus = 8\n")
    process = Process(world, queues=queues)
    world.node("n1")
    world.job("first", gpus=4)
    process.settle()
    world.job("second")
    world.edit_trainer("first", gpus=0)

    process.settle()

    assert world.used() == {"n0": 4}
    assert "8 GPUs" in status_of(world, "second")["waitingFor"]


def test_cpu_and_memory_that_were_given_are_not_free(world: World) -> None:
    """The node has 64 cores; the pod that runs has 40 of them."""
    process = Process(world)
    world.job("large", gpus=1)
    world.edit_trainer("large", resources={"requests": {"cpu": "40", "memory": "1Gi"}})
    process.settle()
    world.edit_trainer("large", resources={"requests": {"cpu": "1", "memory": "1Gi"}})
    world.job("late", gpus=1)
    world.edit_trainer("late", resources={"requests": {"cpu": "40", "memory": "1Gi"}})

    process.settle()

    [entry] = [each for each in status_of(world, "large")["assignments"] if each.get("node")]
    assert (entry["cpuMilli"], entry["memoryBytes"]) == (40_000, 2**30)
    assert status_of(world, "late")["phase"] == "Queued"


def test_replicas_that_are_scaled_away_are_held_until_their_pods_are_gone(world: World) -> None:
    process = Process(world)
    world.job("wide", trainers=2, gpus=4)
    process.settle()
    world.edit_trainer("wide", replicas=1)
    world.job("late", gpus=4)
    process.deliver("trainingjobs")
    process.look("late")
    process.look("wide")
    process.assignment.decide()

    assert not status_of(world, "late").get("assignments")
    process.settle()
    assert status_of(world, "late")["phase"] == "Running"


def test_a_job_whose_spec_cannot_be_read_holds_what_it_has(world: World) -> None:
    process = Process(world)
    world.job("days")
    process.settle()
    world.edit_trainer("days", resources={"requests": {"memory": "64GB"}})
    world.job("late")
    process.deliver("trainingjobs")
    process.look("late")

    process.assignment.decide()

    assert not status_of(world, "late").get("assignments")


def test_a_pool_whose_replicas_change_their_size_is_placed_anew(world: World) -> None:
    """4 GPUs become 1: what is started has 1, and a job of 7 has room then."""
    process = Process(world)
    world.pool("shared", replicas=1, gpus=4)
    process.settle()
    assert status_of(world, "shared", "trainerpools")["phase"] == "Ready"
    trainer = world.get("trainerpools", NAMESPACE, "shared")["spec"]["trainer"]
    world.edit("trainerpools", "shared", trainer={**trainer, "gpus": 1})
    world.job("late", gpus=7)

    process.settle(30)

    [pod] = [each for each in world.of("pods") if each["metadata"]["name"].startswith("shared")]
    assert gpus_of(pod) == 1
    assert "command" not in pod["spec"]["containers"][0]
    assert status_of(world, "shared", "trainerpools")["phase"] == "Ready"
    assert status_of(world, "late")["phase"] == "Running"
    assert world.assigned() == {"n0": 8}


def test_drivers_of_jobs_that_hold_nodes_may_have_something_to_report(world: World) -> None:
    process = Process(world)
    world.job("runs", gpus=4)
    world.job("waits", gpus=8)
    process.settle()
    world.job("of-another-controller", gpus=1)
    body = world.get("trainingjobs", NAMESPACE, "of-another-controller")
    body["spec"]["managedBy"] = "example.com/other"
    body["status"] = world.get("trainingjobs", NAMESPACE, "runs")["status"]
    world.store("trainingjobs", NAMESPACE, body)
    process.deliver("trainingjobs")

    [(uid, (key, _))] = process.reconciler.identities().items()

    assert key.name == "runs"
    assert uid == world.get("trainingjobs", NAMESPACE, "runs")["metadata"]["uid"]
