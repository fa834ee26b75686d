"""Values of the assignment: nodes, workloads, the operators' settings, and decisions.

A workload is a job or a pool. Only pods that want a node chosen for them are here: those with a
GPU, and all trainers and samplers. Drivers and environments go wherever the cluster's scheduler
puts them.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.quantities import Resources
from tinsmith_jobs.spec import Rules
from tinsmith_jobs.status import Binding


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True)
class DescribedNode:
    """What a node of the cluster says of itself.

    Attributes:
        name: Its name.
        allocatable: What pods may ask of it in all.
        labels: Its labels.
        taints: Its taints.
        is_ready: Whether its Ready condition is True.
        is_cordoned: Whether `spec.unschedulable` is set.
        gpu_product: Such as `NVIDIA-H200`; empty if unknown.
        gpu_memory_gib: Memory of one GPU; 0 if unknown.
    """

    name: str
    allocatable: Resources
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    is_ready: bool = True
    is_cordoned: bool = False
    gpu_product: str = ""
    gpu_memory_gib: int = 0


@dataclass(frozen=True, slots=True)
class Node(DescribedNode):
    """A node, and what is taken of it.

    Attributes:
        used: What is taken by pods that are not of any workload here: other people's, and daemons.
        others: The part of `used` that stays, and is no pod of a workload with an assignment here.
    """

    used: Resources = field(default_factory=Resources)
    others: Resources = field(default_factory=Resources)


PodKey = tuple[str, int]
"""A pod of a workload: its role, and its number within the role."""


@dataclass(frozen=True, slots=True)
class PodRequest:
    """A pod that wants a node."""

    role: str
    """Such as `trainer`, `sampler` or `agent/red/trainer`."""
    index: int
    resources: Resources


class Stage(enum.Enum):
    """Whether a workload takes part."""

    WAITING = "waiting"
    """It holds nothing and wants `pods` placed, all or none."""
    HOLDING = "holding"
    """It holds `placed`; `pods` are replacements that are missing, all or none."""
    RELEASING = "releasing"
    """It still holds `placed` and is about to give it back: preempted, suspended, ending."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A job or a pool, as the assignment sees it.

    Attributes:
        key: Its name.
        project: Whose it is; empty for pools, which belong to the operators.
        queue: Queue that it is in.
        priority: Higher goes first, and may preempt lower.
        created: When the object was made.
        queued: Since when it waits; that of a preempted job is the time of its first waiting.
        stage: Whether it waits, holds or releases.
        pods: Pods that want a node now.
        placed: Pods that have one.
        rules: Which nodes will do.
        is_gang: Whether `pods` are placed all or none; those of a pool are placed one by one.
        is_preemptible: Whether it may be asked to give way to a higher priority.
        assigned: When it last got a node; None if it holds nothing.
        preempted_by: On a releasing workload, the one that it gives way to.
        idle: Those of `placed` that no pod is bound for.
        stuck: Those whose pod the cluster's scheduler has refused on its node for a while.
        role_rules: Rules of the roles whose templates ask for more, by name of the role.
        unplaced: Those of them that no node is chosen for, such as a driver.
    """

    key: NamespacedName
    project: str
    queue: str
    priority: int
    created: datetime.datetime
    queued: datetime.datetime
    stage: Stage
    pods: tuple[PodRequest, ...] = ()
    placed: tuple[Binding, ...] = ()
    rules: Rules = field(default_factory=Rules)
    is_gang: bool = True
    is_preemptible: bool = True
    assigned: datetime.datetime | None = None
    preempted_by: NamespacedName | None = None
    idle: frozenset[PodKey] = frozenset()
    stuck: frozenset[PodKey] = frozenset()
    role_rules: Mapping[str, Rules] = field(default_factory=dict)
    unplaced: tuple[str, ...] = ()

    def rules_of(self, role: str) -> Rules:
        """Return which nodes will do for the pods of a role."""
        found = self.role_rules.get(role)
        return self.rules if found is None else replace(found, avoided=self.rules.avoided)

    @property
    def num_gpus_wanted(self) -> int:
        """GPUs of the pods that want a node."""
        return sum(pod.resources.gpus for pod in self.pods)

    @property
    def num_gpus_held(self) -> int:
        """GPUs of the pods that have a node."""
        return sum(pod.resources.gpus for pod in self.placed)


@dataclass(frozen=True, slots=True)
class Share:
    """What a queue or a project may have.

    Attributes:
        max_gpus: GPUs that it may hold at once; None does not limit them.
        weight: Its part of the cluster, relative to others of the same kind.
    """

    max_gpus: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """The operators' settings.

    Attributes:
        queues: By name; if there are any, a queue that is not among them does not exist.
        projects: By name; others have no limit and weight 1.
        backfill_patience_s: How long the first workload that does not fit lets later ones go ahead
            anywhere; after that they only get what it cannot use.
    """

    queues: Mapping[str, Share] = field(default_factory=dict)
    projects: Mapping[str, Share] = field(default_factory=dict)
    backfill_patience_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Decisions:
    """What one pass decided.

    Attributes:
        assign: New bindings by workload, in the order in which they were given.
        preempt: Workloads that have to give way, each with the one that it gives way to.
        waiting: One sentence for each workload that wants nodes and got none; a pool, not all.
        given_back: Pods whose nodes are taken back, by workload; they may be among `assign` anew.
        unfit: Those of `waiting` that would wait even if no other job ran.
        released: Jobs that give back all that they hold, because that is not enough any more.
    """

    assign: Mapping[NamespacedName, tuple[Binding, ...]]
    preempt: Mapping[NamespacedName, NamespacedName]
    waiting: Mapping[NamespacedName, str]
    given_back: Mapping[NamespacedName, frozenset[PodKey]] = field(default_factory=dict)
    unfit: frozenset[NamespacedName] = frozenset()
    released: frozenset[NamespacedName] = frozenset()
