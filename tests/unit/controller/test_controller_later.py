"""What a look depends on and is not there: the job's status says it until a look succeeds."""

from __future__ import annotations

from tests.unit.controller.cluster_in_memory import NAMESPACE, World
from tests.unit.controller.process_in_memory import Process, status_of

AWAY = "the scheduler refuses ListTrainingJobs: it starts"


def world_of_one_node() -> World:
    world = World()
    world.node("n0")
    return world


def test_a_secret_of_an_earlier_job_of_the_name_is_told_until_it_is_gone() -> None:
    world = world_of_one_node()
    left = {"metadata": {"name": "a-pod-keys", "ownerReferences": [{"uid": "of-another"}]}}
    world.create("secrets", NAMESPACE, left)
    process = Process(world)
    world.job("a")

    for _ in range(4):
        process.attempt(lambda: process.settle(1))

    assert not world.of("pods")
    sentence = "secrets a-pod-keys is left of another workload"
    assert status_of(world, "a")["waitingFor"] == sentence

    world.delete("secrets", NAMESPACE, "a-pod-keys")
    process.settle()

    assert status_of(world, "a")["phase"] == "Running"
    assert "waitingFor" not in status_of(world, "a")


def test_a_pod_of_another_that_has_the_name_is_told_and_another_name_is_taken() -> None:
    world = world_of_one_node()
    world.foreign_pod("a-trainer-0-e1", "n0", 0)
    process = Process(world)
    world.job("a")
    told = set()

    for _ in range(8):
        process.attempt(lambda: process.settle(1))
        told.add(status_of(world, "a").get("waitingFor"))

    assert "another pod has the name a-trainer-0-e1" in told
    assert status_of(world, "a")["phase"] == "Running"


def test_a_driver_that_ended_while_the_scheduler_is_away_is_told() -> None:
    world = world_of_one_node()
    process = Process(world)
    world.job("a")
    process.settle()
    world.succeed(world.get("pods", NAMESPACE, "a-driver-0-e1"))
    process.scheduler.problem = AWAY

    told = process.attempt(lambda: process.settle(1))

    assert told == AWAY
    assert status_of(world, "a")["phase"] == "Running"
    assert status_of(world, "a")["waitingFor"] == AWAY

    process.scheduler.problem = ""
    process.settle()

    assert status_of(world, "a")["phase"] == "Succeeded"
    assert "waitingFor" not in status_of(world, "a")


def test_what_is_told_is_written_once() -> None:
    world = world_of_one_node()
    process = Process(world)
    world.job("a")
    process.settle()
    world.succeed(world.get("pods", NAMESPACE, "a-driver-0-e1"))
    process.scheduler.problem = AWAY
    process.attempt(lambda: process.settle(1))
    num_writes = process.connection.num_writes

    for _ in range(5):
        process.attempt(lambda: process.look("a"))

    assert process.connection.num_writes == num_writes
