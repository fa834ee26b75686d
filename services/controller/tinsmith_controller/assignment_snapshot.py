"""Turns cached objects into the values of the assignment, and its decisions into statuses."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tinsmith_controller.assignment.types import (
    Decisions,
    Node,
    PodKey,
    PodRequest,
    QueueConfig,
    Share,
    Stage,
    Workload,
)
from tinsmith_controller.objects.conversion import (
    NodeRecord,
    PodRecord,
    PriorityRecord,
    WorkloadRecord,
)
from tinsmith_jobs.conditions import ENDED, STOPPING, Phase
from tinsmith_jobs.model_memory import least_gpu_bytes
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.plan.failure_policy import avoided_nodes, backoff_left_s
from tinsmith_jobs.plan.image_pulls import rest_left_s
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import ObservedJob, ObservedPool
from tinsmith_jobs.plan.status_transitions import (
    assign_nodes,
    assign_pool_nodes,
    give_back,
    is_fresh,
    queued,
    wait_for_nodes,
)
from tinsmith_jobs.quantities import GIB, Resources
from tinsmith_jobs.spec import JobSpec, PoolSpec, Role, Rules, Scheduling, requested
from tinsmith_jobs.status import Assignment, Binding, Status

_ELSEWHERE = ""
"""Queue of jobs that another system's queue has let through."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The cluster, as far as the assignment is concerned.

    Attributes:
        workloads: Jobs and pools that take part.
        nodes: All nodes.
    """

    workloads: tuple[Workload, ...]
    nodes: tuple[Node, ...]


def take_snapshot(
    records: Iterable[WorkloadRecord],
    pods: Iterable[PodRecord],
    nodes: Iterable[NodeRecord],
    priorities: Mapping[str, PriorityRecord],
    *,
    blocked: Collection[NamespacedName],
    defaults: Mapping[str, Mapping[str, str]],
    projects: Mapping[str, str],
    limits: Limits,
    now: datetime.datetime,
) -> Snapshot:
    """Return what the assignment decides about.

    Args:
        records: All jobs and pools.
        pods: All pods of the cluster.
        nodes: All nodes.
        priorities: PriorityClasses by name.
        blocked: Workloads that wait for something else than nodes.
        defaults: Requests by kind of role.
        projects: Project by namespace.
        limits: Settings of plans.
        now: The time.
    """
    workloads = []
    pods, nodes = list(pods), list(nodes)
    smallest_gib = min((node.gpu_memory_gib for node in nodes if node.gpu_memory_gib), default=0)
    owned: dict[str, dict[str, PodRecord]] = {}
    for pod in pods:
        if pod.owner_uid:
            owned.setdefault(pod.owner_uid, {})[pod.view.name] = pod
    counted: set[tuple[str, str, str]] = set()
    seats: set[tuple[str, str, int, str]] = set()
    for record in records:
        item = record.item
        if record.is_left_alone or item.is_deleting:
            continue
        own = owned.get(item.uid, {})
        workload = _workload(
            record, own, priorities, blocked, defaults, projects, limits, smallest_gib, now
        )
        if workload is None:
            continue
        workloads.append(workload)
        counted.update(
            (item.key.namespace, item.uid, entry.pod)
            for entry in item.status.assignments
            if entry.node
        )
        seats.update((item.uid, entry.role, entry.index, entry.node) for entry in workload.placed)
    return Snapshot(tuple(workloads), tuple(_nodes(nodes, pods, counted, seats)))


def may_get_nodes(record: WorkloadRecord) -> bool:
    """Return whether a decision about this version of a workload may give it nodes.

    Whether something else is in its way does not count: that may have been there, or not.
    """
    item, status = record.item, record.item.status
    if record.is_left_alone or item.spec is None or item.is_deleting:
        return False
    if isinstance(item, ObservedJob) and status.assigned_time is None:
        return status.phase is Phase.QUEUED or _is_admitted(record)
    return status.phase not in ENDED and bool(_missing(item.spec.roles, status))


def policy_of(policy: QueueConfig) -> QueueConfig:
    """Return the operators' settings with the queue of jobs that others queue."""
    if not policy.queues:
        return policy
    return replace(policy, queues={**policy.queues, _ELSEWHERE: Share()})


def decided_statuses(
    items: Mapping[NamespacedName, ObservedJob | ObservedPool],
    decisions: Decisions,
    now: datetime.datetime,
) -> dict[NamespacedName, Status]:
    """Return the statuses that decisions change: what is given back, then new assignments."""
    changed: dict[NamespacedName, Status] = {}
    for key, lost in decisions.given_back.items():
        item = items.get(key)
        if item is not None:
            changed[key] = give_back(item, lost, now, gives_all=key in decisions.released)
            items = {**items, key: replace(item, status=changed[key])}
    for key, bindings in decisions.assign.items():
        item = items.get(key)
        if isinstance(item, ObservedJob):
            changed[key] = assign_nodes(item, bindings, now)
        elif item is not None:
            changed[key] = assign_pool_nodes(item, bindings, now)
    for key, by in decisions.preempt.items():
        item = items.get(key)
        is_new = key not in decisions.assign and key not in decisions.released
        if isinstance(item, ObservedJob) and is_new and item.status.preempted_by is None:
            changed[key] = replace(item.status, preempted_by=by)
    for key, sentence in decisions.waiting.items():
        item = items.get(key)
        if item is None or key in decisions.preempt or key in decisions.released:
            continue
        status = changed.get(key, item.status)
        told = replace(status, waiting_for=sentence)
        if isinstance(item, ObservedJob) and status.assigned_time is None:
            if is_fresh(item):
                told = queued(replace(told, observed_generation=item.generation), now)
            told = wait_for_nodes(told, sentence, now, is_unfit=key in decisions.unfit)
        if told != status:
            changed[key] = told
    return changed


def priority_of(scheduling: Scheduling, priorities: Mapping[str, PriorityRecord]) -> int:
    """Return the value of a workload's PriorityClass, or of the cluster's default one."""
    name = scheduling.priority_class
    if name:
        return priorities[name].value if name in priorities else 0
    return next((entry.value for entry in priorities.values() if entry.is_default), 0)


def _workload(
    record: WorkloadRecord,
    own: Mapping[str, PodRecord],
    priorities: Mapping[str, PriorityRecord],
    blocked: Collection[NamespacedName],
    defaults: Mapping[str, Mapping[str, str]],
    projects: Mapping[str, str],
    limits: Limits,
    smallest_gib: int,
    now: datetime.datetime,
) -> Workload | None:
    item, status = record.item, record.item.status
    # What cannot be run holds what it has until that is given back.
    spec = item.spec
    roles = () if spec is None else spec.roles
    scheduling = Scheduling(is_preemptible=False) if spec is None else spec.scheduling
    stage = _stage(record, blocked, limits, now)
    if stage is None:
        return None
    placed = _placed(roles, status, defaults)
    is_resting = isinstance(item, ObservedPool) and rest_left_s(status, now, limits) > 0
    missing = tuple(
        PodRequest(role.name, index, requested(role, defaults))
        for role, index in (() if is_resting else _missing(roles, status))
    )
    if not placed and not missing:
        return None
    is_job = isinstance(item, ObservedJob)
    role_rules = {} if spec is None else _role_rules(spec, smallest_gib)
    return Workload(
        key=item.key,
        project=projects.get(item.key.namespace, item.key.namespace) if is_job else "",
        queue=_ELSEWHERE if record.has_own_queue or not is_job else scheduling.queue,
        priority=priority_of(scheduling, priorities),
        created=item.created,
        queued=status.queued_time or item.created,
        stage=stage,
        pods=() if stage is Stage.RELEASING or item.key in blocked else missing,
        placed=placed,
        idle=_pods_where(status, lambda entry: _is_idle(entry, own.get(entry.pod))),
        stuck=_pods_where(status, lambda entry: _is_stuck(own.get(entry.pod), limits, now)),
        rules=replace(scheduling.rules, avoided=avoided_nodes(status, now, limits)),
        role_rules=role_rules,
        unplaced=tuple(
            role.name for role in roles if role.name in role_rules and not role.is_placed
        ),
        is_gang=is_job,
        is_preemptible=is_job and scheduling.is_preemptible,
        assigned=status.assigned_time,
        preempted_by=status.preempted_by,
    )


def _role_rules(spec: JobSpec | PoolSpec, smallest_gib: int) -> dict[str, Rules]:
    """Return which nodes will do for the roles that not all nodes of their workload do for.

    Args:
        spec: Of the workload.
        smallest_gib: Memory of the smallest GPU that is known; 0 if none is. What every GPU holds
            needs no rule.
    """
    found = {}
    for role in spec.roles:
        rules = spec.scheduling.rules_for(role)
        least_bytes = least_gpu_bytes(spec, role) if smallest_gib else 0
        if least_bytes > smallest_gib * GIB:
            rules = replace(rules, least_gpu_bytes=least_bytes)
        if rules is not spec.scheduling.rules and role.replicas:
            found[role.name] = rules
    return found


def _is_admitted(record: WorkloadRecord) -> bool:
    """Return whether a job of which nothing was stored yet takes part nevertheless.

    A look at it finds the same, and stores nothing: what comes of it is stored by the assignment.
    """
    item = record.item
    is_in_order = not record.refusal and not record.has_own_queue
    return isinstance(item, ObservedJob) and is_in_order and is_fresh(item)


def _stage(
    record: WorkloadRecord,
    blocked: Collection[NamespacedName],
    limits: Limits,
    now: datetime.datetime,
) -> Stage | None:
    item, status = record.item, record.item.status
    if isinstance(item, ObservedPool):
        return Stage.HOLDING if status.assignments else Stage.WAITING
    is_stopping = status.stop_time is not None or status.preempted_by is not None
    if status.phase in ENDED or status.phase in STOPPING or is_stopping:
        return Stage.RELEASING if status.assignments else None
    if status.assigned_time is not None:
        return Stage.HOLDING
    pause_s = backoff_left_s(status, now, limits)
    is_in_queue = status.phase is Phase.QUEUED or _is_admitted(record)
    if not is_in_queue or item.key in blocked or pause_s > 0:
        return None
    spec = item.spec
    if spec is None or spec.suspend or spec.cancel:
        return None
    return Stage.WAITING


def _placed(
    roles: Sequence[Role], status: Status, defaults: Mapping[str, Mapping[str, str]]
) -> tuple[Binding, ...]:
    """Return the pods that have a node, with what was given to them, whatever the spec says now."""
    by_name = {role.name: role for role in roles}
    placed = []
    for entry in status.assignments:
        if not entry.node:
            continue
        resources = entry.resources
        if resources is None:
            # A release before this one stored GPUs alone.
            role = by_name.get(entry.role)
            asked = requested(role, defaults) if role is not None else Resources(pods=1)
            resources = replace(asked, gpus=entry.gpus)
        placed.append(Binding(entry.role, entry.index, entry.node, resources))
    return tuple(placed)


def _pods_where(status: Status, holds: Callable[[Assignment], bool]) -> frozenset[PodKey]:
    return frozenset(
        (entry.role, entry.index) for entry in status.assignments if entry.node and holds(entry)
    )


def _is_idle(entry: Assignment, pod: PodRecord | None) -> bool:
    return pod is None or pod.has_ended or pod.node != entry.node


def _is_stuck(pod: PodRecord | None, limits: Limits, now: datetime.datetime) -> bool:
    since = pod.view.unschedulable_since if pod is not None else None
    if since is None or pod is None or pod.view.is_deleting:
        return False
    return (now - since).total_seconds() >= limits.unschedulable_s


def _missing(roles: Sequence[Role], status: Status) -> list[tuple[Role, int]]:
    """Return the pods that want a node."""
    held = {(entry.role, entry.index) for entry in status.assignments if entry.node}
    return [
        (role, index)
        for role in roles
        if role.is_placed
        for index in range(role.replicas)
        if (role.name, index) not in held
    ]


def _nodes(
    nodes: Iterable[NodeRecord],
    pods: Iterable[PodRecord],
    counted: Collection[tuple[str, str, str]],
    seats: Collection[tuple[str, str, int, str]],
) -> Iterable[Node]:
    """Yield nodes with what is used by pods that no workload is counted for."""
    used: dict[str, Resources] = {}
    others: dict[str, Resources] = {}
    for pod in pods:
        if not pod.node or pod.has_ended:
            continue
        owner = pod.owner
        if owner is not None and (owner.namespace, pod.owner_uid, pod.view.name) in counted:
            continue
        used[pod.node] = used.get(pod.node, Resources()) + pod.resources
        # A pod that is being replaced leaves its seat to the next one.
        is_own = (pod.owner_uid, pod.view.role, pod.view.index, pod.node) in seats
        if not pod.view.is_deleting and not is_own:
            others[pod.node] = others.get(pod.node, Resources()) + pod.resources
    for node in nodes:
        yield Node(
            name=node.name,
            allocatable=node.allocatable,
            used=used.get(node.name, Resources()),
            others=others.get(node.name, Resources()),
            labels=node.labels,
            taints=node.taints,
            is_ready=node.is_ready,
            is_cordoned=node.is_cordoned,
            gpu_product=node.gpu_product,
            gpu_memory_gib=node.gpu_memory_gib,
        )
