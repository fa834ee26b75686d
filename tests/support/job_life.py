"""A training job of the plan's tests: its pods do what the plan says, and time passes by steps."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.plan.actions import Plan
from tinsmith_jobs.plan.job_plan import plan_job
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import Observed, ObservedJob, PodPhase, PodView, Report
from tinsmith_jobs.plan.status_transitions import assign_nodes
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.spec_codec import decode_job
from tinsmith_jobs.status import Binding, Status

NOW = datetime.datetime(2026, 11, 22, 12, 0, tzinfo=datetime.UTC)
KEY = NamespacedName("TrainingJob", "team-a", "math")
LIMITS = Limits(backoff_base_s=10.0, backoff_max_s=300.0, endpoint="gateway:7077")


def make_job(**fields: Any) -> ObservedJob:
    """Return a job with a trainer of 8 GPUs, two samplers and a driver."""
    spec = {
        "method": {"type": "rl", "maxSteps": 100},
        "model": {"name": "tiny", "source": "hf://org/tiny"},
        "roles": {"trainer": {"gpus": 8}, "sampler": {"replicas": 2, "gpus": 1}},
        **fields,
    }
    return ObservedJob(KEY, "uid-1", 1, NOW, decode_job("math", spec), "", Status())


class Life:
    """A job, the pods that its plans made, and the passing of time."""

    def __init__(self, job: ObservedJob) -> None:
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
        bindings = [
            Binding(role, index, node, Resources(gpus=8))
            for role, index, node in (
                ("trainer", 0, "n1"),
                ("sampler", 0, "n2"),
                ("sampler", 1, "n2"),
            )
            if (role, index) not in held
        ]
        moved = [replace(p, node="n3") if p.node in self.lost else p for p in bindings]
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
