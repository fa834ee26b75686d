"""What one job costs the API server: each write is a commit of its store."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.unit.controller.cluster_in_memory import NAMESPACE, Connection, World
from tests.unit.controller.process_in_memory import Process, status_of

A_LIFE = {
    "PUT trainingjobs": 5,
    "POST pods": 4,
    "DELETE pods": 3,
    "POST secrets": 1,
    "DELETE secrets": 1,
}
"""Of a job with four pods, from its creation to its end; docs/adr/0020 says what each is for."""
NUM_EVENTS = 1
"""That it has succeeded."""
PHASES = ["Starting", "Starting", "Running", "Succeeded", "Succeeded"]


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


def statuses_of(world: World) -> list[dict[str, Any]]:
    """Return a list to which each status of a job is added when it is written."""
    found: list[dict[str, Any]] = []

    def note(plural: str, before: Any, after: Any) -> None:
        if plural == "trainingjobs" and after.get("status") != (before or {}).get("status"):
            found.append(after["status"])

    world.listeners.append(note)
    return found


def keys_in_secret(world: World, name: str) -> set[str]:
    """Return the entries for clients in the secret of a job."""
    data = world.get("secrets", NAMESPACE, f"{name}-pod-keys")["data"]
    return {entry for entry in data if not entry.endswith("-key") or "." in entry}


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

    assert dict(writes) == A_LIFE
    assert len(process.events.told) == NUM_EVENTS


def test_each_write_of_a_life_says_how_far_it_is_and_what_it_waits_for() -> None:
    world = World()
    world.node("n0")
    process, _ = process_of(world)
    written = statuses_of(world)

    live(world, process)

    assert [status["phase"] for status in written] == PHASES
    assert [status.get("waitingFor", "") for status in written] == [
        "trainer 0 on node n0 is not ready; trainer 1 on node n0 is not ready; "
        "sampler 0 on node n0 is not ready",
        "driver 0 is not ready",
        "",
        "waits for trainer 0, trainer 1, sampler 0 to end",
        "",
    ]


def test_a_process_that_begins_anew_writes_nothing_twice() -> None:
    """At each moment of a life another process takes over: no status and no secret is repeated."""
    for num_rounds in range(1, 7):
        world = World()
        world.node("n0")
        first, writes = process_of(world)
        world.job("a", trainers=2, gpus=2, samplers=1)
        first.settle(num_rounds)
        second, more = process_of(world)
        second.settle()
        end_driver(world, "a")
        second.settle()

        assert status_of(world, "a")["phase"] == "Succeeded"
        both = writes + more
        # One attempt finds the secret there, and a new leader raises a number of a job that waits.
        assert both["POST secrets"] <= 2
        assert not both["PUT secrets"]
        assert both["PUT trainingjobs"] <= A_LIFE["PUT trainingjobs"] + 1
        assert not world.of("secrets")


def test_a_driver_that_is_replaced_leaves_no_key_to_the_next() -> None:
    world = World()
    world.node("n0")
    process, writes = process_of(world)
    world.job("a", gpus=1, samplers=1)
    process.settle()
    assert keys_in_secret(world, "a") == {"driver-e1.api-key"}

    world.delete("pods", NAMESPACE, "a-driver-0-e1")
    process.settle()

    assert status_of(world, "a")["phase"] == "Running"
    assert keys_in_secret(world, "a") == {"driver-e2.api-key"}
    assert writes["PUT secrets"] == 1
    assert not writes["DELETE secrets"]


def test_a_server_that_is_gone_before_it_was_called_is_made_again_under_its_name() -> None:
    world = World()
    world.node("n0")
    process, _ = process_of(world)
    world.silent_pods.add("a-sampler-0-e1")
    world.job("a", gpus=1, samplers=1)
    process.settle()
    assert status_of(world, "a")["phase"] == "Starting"

    world.delete("pods", NAMESPACE, "a-sampler-0-e1", at_once=True)
    world.silent_pods.clear()
    process.settle()

    status = status_of(world, "a")
    assert status["phase"] == "Running"
    assert {entry["epoch"] for entry in status["assignments"]} == {1}
    assert all(entry["uid"] for entry in status["assignments"])


def test_a_driver_that_is_gone_before_it_was_ready_is_replaced_under_another_name() -> None:
    """It had a key, and may run on: the next one has another."""
    world = World()
    world.node("n0")
    process, _ = process_of(world)
    world.silent_pods.add("a-driver-0-e1")
    world.job("a", gpus=1, samplers=1)
    process.settle()
    assert status_of(world, "a")["waitingFor"] == "driver 0 is not ready"

    world.delete("pods", NAMESPACE, "a-driver-0-e1", at_once=True)
    process.settle()

    names = {entry["pod"] for entry in status_of(world, "a")["assignments"]}
    assert "a-driver-0-e2" in names


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


def test_the_first_write_of_a_job_that_waits_says_what_for() -> None:
    world = World()
    world.node("n0")
    process, writes = process_of(world)
    world.job("a", gpus=8)
    process.settle()
    before = writes["PUT trainingjobs"]
    world.job("b", gpus=8)

    process.settle()

    status = status_of(world, "b")
    conditions = {each["type"]: each["reason"] for each in status["conditions"]}
    assert status["phase"] == "Queued"
    assert "8 GPUs" in status["waitingFor"]
    assert status["queuedTime"]
    assert status["observedGeneration"] == 1
    assert conditions == {"Ready": "WaitingForNodes", "Assigned": "WaitingForNodes"}
    assert writes["PUT trainingjobs"] == before + 1


def test_a_job_that_runs_is_not_written_again() -> None:
    world = World()
    world.node("n0")
    process, writes = process_of(world)
    world.job("a", gpus=8)
    process.settle()
    before = writes.copy()

    process.settle(100, step_s=1.0)

    assert writes == before
