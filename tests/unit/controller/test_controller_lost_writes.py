"""Writes whose outcome is unknown: lost requests, lost answers, and what arrives late."""

from __future__ import annotations

import pytest
from tests.unit.controller.cluster_in_memory import NAMESPACE, Connection, World
from tests.unit.controller.process_in_memory import Process, status_of

from tinsmith_controller.kube.api_client import JOBS, PODS, ApiError


class ScriptedFaults:
    """What happens to the next request of a method and name."""

    def __init__(self) -> None:
        self.next: dict[tuple[str, str], str] = {}

    def __call__(self, method: str, plural: str, name: str) -> str:
        return self.next.pop((method, name), "")


@pytest.fixture
def faults() -> ScriptedFaults:
    return ScriptedFaults()


@pytest.fixture
def world() -> World:
    world = World()
    for i in range(3):
        world.node(f"n{i}")
    return world


def process_of(world: World, faults: ScriptedFaults) -> Process:
    return Process(world, Connection(world, faults))


def assert_nothing_is_given_twice(world: World) -> None:
    over = {node: gpus for node, gpus in world.assigned().items() if gpus > 8}
    assert not over, "\n".join(world.trace)


@pytest.mark.parametrize("fault", ["answer", "late", "request"])
def test_nothing_is_decided_while_an_assignment_may_have_been_stored(
    world: World, faults: ScriptedFaults, fault: str
) -> None:
    """The answer to the assignment of `b` is lost, and then `a` comes, which goes before it.

    It waited for its PriorityClass until then.
    """
    process = process_of(world, faults)
    world.job("a", trainers=2, gpus=2, samplers=1, priorityClassName="late")
    for name in "bc":
        world.job(name, trainers=2, gpus=2, samplers=1)
    process.deliver("trainingjobs")
    assert not process.attempt(lambda: process.look("a"))
    assert not process.attempt(lambda: process.look("b"))
    faults.next = {("PUT", "b"): fault}
    assert process.attempt(process.assignment.decide)
    process.cut()
    world.priority_class("late", 10)
    process.relist("priorityclasses")

    world.now_s += 0.06
    assert not process.attempt(lambda: process.look("a"))
    process.attempt(process.assignment.decide)
    while process.connection.under_way:
        process.connection.land()
    # Before another decision heals it.
    assert_nothing_is_given_twice(world)
    process.settle(40)

    assert_nothing_is_given_twice(world)
    assert {status_of(world, name)["phase"] for name in "abc"} == {"Running"}


def test_a_write_is_sent_again_with_its_own_version(world: World, faults: ScriptedFaults) -> None:
    """It was lost on its way, and its author has changed the job since: it is dropped."""
    process = process_of(world, faults)
    world.job("a")
    process.deliver("trainingjobs")
    process.look("a")
    faults.next = {("PUT", "a"): "request"}
    assert process.attempt(process.assignment.decide)
    world.edit("trainingjobs", "a", suspend=True)

    process.assignment.decide()

    assert not status_of(world, "a").get("assignments")
    process.settle()
    assert status_of(world, "a")["phase"] == "Suspended"


def test_a_conflict_drops_the_rest_of_a_decision(world: World, faults: ScriptedFaults) -> None:
    """What the rest takes for free may not be: all is decided anew, of what was read."""
    process = process_of(world, faults)
    world.job("a", gpus=1)
    world.job("b", gpus=1)
    process.deliver("trainingjobs")
    process.look("a")
    process.look("b")
    world.edit("trainingjobs", "a", suspend=True)

    process.assignment.decide()

    assert not status_of(world, "a").get("assignments")
    assert not status_of(world, "b").get("assignments")
    assert process.wants_assignment
    process.settle()
    assert status_of(world, "b")["phase"] == "Running"


def test_a_lost_preemption_takes_no_second_victim(world: World, faults: ScriptedFaults) -> None:
    process = process_of(world, faults)
    world.priority_class("high", 10)
    for name in "xyz":
        world.job(name)
    process.settle()
    assert {status_of(world, name)["phase"] for name in "xyz"} == {"Running"}
    world.job("urgent", priorityClassName="high")
    process.deliver("trainingjobs")
    process.deliver("priorityclasses")
    process.look("urgent")
    faults.next = {("PUT", name): "answer" for name in "xyz"}
    assert process.attempt(process.assignment.decide)
    process.cut()
    faults.next = {}

    process.attempt(process.assignment.decide)
    process.settle(30)

    phases = [status_of(world, name)["phase"] for name in "xyz"]
    assert sorted(phases) == ["Queued", "Running", "Running"]
    assert status_of(world, "urgent")["phase"] == "Running"


@pytest.mark.parametrize("fault", ["answer", "late"])
def test_nodes_are_not_given_back_while_a_pod_may_have_been_made(
    world: World, faults: ScriptedFaults, fault: str
) -> None:
    process = process_of(world, faults)
    world.job("a", gpus=8)
    process.deliver("trainingjobs")
    process.look("a")
    process.assignment.decide()
    faults.next = {("POST", "a-trainer-0-e1"): fault}
    assert process.attempt(lambda: process.look("a"))
    process.cut()
    while process.connection.under_way:
        process.connection.land()
    world.edit("trainingjobs", "a", suspend=True)
    process.relist("trainingjobs")

    process.look("a")

    assert status_of(world, "a")["phase"] == "Suspending"
    assert world.assigned() == {"n0": 8}
    process.settle()
    assert status_of(world, "a")["phase"] == "Suspended"
    assert not world.of("pods")


@pytest.mark.parametrize("lands_before", ["a", "settles"])
def test_a_late_write_of_the_leader_before_does_not_land(
    world: World, faults: ScriptedFaults, lands_before: str
) -> None:
    """The first copy of an assignment is under way while another process decides anew."""
    first = process_of(world, faults)
    world.job("b", trainers=2, gpus=2, samplers=1)
    first.deliver("trainingjobs")
    first.look("b")
    faults.next = {("PUT", "b"): "late"}
    assert first.attempt(first.assignment.decide)
    first.election.is_leader = False
    world.job("a", trainers=2, gpus=2, samplers=1)

    def land(method: str, plural: str, name: str) -> str:
        """Let it arrive between two writes of the second."""
        if method == "PUT" and name == lands_before and first.connection.under_way:
            first.connection.land()
        return ""

    second = Process(world, Connection(world, land))
    second.look("a")
    second.attempt(second.assignment.decide)
    second.settle(20)
    while first.connection.under_way:
        first.connection.land()
    second.settle(20)

    assert_nothing_is_given_twice(world)
    assert {status_of(world, name)["phase"] for name in "ab"} == {"Running"}


def test_a_late_write_that_lands_before_the_fence_is_seen(
    world: World, faults: ScriptedFaults
) -> None:
    first = process_of(world, faults)
    world.job("b", gpus=8)
    first.deliver("trainingjobs")
    first.look("b")
    faults.next = {("PUT", "b"): "late"}
    assert first.attempt(first.assignment.decide)
    second = Process(world)
    first.connection.land()
    world.job("a", gpus=8)
    second.deliver("trainingjobs")
    second.look("a")
    second.cut()

    second.attempt(second.assignment.decide)
    second.settle()

    assert_nothing_is_given_twice(world)


def test_a_leader_that_waits_for_nothing_writes_nothing(world: World) -> None:
    """Fencing costs a write for each workload that waits, and none for the others."""
    first = Process(world)
    world.job("a")
    world.job("b")
    first.settle()
    second = Process(world)
    methods: list[str] = []
    second.connection.fault = lambda method, plural, name: methods.append(method) or ""

    second.settle()

    assert "PUT" not in methods


def test_a_late_answer_does_not_bring_back_a_pod_that_is_gone(world: World) -> None:
    process = Process(world)
    world.foreign_pod("late", "n0", 8)
    answer = world.get("pods", NAMESPACE, "late")
    world.delete("pods", NAMESPACE, "late", at_once=True)
    process.relist("pods")

    process.caches.note(PODS, answer)

    assert not list(process.caches.pods())


def test_a_conflict_whose_reading_fails_is_settled_before_the_next_decision(
    world: World, faults: ScriptedFaults
) -> None:
    process = process_of(world, faults)
    world.job("a")
    process.deliver("trainingjobs")
    process.look("a")
    world.edit("trainingjobs", "a", suspend=True)
    faults.next = {("GET", "a"): "request"}
    assert process.attempt(process.assignment.decide)
    reads: list[str] = []
    process.connection.fault = lambda method, plural, name: reads.append(method) or ""

    process.assignment.decide()

    assert reads == ["PUT", "GET"]
    record = next(iter(process.caches.jobs()))
    assert record.content == world.get(JOBS.plural, NAMESPACE, "a")


def test_answers_of_the_server_say_what_is_known() -> None:
    unknown = [0, 408, 500, 502, 503, 504]
    known = [400, 401, 403, 404, 409, 410, 413, 422, 429]

    assert all(ApiError(status, "", "").is_outcome_unknown for status in unknown)
    assert not any(ApiError(status, "", "").is_outcome_unknown for status in known)
