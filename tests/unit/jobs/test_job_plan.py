"""The plan for one job: what is done next, in every stage of its life."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.plan.actions import Plan
from tinsmith_jobs.plan.failure_policy import avoided_nodes
from tinsmith_jobs.plan.job_plan import plan_job
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import Job, Observed, PodPhase, PodView, Report
from tinsmith_jobs.plan.status_transitions import assign_nodes
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.spec_codec import SpecError, decode_job
from tinsmith_jobs.status import Placement, Saved, Status
from tinsmith_jobs.status_codec import decode_status, encode_status

NOW = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)
KEY = NamespacedName("TrainingJob", "team-a", "math")
LIMITS = Limits(backoff_base_s=10.0, backoff_max_s=300.0, endpoint="gateway:7077")


def make_job(**fields: Any) -> Job:
    """Return a job with a trainer of 8 GPUs, two samplers and a driver."""
    spec = {
        "method": {"type": "rl", "maxSteps": 100},
        "model": {"name": "tiny", "source": "hf://org/tiny"},
        "roles": {"trainer": {"gpus": 8}, "sampler": {"replicas": 2, "gpus": 1}},
        **fields,
    }
    return Job(KEY, "uid-1", 1, NOW, decode_job("math", spec), "", Status())


class Life:
    """A job, the pods that its plans made, and the passing of time."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.now = NOW
        self.pods: dict[str, PodView] = {}
        self.lost: frozenset[str] = frozenset()
        self.cordoned: frozenset[str] = frozenset()
        self.report: Report | None = None
        self.plan = Plan(status=job.status)
        self.ready = True

    def step(self, after_s: float = 0.0) -> Plan:
        """Plan once, and do what the plan says."""
        self.now += datetime.timedelta(seconds=after_s)
        observed = Observed(
            pods=dict(self.pods),
            lost_nodes=self.lost,
            cordoned_nodes=self.cordoned,
            report=self.report,
        )
        self.plan = plan_job(self.job, observed, self.now, LIMITS)
        for deletion in self.plan.delete:
            pod = self.pods[deletion.name]
            if pod.has_ended or not pod.node:
                del self.pods[deletion.name]
            else:
                self.pods[deletion.name] = replace(pod, is_deleting=True)
        for entry in self.plan.create:
            assert entry.pod not in self.pods
            self.pods[entry.pod] = PodView(
                entry.pod,
                f"uid-of-{entry.pod}",
                entry.role,
                entry.index,
                phase=PodPhase.RUNNING if self.ready else PodPhase.PENDING,
                is_ready=self.ready,
                node=entry.node or "anywhere",
            )
        self.job = replace(self.job, status=self.plan.status)
        return self.plan

    def settle(self, num_steps: int = 6) -> Status:
        """Plan until nothing changes."""
        for _ in range(num_steps):
            self.step()
        return self.job.status

    def give_nodes(self) -> None:
        """Do what the assignment does for a job that waits, or misses pods."""
        held = {(entry.role, entry.index) for entry in self.job.status.assignments}
        placements = [
            Placement(role, index, node, Resources(gpus=8))
            for role, index, node in (
                ("trainer", 0, "n1"),
                ("sampler", 0, "n2"),
                ("sampler", 1, "n2"),
            )
            if (role, index) not in held
        ]
        moved = [replace(p, node="n3") if p.node in self.lost else p for p in placements]
        self.job = replace(self.job, status=assign_nodes(self.job, moved, self.now))

    def run(self) -> Status:
        """Bring the job to Running."""
        self.step()
        self.give_nodes()
        status = self.settle()
        assert status.phase is Phase.RUNNING
        return status

    def change(self, **fields: Any) -> None:
        """Change the spec."""
        assert self.job.spec is not None
        self.job = replace(
            self.job,
            spec=replace(self.job.spec, **fields),
            generation=self.job.generation + 1,
        )

    def pod(self, role: str, index: int = 0) -> PodView:
        """Return the current pod of a role."""
        entry = self.job.status.assigned_to(role, index)
        assert entry is not None
        return self.pods[entry.pod]

    def set_pod(self, pod: PodView, **fields: Any) -> None:
        """Change what is seen of a pod."""
        self.pods[pod.name] = replace(pod, **fields)

    def fail(self, role: str, exit_code: int, problem: str = "") -> None:
        """End the pod of a role badly."""
        self.set_pod(
            self.pod(role),
            phase=PodPhase.FAILED,
            is_ready=False,
            exit_code=exit_code,
            problem=problem,
        )

    def remove_deleted(self) -> None:
        """Let pods that were told to go be gone."""
        self.pods = {name: pod for name, pod in self.pods.items() if not pod.is_deleting}


def test_a_new_job_queues_and_makes_no_pod() -> None:
    life = Life(make_job())

    plan = life.step()

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
    job = Job(KEY, "uid-1", 1, NOW, None, str(caught.value), Status())

    status = plan_job(job, Observed(), NOW, LIMITS).status

    assert status.phase is Phase.FAILED
    assert status.failure is not None
    assert "method rl samples, so it needs spec.roles.sampler" in status.failure.message


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
    placements = [Placement("trainer", i, f"n{i}", Resources(gpus=8)) for i in range(2)]
    life.job = replace(life.job, status=assign_nodes(life.job, placements, NOW))
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
