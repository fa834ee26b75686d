"""A pod that does not end holds neither the end of its job nor its keys for ever."""

from __future__ import annotations

import datetime
from dataclasses import replace

from tests.support.job_life import LIMITS, Life, make_job

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.plan.actions import Plan

POD_GRACE_S = 60
SCHEDULING = {"preemptionGraceSeconds": 120}
DRIVER_GIVEN_UP_S = 120 + 15
OVERDUE_S = POD_GRACE_S + LIMITS.termination_s
"""After the time that a pod was told to go."""


class StuckLife(Life):
    """A running job that is told to stop, and whose pods do not end."""

    def __init__(self, **spec: object) -> None:
        super().__init__(make_job(scheduling=SCHEDULING))
        self.run()
        self.job = replace(
            self.job, generation=2, spec=make_job(scheduling=SCHEDULING, **spec).spec
        )

    def step(self, after_s: float = 0.0) -> Plan:
        """Plan once; what is told to go gets its time to end in, as the cluster writes it."""
        plan = super().step(after_s)
        end_by = self.now + datetime.timedelta(seconds=POD_GRACE_S)
        for name, pod in self.pods.items():
            if pod.is_deleting and pod.end_by is None:
                self.pods[name] = replace(pod, end_by=end_by)
        return plan

    def tell_all(self) -> None:
        """Go on until all pods were told to go: first the driver, then the others."""
        self.step()
        self.step(DRIVER_GIVEN_UP_S)
        assert all(pod.is_deleting for pod in self.pods.values())


def overdue(plan: Plan) -> bool:
    """Whether a plan says that pods are overdue."""
    found = plan.status.condition(conditions.TERMINATION_OVERDUE)
    return found is not None and found.is_true


def test_a_cancelled_job_ends_though_a_pod_stays_in_terminating() -> None:
    life = StuckLife(cancel=True)
    life.tell_all()

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


def test_no_pod_is_given_up_before_it_was_told_to_go() -> None:
    life = StuckLife(cancel=True)
    life.step()

    # The controller was away: the driver is overdue, the others are told only now.
    plan = life.step(24 * 3600)
    assert plan.delete
    assert plan.status.phase is Phase.CANCELLING
    assert life.step(5).status.phase is Phase.CANCELLING
    assert life.step(OVERDUE_S).status.phase is Phase.CANCELLED


def test_it_is_said_until_the_pod_is_gone() -> None:
    life = StuckLife(cancel=True)
    life.tell_all()
    life.step(OVERDUE_S)

    assert overdue(life.step(5))
    assert overdue(life.step(3600))
    life.pods.clear()
    assert not overdue(life.step(5))
    assert life.plan.status.phase is Phase.CANCELLED


def test_an_ended_job_gives_its_nodes_and_keys_back_too() -> None:
    life = StuckLife(activeDeadlineSeconds=1)
    assert life.step(2).status.phase is Phase.FAILED
    life.tell_all()
    assert life.plan.key_epochs

    plan = life.step(OVERDUE_S)

    assert not plan.key_epochs
    assert not plan.status.assignments
    assert overdue(plan)


def test_a_suspended_job_is_suspended_all_the_same() -> None:
    life = StuckLife(suspend=True)
    life.tell_all()
    plan = life.step(OVERDUE_S)
    assert plan.status.phase is Phase.SUSPENDED
    assert overdue(plan)
    assert not plan.key_epochs


def test_pods_that_end_in_time_leave_no_condition() -> None:
    life = StuckLife(cancel=True)
    life.tell_all()
    life.pods.clear()
    plan = life.step(1)
    assert plan.status.phase is Phase.CANCELLED
    assert plan.status.condition(conditions.TERMINATION_OVERDUE) is None
