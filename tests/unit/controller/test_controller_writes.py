"""What one job costs the API server: each write is a commit of its store."""

from __future__ import annotations

from collections import Counter

from tests.unit.controller.cluster_in_memory import NAMESPACE, Connection, World
from tests.unit.controller.process_in_memory import Process, status_of

A_LIFE = {
    "PUT trainingjobs": 10,
    "POST pods": 4,
    "DELETE pods": 3,
    "POST secrets": 2,
    "DELETE secrets": 2,
}
"""Of a job with four pods, from its creation to its end."""
NUM_EVENTS = 2
"""That its pods are ready, and that it has succeeded."""


class Counted:
    """Counts the writes of a connection by method and kind; none fails."""

    def __init__(self) -> None:
        self.writes: Counter[str] = Counter()

    def __call__(self, method: str, plural: str, name: str) -> str:
        if method != "GET":
            self.writes[f"{method} {plural}"] += 1
        return ""


def process_of(world: World) -> tuple[Process, Counter[str]]:
    counted = Counted()
    return Process(world, Connection(world, counted)), counted.writes


def end_driver(world: World, name: str) -> None:
    world.succeed(world.get("pods", NAMESPACE, f"{name}-driver-0-e1"))


def live(world: World, process: Process) -> None:
    world.job("a", trainers=2, gpus=2, samplers=1)
    process.settle()
    assert status_of(world, "a")["phase"] == "Running"
    end_driver(world, "a")
    process.settle()
    assert status_of(world, "a")["phase"] == "Succeeded"
    assert not world.assigned()


def test_the_writes_of_a_life_are_no_more_than_they_were() -> None:
    world = World()
    world.node("n0")
    process, writes = process_of(world)

    live(world, process)

    assert not {what: num for what, num in writes.items() if num > A_LIFE.get(what, 0)}
    assert len(process.events.told) <= NUM_EVENTS


def test_a_job_that_waits_is_told_once_and_not_written_again() -> None:
    world = World()
    world.node("n0")
    process, writes = process_of(world)
    world.job("a", gpus=8)
    process.settle()
    world.job("b", gpus=8)
    process.settle()
    before, num_events = writes.copy(), len(process.events.told)

    process.settle(100, step_s=10.0)

    assert status_of(world, "b")["phase"] == "Queued"
    assert writes == before
    assert len(process.events.told) == num_events


def test_a_job_that_runs_is_not_written_again() -> None:
    world = World()
    world.node("n0")
    process, writes = process_of(world)
    world.job("a", gpus=8)
    process.settle()
    before = writes.copy()

    process.settle(100, step_s=1.0)

    assert writes == before
