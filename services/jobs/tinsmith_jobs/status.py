"""The status of a job or pool: all that is remembered of it between two plans.

Another replica of the controller, or the same process after `kill -9`, reads it and goes on.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinsmith_jobs.conditions import Condition, Phase, PoolPhase, with_condition
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.quantities import Resources


@dataclass(frozen=True, slots=True)
class Assignment:
    """A pod of the workload and the node that it has.

    Attributes:
        pod: Name of the pod, which no earlier pod had.
        role: Its role.
        index: Its number within the role.
        node: Its node; empty where the cluster's scheduler chooses.
        gpus: GPUs on it.
        epoch: Number under which it was placed.
        uid: Of the pod, once that is stored; a pod that is gone is not made again under its name
            then. Of servers it is stored once all of them are ready: before, no client calls them.
        cpu_milli: Thousandths of a core that it was given there; None where nothing was counted.
        memory_bytes: Memory that it was given there; None likewise.
    """

    pod: str
    role: str
    index: int
    node: str
    gpus: int
    epoch: int
    uid: str = ""
    cpu_milli: int | None = None
    memory_bytes: int | None = None

    @property
    def resources(self) -> Resources | None:
        """What it was given on its node; None if that was not stored."""
        if self.cpu_milli is None or self.memory_bytes is None:
            return None
        return Resources(self.cpu_milli, self.memory_bytes, self.gpus, 1)


@dataclass(frozen=True, slots=True)
class Binding:
    """A pod and the node that it is given; stored as an `Assignment` when the pod has a name."""

    role: str
    index: int
    node: str
    resources: Resources


@dataclass(frozen=True, slots=True)
class RoleStatus:
    """Pods of one role."""

    name: str
    desired: int
    ready: int
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint."""

    name: str
    step: int
    uri: str = ""
    time: datetime.datetime | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What the driver reported last."""

    step: int
    max_steps: int
    run: str
    update_time: datetime.datetime
    metrics: Mapping[str, float]
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed, or a pod last did."""

    reason: str
    message: str
    role: str = ""
    pod: str = ""
    node: str = ""
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node that refused a pod of the workload."""

    node: str
    time: datetime.datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The status of a job or pool; which fields are set depends on its kind."""

    phase: Phase | PoolPhase = Phase.PENDING
    observed_generation: int = 0
    waiting_for: str = ""
    conditions: tuple[Condition, ...] = ()
    epoch: int = 0
    assignments: tuple[Assignment, ...] = ()
    role_statuses: tuple[RoleStatus, ...] = ()
    sampler_selector: str = ""
    restart_count: int = 0
    last_restart_time: datetime.datetime | None = None
    refusals: tuple[Refusal, ...] = ()
    """The last ones, of different nodes."""
    preempted_by: NamespacedName | None = None
    progress: Progress | None = None
    latest: Saved | None = None
    final: Saved | None = None
    failure: Failure | None = None
    queued_time: datetime.datetime | None = None
    start_time: datetime.datetime | None = None
    assigned_time: datetime.datetime | None = None
    """When it got what it holds; None if it holds nothing."""
    stop_time: datetime.datetime | None = None
    """Since when its pods are being stopped."""
    active_s: int = 0
    """Time that it held nodes before that."""
    completion_time: datetime.datetime | None = None
    endpoint: str = ""
    accepted_spec: str = ""
    """The spec that holds, as JSON, while nodes are held; see `accepted_spec`."""
    named_checkpoints: Mapping[str, str] = field(default_factory=dict)
    """Final checkpoints of the jobs that the spec names, by job; see `checkpoint_references`."""
    fencing_token: int | None = None
    """Raised by a new leader before it assigns nodes: no write of the one before can land then."""

    def condition(self, type_: str) -> Condition | None:
        """Return the condition of a type."""
        return next((entry for entry in self.conditions if entry.type == type_), None)

    def with_condition(
        self, type_: str, is_true: bool, reason: str, message: str, now: datetime.datetime
    ) -> Status:
        """Return the status with a condition set; see `conditions.with_condition`."""
        return replace(
            self,
            conditions=with_condition(
                self.conditions,
                type_,
                is_true,
                reason,
                message,
                now=now,
                generation=self.observed_generation,
            ),
        )

    def assigned_to(self, role: str, index: int) -> Assignment | None:
        """Return where a pod of the workload is."""
        return next((e for e in self.assignments if (e.role, e.index) == (role, index)), None)


def with_uids(status: Status, uids: Mapping[str, str]) -> Status:
    """Return a status with the uids of pods, by their names."""
    assignments = tuple(
        replace(entry, uid=uids.get(entry.pod, entry.uid)) for entry in status.assignments
    )
    return replace(status, assignments=assignments)
