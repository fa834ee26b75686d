"""What the controller measures of jobs and nodes, and the priorities that it decides by."""

from __future__ import annotations

import pytest
from tests.support.metrics import metric
from tests.unit.controller.cluster_in_memory import World
from tests.unit.controller.process_in_memory import Process

from tinsmith_controller.assignment_snapshot import priority_of
from tinsmith_controller.objects.conversion import PriorityRecord
from tinsmith_jobs.spec import Scheduling


def of_states(name: str, label: str, *values: str) -> dict[str, float]:
    return {value: metric(f"tinsmith_controller_{name}", **{label: value}) for value in values}


def test_jobs_nodes_and_gpus_are_measured_by_state() -> None:
    world = World()
    for index in range(3):
        world.node(f"n{index}")
    world.node("lost", is_ready=False)
    cordoned = world.get("nodes", "", "n2")
    cordoned["spec"]["unschedulable"] = True
    world.store("nodes", "", cordoned)
    process = Process(world)
    world.job("runs", gpus=4)
    process.settle()
    for name in ("waits", "waits-too"):
        world.job(name, trainers=2, gpus=8)
    process.settle()

    nodes = of_states("nodes", "state", "ready", "lost", "cordoned")
    assert nodes == {"ready": 3, "lost": 1, "cordoned": 1}
    gpus = of_states("gpus", "state", "allocatable", "assigned", "others")
    assert gpus == {"allocatable": 24, "assigned": 4, "others": 0}
    jobs = of_states("jobs", "phase", "Queued", "Running", "Succeeded")
    assert jobs == {"Queued": 2, "Running": 1, "Succeeded": 0}
    assert metric("tinsmith_controller_waiting_jobs", queue="default") == 2


@pytest.mark.parametrize(
    ("name", "has_default", "value"),
    [
        pytest.param("high", True, 9, id="its-own"),
        pytest.param("missing", True, 0, id="one-that-is-not-there"),
        pytest.param("", True, 5, id="the-default-of-the-cluster"),
        pytest.param("", False, 0, id="none"),
    ],
)
def test_a_priority_is_that_of_its_class(name: str, has_default: bool, value: int) -> None:
    priorities = {
        "high": PriorityRecord("high", 9, is_default=False),
        "usual": PriorityRecord("usual", 5, is_default=has_default),
    }
    assert priority_of(Scheduling(priority_class=name), priorities) == value
