"""The plan for one pool: replicas come one by one, and none is down for long."""

from __future__ import annotations

import datetime
from dataclasses import replace

from tinsmith_controller.plan.pool_plan import plan_pool
from tinsmith_jobs.conditions import IMAGE_PULL_FAILED, IMAGE_UNAVAILABLE, PoolPhase
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.plan.actions import Plan
from tinsmith_jobs.plan.failure_policy import avoided_nodes
from tinsmith_jobs.plan.image_pulls import rest_left_s
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import Observed, ObservedPool, PodPhase, PodView
from tinsmith_jobs.plan.status_transitions import assign_pool_nodes
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.spec_codec import decode_pool
from tinsmith_jobs.status import Binding, Status

NOW = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)
KEY = NamespacedName("TrainerPool", "team-a", "shared")
LIMITS = Limits(backoff_base_s=10.0)


class Life:
    """A pool of two trainers, its pods, and the passing of time."""

    def __init__(self) -> None:
        spec = decode_pool(
            "shared",
            {
                "model": {"name": "m", "source": "hf://org/m"},
                "trainer": {"replicas": 2, "gpus": 1},
            },
        )
        status = Status(phase=PoolPhase.PENDING)
        self.pool = ObservedPool(KEY, "uid-1", 1, NOW, spec, "", status)
        self.pods: dict[str, PodView] = {}
        self.template = "old"
        self.now = NOW

    def step(self, after_s: float = 0.0) -> Plan:
        self.now += datetime.timedelta(seconds=after_s)
        templates = {entry.pod: self.template for entry in self.pool.status.assignments}
        observed = Observed(pods=dict(self.pods), templates=templates)
        plan = plan_pool(self.pool, observed, self.now, LIMITS)
        for deletion in plan.delete:
            self.pods[deletion.name] = replace(self.pods[deletion.name], is_deleting=True)
        for entry in plan.create:
            self.pods[entry.pod] = PodView(
                entry.pod,
                f"uid-of-{entry.pod}",
                entry.role,
                entry.index,
                phase=PodPhase.RUNNING,
                is_ready=True,
                node=entry.node,
                template=self.template,
            )
        self.pool = replace(self.pool, status=plan.status)
        return plan

    def give(self, index: int) -> None:
        binding = Binding("trainer", index, f"n{index}", Resources(gpus=1))
        self.pool = replace(self.pool, status=assign_pool_nodes(self.pool, [binding], self.now))

    def run(self) -> None:
        self.step()
        for index in range(2):
            self.give(index)
        for _ in range(3):
            self.step()
        assert self.pool.status.phase is PoolPhase.READY

    def remove_deleted(self) -> None:
        self.pods = {name: pod for name, pod in self.pods.items() if not pod.is_deleting}


def test_one_replica_serves_while_another_waits_for_a_node() -> None:
    life = Life()
    assert life.step().status.phase is PoolPhase.QUEUED
    life.give(0)
    life.step()

    assert life.step().status.phase is PoolPhase.DEGRADED
    assert len(life.pods) == 1


def test_a_replica_that_fails_is_made_again_after_a_pause_and_others_stay() -> None:
    life = Life()
    life.run()
    failed, other = sorted(life.pods.values(), key=lambda pod: pod.index)
    life.pods[failed.name] = replace(failed, phase=PodPhase.FAILED, is_ready=False, exit_code=1)

    plan = life.step()
    life.remove_deleted()
    assert not plan.create
    assert "pauses" in plan.status.waiting_for
    assert not life.step(after_s=5.0).create
    created = life.step(after_s=6.0).create

    assert [entry.index for entry in created] == [failed.index]
    assert created[0].pod != failed.name
    assert other.name in life.pods


def test_a_replica_that_its_node_refuses_wants_another_node() -> None:
    life = Life()
    life.run()
    refused = min(life.pods.values(), key=lambda pod: pod.index)
    life.pods[refused.name] = replace(
        refused, phase=PodPhase.FAILED, is_ready=False, is_turned_away=True, is_refused=True
    )

    status = life.step().status

    assert status.assigned_to("trainer", refused.index) is None
    assert avoided_nodes(status, life.now, LIMITS) == {refused.node}


def test_pods_that_are_out_of_date_are_replaced_one_by_one() -> None:
    life = Life()
    life.run()
    before = set(life.pods)
    life.template = "new"
    for _ in range(12):
        life.step()
        assert sum(not pod.is_deleting for pod in life.pods.values()) >= 1
        life.remove_deleted()

    assert not before & set(life.pods)
    assert {pod.template for pod in life.pods.values()} == {"new"}
    assert life.pool.status.phase is PoolPhase.READY
    assert not life.step().delete


def without_image(life: Life, index: int) -> str:
    """Have the pod of a replica wait for an image that cannot be pulled; return its name."""
    [name] = [entry.pod for entry in life.pool.status.assignments if entry.index == index]
    life.pods[name] = replace(
        life.pods[name], phase=PodPhase.PENDING, is_ready=False, unpulled_image="tinsmith/trainer:1"
    )
    return name


def test_a_replica_without_its_image_gives_its_node_back_and_is_tried_again() -> None:
    life = Life()
    life.run()
    name = without_image(life, 1)

    life.step()
    found = life.pool.status.condition(IMAGE_UNAVAILABLE)
    assert found is not None
    assert "ask its operators (setting image_repository)" in found.message
    assert len(life.pool.status.assignments) == 2

    plan = life.step(LIMITS.image_pull_s)
    status = plan.status
    assert [entry.index for entry in status.assignments] == [0]
    assert status.phase is PoolPhase.DEGRADED
    assert "Its node was given back; it is tried again after 600 s" in status.waiting_for
    assert [event.reason for event in plan.events] == [IMAGE_PULL_FAILED]
    assert rest_left_s(status, life.now, LIMITS) == LIMITS.image_pull_s

    plan = life.step()
    assert [deletion.name for deletion in plan.delete] == [name]
    assert plan.status.waiting_for == status.waiting_for
    life.remove_deleted()

    plan = life.step(LIMITS.image_pull_s)
    assert rest_left_s(plan.status, life.now, LIMITS) == 0
    again = plan.status.condition(IMAGE_UNAVAILABLE)
    assert again is not None
    assert not again.is_true

    life.give(1)
    for _ in range(3):
        life.step()
    assert life.pool.status.phase is PoolPhase.READY


def test_a_pool_that_is_changed_rests_no_longer() -> None:
    life = Life()
    life.run()
    without_image(life, 1)
    life.step()
    life.step(LIMITS.image_pull_s)
    life.pool = replace(life.pool, generation=2)

    plan = life.step()

    assert rest_left_s(plan.status, life.now, LIMITS) == 0
    assert plan.status.failure is None


def test_a_replica_whose_image_was_corrected_is_made_anew_at_once() -> None:
    life = Life()
    life.run()
    name = without_image(life, 1)
    life.step()
    life.template = "new"

    assert [deletion.name for deletion in life.step().delete] == [name]
