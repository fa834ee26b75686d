"""A pod that does not end holds neither the end of its job nor its keys for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.job_life import Life, make_job

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.plan.actions import Plan

GRACE_S = 120
OVERDUE_S = GRACE_S + 15 + 360
"""The driver's grace, the margin of a cluster, and what the limits say of other pods."""


def stuck(**spec: object) -> Life:
    """Return a running job that is told to stop and whose pods do not end."""
    scheduling = {"preemptionGraceSeconds": GRACE_S}
    life = Life(make_job(scheduling=scheduling))
    life.run()
    life.job = replace(life.job, generation=2, spec=make_job(scheduling=scheduling, **spec).spec)
    life.step()
    return life


def overdue(plan: Plan) -> bool:
    """Whether a plan says that pods are overdue."""
    found = plan.status.condition(conditions.TERMINATION_OVERDUE)
    return found is not None and found.is_true


def test_a_cancelled_job_ends_though_a_pod_stays_in_terminating() -> None:
    life = stuck(cancel=True)

    before = life.step(OVERDUE_S - 1)
    assert before.status.phase is Phase.CANCELLING
    assert before.key_epochs
    assert not overdue(before)

    plan = life.step(1)
    assert plan.status.phase is Phase.CANCELLED
    assert not plan.key_epochs
    assert not plan.status.assignments
    condition = plan.status.condition(conditions.TERMINATION_OVERDUE)
    assert condition is not None
    assert condition.is_true
    assert condition.reason == conditions.POD_STUCK
    assert "math-trainer-0-e1 on n1" in condition.message
    assert any(event.reason == conditions.POD_STUCK and event.is_warning for event in plan.events)


def test_it_is_said_until_the_pod_is_gone() -> None:
    life = stuck(cancel=True)
    life.step(OVERDUE_S)

    assert overdue(life.step(5))
    assert overdue(life.step(3600))
    life.pods.clear()
    assert not overdue(life.step(5))
    assert life.plan.status.phase is Phase.CANCELLED


def test_an_ended_job_gives_its_nodes_and_keys_back_too() -> None:
    life = stuck(activeDeadlineSeconds=1)
    assert life.step(2).status.phase is Phase.FAILED
    assert life.step(1).key_epochs

    plan = life.step(OVERDUE_S)

    assert not plan.key_epochs
    assert not plan.status.assignments
    assert overdue(plan)


def test_a_suspended_job_is_suspended_and_goes_on_elsewhere() -> None:
    life = stuck(suspend=True)
    plan = life.step(OVERDUE_S)
    assert plan.status.phase is Phase.SUSPENDED
    assert overdue(plan)
    assert not plan.key_epochs


@pytest.mark.parametrize("after_s", [1.0, 60.0])
def test_pods_that_end_in_time_leave_no_condition(after_s: float) -> None:
    life = stuck(cancel=True)
    life.pods.clear()
    plan = life.step(after_s)
    assert plan.status.phase is Phase.CANCELLED
    assert plan.status.condition(conditions.TERMINATION_OVERDUE) is None
