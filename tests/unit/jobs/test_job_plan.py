"""The plan for one job: what is done next, in every stage of its life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.job_life import KEY, LIMITS, NOW, Life, make_job

from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.plan.failure_policy import avoided_nodes
from tinsmith_jobs.plan.job_plan import plan_job
from tinsmith_jobs.plan.observed import Observed, ObservedJob, PodPhase, Report
from tinsmith_jobs.spec_reader import SpecError
from tinsmith_jobs.status import Saved, Status
from tinsmith_jobs.status_codec import decode_status, encode_status


def test_a_new_job_stores_nothing_before_an_assignment_and_makes_no_pod() -> None:
    life = Life(make_job())

    plan = life.step()

    assert plan.status == Status()
    assert not plan.create


def test_a_new_job_that_waits_for_another_systems_queue_says_that_it_is_queued() -> None:
    plan = plan_job(make_job(), Observed(is_queued_elsewhere=True), NOW, LIMITS)

    assert plan.status.phase is Phase.QUEUED
    assert plan.status.queued_time == NOW
    assert not plan.create


def test_names_are_stored_before_pods_are_made() -> None:
    life = Life(make_job())
    life.step()
    life.give_nodes()
    stored = {entry.pod for entry in life.job.status.assignments}

    plan = life.step()

    assert {entry.pod for entry in plan.create} <= stored


def test_the_driver_starts_when_everything_else_is_ready() -> None:
    life = Life(make_job())
    life.ready = False
    life.step()
    life.give_nodes()
    life.settle()
    assert {pod.role for pod in life.pods.values()} == {"trainer", "sampler"}
    assert life.job.status.phase is Phase.STARTING
    assert "trainer 0 on node n1 is not ready" in life.job.status.waiting_for

    for pod in list(life.pods.values()):
        life.set_pod(pod, phase=PodPhase.RUNNING, is_ready=True)
    life.step()

    assert "driver" in {pod.role for pod in life.pods.values()}


def test_a_driver_that_ends_with_0_ends_the_job_and_then_its_pods() -> None:
    life = Life(make_job())
    life.run()
    life.report = Report(
        100, 100, "projects/p/trainingRuns/r", NOW, {"reward": 0.9}, Saved("c/final", 100)
    )
    life.set_pod(life.pod("driver"), phase=PodPhase.SUCCEEDED, is_ready=False, exit_code=0)

    plan = life.step()
    status = plan.status

    assert status.phase is Phase.SUCCEEDED
    assert status.final == Saved("c/final", 100)
    assert not plan.delete, "nobody could tell the end without its pod, were it not stored"
    assert life.step().delete
    assert life.job.status.assignments, "nodes are held until the pods are gone"

    life.remove_deleted()
    assert not life.step().status.assignments
    assert [pod.role for pod in life.pods.values()] == ["driver"], "its log can still be read"


def test_a_lost_node_is_replaced_under_a_new_name_and_the_rest_runs_on() -> None:
    life = Life(make_job())
    life.run()
    trainer, sampler = life.pod("trainer"), life.pod("sampler")
    life.lost = frozenset({"n1"})

    status = life.step().status
    assert status.phase is Phase.RESTARTING
    assert status.assigned_to("trainer", 0) is None, "the node is given up, to be placed anew"

    life.give_nodes()
    status = life.settle()
    replacement = life.pod("trainer")
    assert status.phase is Phase.RUNNING
    assert replacement.node == "n3"
    assert replacement.name != trainer.name
    assert life.pod("sampler") == sampler
    assert status.restart_count == 0, "a lost node is no failure of the job"


def test_a_pod_that_its_node_turns_away_is_placed_anew_and_counts() -> None:
    life = Life(make_job())
    life.run()
    life.fail("trainer", 0, "OutOfnvidia.com/gpu: Node didn't have enough resource")
    life.set_pod(life.pod("trainer"), exit_code=None, is_turned_away=True, is_refused=True)

    status = life.step().status

    assert status.assigned_to("trainer", 0) is None
    assert status.assigned_to("sampler", 0) is not None
    assert status.restart_count == 1
    # It says that it has room, as before; it is left alone for a while.
    assert avoided_nodes(status, life.now, LIMITS) == {"n1"}
    assert avoided_nodes(decode_status(encode_status(status)), life.now, LIMITS) == {"n1"}
    status = life.step(after_s=LIMITS.refusal_s).status
    assert avoided_nodes(status, life.now, LIMITS) == set()
    assert status.refusals == ()


@pytest.mark.parametrize(
    ("exit_code", "rules", "phase", "count"),
    [
        pytest.param(3, [], Phase.RESTARTING, 1, id="restarts"),
        pytest.param(1, [], Phase.FAILED, 0, id="a-restart-would-not-help"),
        pytest.param(2, [], Phase.FAILED, 0, id="settings-of-the-driver"),
        pytest.param(143, [], Phase.RESTARTING, 0, id="saved-and-stopped"),
        pytest.param(
            42, [{"action": "FailJob", "exitCodes": [42]}], Phase.FAILED, 0, id="policy-fails"
        ),
        pytest.param(
            1, [{"action": "Ignore", "roles": ["driver"]}], Phase.RESTARTING, 0, id="ignored"
        ),
    ],
)
def test_the_end_of_a_driver(
    exit_code: int, rules: list[dict[str, Any]], phase: Phase, count: int
) -> None:
    life = Life(make_job(failurePolicy={"rules": rules}))
    life.run()
    life.fail("driver", exit_code, "the learning rate is negative")

    status = life.step().status

    assert status.phase is phase
    assert status.restart_count == count
    if phase is Phase.FAILED:
        assert status.failure is not None
        assert "the learning rate is negative" in status.failure.message


@pytest.mark.parametrize(
    ("role", "rules", "phase"),
    [
        pytest.param("driver", [], Phase.FAILED, id="driver"),
        pytest.param("sampler", [], Phase.RESTARTING, id="another-role"),
        pytest.param("driver", [{"action": "RestartRole"}], Phase.RESTARTING, id="policy-wins"),
    ],
)
def test_a_driver_that_reports_that_it_can_not_go_on_is_not_restarted(
    role: str, rules: list[dict[str, Any]], phase: Phase
) -> None:
    life = Life(make_job(failurePolicy={"rules": rules}))
    life.run()
    life.report = Report(9, 10, "r", life.now, has_failed=True)
    life.fail(role, 7)

    assert life.step().status.phase is phase


def test_restarts_pause_longer_each_time_and_end() -> None:
    life = Life(make_job(backoffLimit=2))
    life.run()
    pauses = []
    for _ in range(2):
        life.fail("driver", 3)
        before = life.now
        life.step()
        life.remove_deleted()
        while not life.plan.create:
            life.step(after_s=1.0)
        pauses.append((life.now - before).total_seconds())
        life.settle()

    life.fail("driver", 3, "out of luck")
    status = life.step().status

    assert pauses == [10.0, 20.0]
    assert status.phase is Phase.FAILED
    assert status.failure is not None
    assert "out of luck" in status.failure.message
    assert "backoffLimit is 2" in status.failure.message


def test_a_pod_that_failed_stays_until_the_failure_is_stored() -> None:
    life = Life(make_job())
    life.run()
    failed = life.pod("sampler").name
    life.fail("sampler", 5)

    plan = life.step()

    assert plan.status.restart_count == 1
    assert failed not in {deletion.name for deletion in plan.delete}
    assert failed in {deletion.name for deletion in life.step().delete}


def test_restart_job_replaces_every_pod_on_its_node() -> None:
    rule = {"action": "RestartJob", "roles": ["trainer"]}
    life = Life(make_job(failurePolicy={"rules": [rule]}))
    life.run()
    before = {entry.pod: entry.node for entry in life.job.status.assignments}
    life.fail("trainer", 5)

    status = life.step().status

    assert {entry.node for entry in status.assignments} == set(before.values())
    assert not {entry.pod for entry in status.assignments} & set(before)


def _suspend(life: Life) -> None:
    life.change(suspend=True)


def _cancel(life: Life) -> None:
    life.change(cancel=True)


def _preempt(life: Life) -> None:
    other = NamespacedName("TrainingJob", "team-b", "urgent")
    life.job = replace(life.job, status=replace(life.job.status, preempted_by=other))


@pytest.mark.parametrize(
    ("tell", "leaving", "left"),
    [
        pytest.param(_suspend, Phase.SUSPENDING, Phase.SUSPENDED, id="suspend"),
        pytest.param(_cancel, Phase.CANCELLING, Phase.CANCELLED, id="cancel"),
        pytest.param(_preempt, Phase.PREEMPTING, Phase.QUEUED, id="preempt"),
    ],
)
def test_a_job_that_is_told_to_stop_saves_first(
    tell: Callable[[Life], None], leaving: Phase, left: Phase
) -> None:
    life = Life(make_job())
    life.run()
    tell(life)

    plan = life.step()
    assert plan.status.phase is leaving
    assert [life.pods[d.name].role for d in plan.delete] == ["driver"]
    assert plan.delete[0].grace_s == 120
    assert plan.key_epochs, "the driver needs its key to save"
    assert not life.step(after_s=30.0).delete, "the rest waits for the driver"

    life.remove_deleted()
    plan = life.step()
    assert {life.pods[d.name].role for d in plan.delete} == {"trainer", "sampler"}
    assert plan.status.assignments, "nodes are held until the pods are gone"

    life.remove_deleted()
    plan = life.step(after_s=30.0)
    assert plan.status.phase is left
    assert not plan.status.assignments
    assert not plan.key_epochs
    assert plan.status.active_s == 60


def test_a_driver_that_does_not_end_in_its_grace_holds_nobody_up() -> None:
    life = Life(make_job(scheduling={"preemptionGraceSeconds": 60}))
    life.run()
    _preempt(life)
    life.step()

    plan = life.step(after_s=76.0)

    assert {life.pods[d.name].role for d in plan.delete} == {"trainer", "sampler"}


def test_a_resumed_job_queues_and_gets_new_names() -> None:
    life = Life(make_job())
    life.run()
    names = {entry.pod for entry in life.job.status.assignments}
    life.change(suspend=True)
    for _ in range(4):
        life.step()
        life.remove_deleted()
    assert life.job.status.phase is Phase.SUSPENDED

    life.change(suspend=False)
    assert life.run().phase is Phase.RUNNING
    assert not names & {entry.pod for entry in life.job.status.assignments}


def test_a_start_that_takes_too_long_fails_with_what_is_missing() -> None:
    life = Life(make_job(startupDeadlineSeconds=60))
    life.ready = False
    life.step()
    life.give_nodes()
    life.settle()
    life.set_pod(life.pod("trainer"), problem="ImagePullBackOff: no such image")

    status = life.step(after_s=61.0).status

    assert status.phase is Phase.FAILED
    assert status.failure is not None
    assert "ImagePullBackOff: no such image" in status.failure.message


def test_waiting_for_a_node_does_not_count_as_starting() -> None:
    life = Life(make_job(startupDeadlineSeconds=60))
    life.run()
    life.lost = frozenset({"n1"})
    life.step()

    assert life.step(after_s=600.0).status.phase is Phase.RESTARTING


def test_the_active_deadline_adds_up_over_attempts() -> None:
    life = Life(make_job(activeDeadlineSeconds=100))
    life.run()
    life.step(after_s=60.0)
    _preempt(life)
    for _ in range(4):
        life.step()
        life.remove_deleted()
    life.run()

    assert life.step(after_s=30.0).status.phase is Phase.RUNNING
    status = life.step(after_s=10.0).status

    assert status.phase is Phase.FAILED
    assert status.failure is not None
    assert status.failure.reason == "DeadlineExceeded"


def test_a_silent_driver_is_said_to_stall_until_it_reports() -> None:
    life = Life(make_job(stallTimeoutSeconds=60))
    life.run()

    status = life.step(after_s=61.0).status
    condition = status.condition("Stalled")
    assert condition is not None
    assert condition.is_true
    assert "not reported" in status.waiting_for

    life.report = Report(1, 100, "r", life.now, {})
    status = life.step().status
    condition = status.condition("Stalled")
    assert condition is not None
    assert not condition.is_true
    assert status.waiting_for == ""


def test_an_ended_job_is_deleted_after_its_ttl() -> None:
    life = Life(make_job(ttlSecondsAfterFinished=60))
    life.run()
    life.set_pod(life.pod("driver"), phase=PodPhase.SUCCEEDED, exit_code=0)
    life.settle()
    life.remove_deleted()

    assert not life.step(after_s=30.0).delete_self
    assert life.step(after_s=31.0).delete_self


def test_a_job_that_is_long_over_is_released_before_it_is_deleted() -> None:
    life = Life(make_job(ttlSecondsAfterFinished=1))
    life.run()
    life.set_pod(life.pod("driver"), phase=PodPhase.SUCCEEDED, exit_code=0)
    life.settle()
    life.remove_deleted()

    plan = life.step(after_s=60.0)
    assert (plan.key_epochs, plan.status.assignments) == (frozenset(), ())
    assert not plan.delete_self, "its keys are revoked by a plan that changes the status"
    assert life.step().delete_self


def test_fewer_samplers_give_their_nodes_back_when_their_pods_are_gone() -> None:
    life = Life(make_job())
    life.run()
    assert life.job.spec is not None
    roles = tuple(
        replace(role, replicas=1) if role.name == "sampler" else role
        for role in life.job.spec.roles
    )
    life.change(roles=roles)
    second = life.pod("sampler", 1)

    plan = life.step()
    assert [deletion.name for deletion in plan.delete] == [second.name]
    assert plan.status.assigned_to("sampler", 1) is not None

    life.remove_deleted()
    assert life.step().status.assigned_to("sampler", 1) is None


def test_a_spec_that_can_not_be_run_fails_with_its_sentence() -> None:
    with pytest.raises(SpecError) as caught:
        make_job(roles={"trainer": {"gpus": 1}})
    job = ObservedJob(KEY, "uid-1", 1, NOW, None, str(caught.value), Status())

    status = plan_job(job, Observed(), NOW, LIMITS).status

    assert status.phase is Phase.FAILED
    assert status.failure is not None
    assert "method rl samples, so it needs spec.roles.sampler" in status.failure.message
