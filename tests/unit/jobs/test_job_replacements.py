"""Pods that are lost or drained are made again; a job that waited has its time to start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.support.job_life import NOW, Life, make_job

from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.plan.observed import PodPhase, Report
from tinsmith_jobs.plan.status_transitions import assign_nodes
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.status import Binding


def _preempt(life: Life) -> None:
    other = NamespacedName("TrainingJob", "team-b", "urgent")
    life.job = replace(life.job, status=replace(life.job.status, preempted_by=other))


def test_a_pod_that_vanished_is_made_again_under_another_name() -> None:
    life = Life(make_job())
    life.run()
    gone = life.pod("sampler")
    life.step()
    del life.pods[gone.name]

    life.settle()

    assert life.pod("sampler").name != gone.name
    assert life.job.status.phase is Phase.RUNNING


def test_the_ranks_of_a_full_trainer_are_replaced_together() -> None:
    life = Life(
        make_job(
            method={"type": "supervised"},
            adapter={"type": "full"},
            roles={"trainer": {"replicas": 2, "gpus": 8}},
        )
    )
    life.step()
    bindings = [Binding("trainer", i, f"n{i}", Resources(gpus=8)) for i in range(2)]
    life.job = replace(life.job, status=assign_nodes(life.job, bindings, NOW))
    life.settle()
    before = {life.pod("trainer", index).name for index in range(2)}
    life.fail("trainer", 5)

    life.settle()
    assert [entry.index for entry in life.step(after_s=11.0).create] == [0]
    life.remove_deleted()  # the other rank, whose place was still taken
    life.step()

    after = {life.pod("trainer", index).name for index in range(2)}
    assert not before & after


@pytest.mark.parametrize(
    ("kind", "said", "phase"),
    [
        pytest.param("rl", False, Phase.SUCCEEDED, id="a-recipe-was-done-already"),
        pytest.param("custom", False, Phase.QUEUED, id="a-program-stopped-as-it-was-told"),
        pytest.param("custom", True, Phase.SUCCEEDED, id="a-program-that-says-it-was-done"),
    ],
)
def test_a_driver_that_was_told_to_stop_and_ends_with_0(
    kind: str, said: bool, phase: Phase
) -> None:
    roles = {
        "trainer": {"gpus": 8},
        "sampler": {"replicas": 2, "gpus": 1},
        "driver": {"template": {"image": "mine:1"}},
    }
    life = Life(make_job(method={"type": kind}, roles=roles))
    life.run()
    _preempt(life)
    life.step()
    life.report = Report(9, 10, "r", life.now, has_succeeded=said)
    life.set_pod(life.pod("driver"), phase=PodPhase.SUCCEEDED, is_ready=False, exit_code=0)
    for _ in range(3):
        life.step()
        life.remove_deleted()

    assert life.step().status.phase is phase


def test_a_job_that_waited_for_a_node_has_all_the_time_to_start_again() -> None:
    life = Life(make_job(startupDeadlineSeconds=60))
    life.run()
    life.lost = frozenset({"n1"})
    life.step()
    life.step(after_s=3600.0)
    life.give_nodes()
    life.ready = False
    life.settle()

    assert life.step(after_s=30.0).status.phase is Phase.RESTARTING
    assert life.step(after_s=31.0).status.phase is Phase.FAILED


@pytest.mark.parametrize(
    "fields", [{"is_deleting": True}, {"conditions": frozenset({"DisruptionTarget"})}]
)
def test_a_program_that_was_drained_is_made_again(fields: dict[str, Any]) -> None:
    roles = {
        "trainer": {"gpus": 8},
        "sampler": {"replicas": 2, "gpus": 1},
        "driver": {"template": {"image": "mine:1"}},
    }
    life = Life(make_job(method={"type": "custom"}, roles=roles))
    life.run()
    first = life.pod("driver")
    life.set_pod(first, phase=PodPhase.SUCCEEDED, is_ready=False, exit_code=0, **fields)
    life.step()
    life.remove_deleted()

    assert life.settle().phase is Phase.RUNNING
    assert life.pod("driver").name != first.name


def test_a_server_that_stops_by_itself_is_made_again_after_a_pause() -> None:
    life = Life(make_job())
    life.run()
    life.set_pod(life.pod("sampler"), phase=PodPhase.SUCCEEDED, is_ready=False, exit_code=0)
    life.step()
    life.remove_deleted()

    assert not life.step().create
    assert life.job.status.restart_count == 0
    assert life.step(after_s=11.0).create


def test_a_pod_that_can_not_start_on_a_cordoned_node_goes_elsewhere() -> None:
    life = Life(make_job())
    life.ready = False
    life.step()
    life.give_nodes()
    life.settle()
    for pod in list(life.pods.values()):
        life.set_pod(pod, node="" if pod.role == "trainer" else pod.node)
    life.cordoned = frozenset({"n1"})

    assert life.step().status.assigned_to("trainer", 0) is None
