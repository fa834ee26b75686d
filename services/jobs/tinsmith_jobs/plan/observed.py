"""The observation that a plan starts from: pods, nodes and reports of a workload.

The driver process of one machine is observed as a pod too.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.spec import JobSpec, PoolSpec
from tinsmith_jobs.status import Saved, Status


class PodPhase(enum.Enum):
    """Phase of a pod, as Kubernetes has it."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


DISRUPTION = "DisruptionTarget"
"""The condition of a pod that the cluster ends though it has done nothing wrong."""


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod that belongs to a workload.

    Attributes:
        name: Its name.
        uid: Its uid.
        role: Role that it was made for.
        index: Number within the role.
        phase: Its phase.
        is_ready: Whether its Ready condition is True.
        is_deleting: Whether it was told to go.
        end_by: When its grace is over, once it was told to go in a cluster.
        node: Where it runs; empty until it is bound.
        exit_code: Of the container that ended badly, else of the first that ended.
        problem: What the pod says is wrong: a termination message, or why it waits.
        conditions: Types of its conditions that are True.
        template: Hash of what it was made from.
        unschedulable_since: Since when the cluster's scheduler has found no room for it.
        unpulled_image: The image that its node cannot pull; empty if there is none.
        is_turned_away: Whether its node refused to run it, or put it out.
        is_refused: Whether its node refused to run it though it had said that it has room. A node
            that goes down or lacks something says so itself.
    """

    name: str
    uid: str
    role: str
    index: int
    phase: PodPhase = PodPhase.PENDING
    is_ready: bool = False
    is_deleting: bool = False
    end_by: datetime.datetime | None = None
    node: str = ""
    exit_code: int | None = None
    problem: str = ""
    conditions: frozenset[str] = frozenset()
    template: str = ""
    unschedulable_since: datetime.datetime | None = None
    unpulled_image: str = ""
    is_turned_away: bool = False
    is_refused: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether none of its processes runs any more."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)


@dataclass(frozen=True, slots=True)
class Report:
    """What the driver of a job told the scheduler last."""

    step: int
    max_steps: int
    run: str
    update_time: datetime.datetime
    metrics: Mapping[str, float] = field(default_factory=dict)
    checkpoint: Saved | None = None
    message: str = ""
    has_succeeded: bool = False
    """Whether the driver said that it did what the job is for."""
    has_failed: bool = False
    """Whether the driver said that it cannot go on, however often it is started."""
    has_diverged: bool = False
    """Whether a replay of the run gave other bits than the first execution."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that a plan depends on, besides the object itself.

    Attributes:
        pods: Pods whose owner is the workload, by name.
        taken_names: Names that the workload gave to pods of its own and that others have.
        lost_nodes: Nodes that are not ready, or gone.
        cordoned_nodes: Nodes that take no new pods.
        report: The driver's last report.
        templates: What each pod of a pool would be made from now, by its name.
        requests: What a pod of each role would be given now, by name of the role.
        obstacle: What keeps it from being started at all, besides nodes; one sentence.
        missing: A server outside the workload that it needs and that is not there; one sentence.
            Unlike an obstacle, it counts against the startup deadline.
        rejection: Why the cluster will never take one of its pods; one sentence.
        is_queued_elsewhere: Whether another system's queue decides when it runs.
        queue_wait: What it waits for in another system's queue, which suspends and resumes it; one
            sentence. Empty if its author alone does, or if the queue lets it run.
    """

    pods: Mapping[str, PodView] = field(default_factory=dict)
    taken_names: frozenset[str] = frozenset()
    lost_nodes: frozenset[str] = frozenset()
    cordoned_nodes: frozenset[str] = frozenset()
    report: Report | None = None
    templates: Mapping[str, str] = field(default_factory=dict)
    requests: Mapping[str, Resources] = field(default_factory=dict)
    obstacle: str = ""
    missing: str = ""
    rejection: str = ""
    is_queued_elsewhere: bool = False
    queue_wait: str = ""


@dataclass(frozen=True, slots=True)
class ObservedWorkload:
    """A workload as it is in the cluster.

    Attributes:
        key: Its name.
        uid: Its uid.
        generation: Counts changes of the spec.
        created: When it was made.
        spec: The spec that holds; None if that cannot be run.
        spec_error: Why not.
        status: What the controller wrote last.
        is_deleting: Whether it was deleted; the cluster then deletes its pods.
        spec_text: The spec that holds, as JSON.
        edit_error: Why the present spec does not hold, but the one before it.
    """

    key: NamespacedName
    uid: str
    generation: int
    created: datetime.datetime
    spec: JobSpec | PoolSpec | None
    spec_error: str
    status: Status
    is_deleting: bool = False
    spec_text: str = ""
    edit_error: str = ""


@dataclass(frozen=True, slots=True)
class ObservedJob(ObservedWorkload):
    """A TrainingJob as it is in the cluster."""

    spec: JobSpec | None
    retried_end: datetime.datetime | None = None
    """When it had failed, if its author wants it to go on nevertheless."""


@dataclass(frozen=True, slots=True)
class ObservedPool(ObservedWorkload):
    """A TrainerPool as it is in the cluster."""

    spec: PoolSpec | None
