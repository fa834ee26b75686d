"""Explains why a workload waits: one concrete sentence, with numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tinsmith_controller.assignment.capacity import (
    CPU,
    GPUS,
    MEMORY,
    Cluster,
    Room,
    seconds,
)
from tinsmith_controller.assignment.gang_assignment import Gang, Group
from tinsmith_controller.assignment.node_filters import (
    Obstacle,
    join,
    no_labels,
    no_memory,
    no_model,
    no_product,
    repelling,
    there_are,
    unmet_rules,
)
from tinsmith_controller.assignment.ordering import tier
from tinsmith_controller.assignment.quotas import Excess
from tinsmith_controller.assignment.types import Node, Taint, Workload
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.quantities import GIB
from tinsmith_jobs.spec import Rules

_MOST_NAMES = 3
_OF_KUBERNETES = ("node.kubernetes.io/", "node-role.kubernetes.io/", "node.cloudprovider.")
_STATES = (
    (Obstacle.CORDON, "{} cordoned"),
    (Obstacle.NOT_READY, "{} not ready"),
    (Obstacle.TAINT, "{} with taints that it does not tolerate"),
    (Obstacle.AVOIDED, "{} that refused its pods lately"),
)

_ON_NODES = (
    (Obstacle.CORDON, "cordoned nodes"),
    (Obstacle.NOT_READY, "nodes that are not ready"),
    (Obstacle.TAINT, "nodes with taints that it does not tolerate"),
    (Obstacle.AVOIDED, "nodes that refused its pods lately"),
)


@dataclass(frozen=True, slots=True)
class UnknownQueue:
    """There is no such queue."""

    queues: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Releasing:
    """Others are about to make room.

    Attributes:
        keys: Those workloads.
        is_preempted: Whether they give way to this workload.
    """

    keys: tuple[NamespacedName, ...]
    is_preempted: bool


@dataclass(frozen=True, slots=True)
class Behind:
    """There is room, and it is kept for another."""

    other: Workload


@dataclass(frozen=True, slots=True)
class NoRoom:
    """There is no room.

    Attributes:
        gang: The pods that it is for.
        empty: The room if no other job ran, where even that would not do; else None.
    """

    gang: Gang
    empty: Room | None


@dataclass(frozen=True, slots=True)
class NoNode:
    """No node will do for pods that none is chosen for; they would keep the others waiting.

    Attributes:
        pods: Pods of one role, with the nodes that would do.
    """

    pods: Group


Verdict = UnknownQueue | Excess | Releasing | Behind | NoRoom | NoNode


def explain(workload: Workload, verdict: Verdict, cluster: Cluster) -> str:
    """Return the sentence."""
    match verdict:
        case UnknownQueue():
            told = f"queue {workload.queue} does not exist; {there_are(verdict.queues)}"
            has_gpus = any(pod.resources.gpus for pod in workload.pods)
            rules = [workload.rules, *workload.role_rules.values()]
            unmet = [unmet_rules(cluster.nodes, each, has_gpus=has_gpus) for each in rules]
            return "; ".join(dict.fromkeys([told, *itertools.chain(*unmet)]))
        case Excess():
            return _explain_excess(workload, verdict)
        case Releasing():
            if not verdict.is_preempted:
                return f"waits for what is ending: {_list(verdict.keys)}"
            jobs = "a lower-priority job" if len(verdict.keys) == 1 else "lower-priority jobs"
            return f"waits for {jobs} to save: {_list(verdict.keys)}"
        case Behind():
            return f"is behind {verdict.other.key}, {_why_behind(workload, verdict.other)}"
        case NoNode():
            return _explain_nodes(verdict.pods, cluster) or "the cluster has no nodes"
        case NoRoom():
            return _explain_room(workload, verdict, cluster)


def _explain_excess(workload: Workload, excess: Excess) -> str:
    what = f"{excess.what} {excess.name}"
    wants = f"the {_noun(workload)} needs {excess.num_wanted}"
    if excess.num_wanted > excess.max_gpus:
        return f"{what} may hold {_gpus(excess.max_gpus)}, and {wants}"
    held = f"{what} holds {excess.num_held} of its {_gpus(excess.max_gpus)}"
    if excess.behind is not None:
        return f"{held}, and keeps the others for {excess.behind}, which has waited longer"
    return f"{held}, and {wants}"


def _why_behind(workload: Workload, other: Workload) -> str:
    if tier(other) < tier(workload):
        is_priority = other.priority > workload.priority
        return "which has a higher priority" if is_priority else "which has lost a pod"
    if seconds(other.queued) <= seconds(workload.queued):
        return "which has waited longer"
    return "whose project has less"


def _explain_room(workload: Workload, verdict: NoRoom, cluster: Cluster) -> str:
    if not cluster.nodes:
        return "the cluster has no nodes"
    gang = verdict.gang
    for group in gang.groups:
        sentence = _explain_nodes(group, cluster)
        if sentence is not None:
            return sentence
    if verdict.empty is not None:
        return _explain_never(workload, gang, verdict.empty, cluster)
    if gang.required is not None:
        return _explain_level(workload, gang, cluster.free)
    needs = _needs(gang)
    stuck = [group for group in gang.groups if _count(group, cluster.free) < len(group.members)]
    return f"{needs}; {_explain_free((stuck or gang.groups)[0], cluster)}"


def _explain_nodes(group: Group, cluster: Cluster) -> str | None:
    """Say why not a single node will ever do, or none does now; None if some do."""
    if not cluster.nodes:
        return None
    told = _explain_nodes_of(group, cluster)
    return f"for the {group.role}: {told}" if told and group.role else told


def _explain_nodes_of(group: Group, cluster: Cluster) -> str | None:
    rules = group.rules
    obstacles = cluster.obstacles(rules, has_gpus=bool(group.amounts[GPUS] > 0))
    left = np.ones(len(cluster.nodes), dtype=np.bool_)
    for obstacle in (Obstacle.PRODUCT, Obstacle.GPU_MEMORY, Obstacle.MODEL, Obstacle.SELECTOR):
        remaining = left & ~obstacles[obstacle]
        if obstacle is Obstacle.MODEL and rules.least_gpu_bytes:
            remaining &= cluster.allocatable[GPUS] > 0  # without a GPU none is too small
        if not remaining.any():
            nodes = [node for node, is_left in zip(cluster.nodes, left, strict=True) if is_left]
            has_gpus = bool(group.amounts[GPUS] > 0)
            told = [_explain_rule(rules, obstacle, nodes)]
            told += unmet_rules(cluster.nodes, rules, has_gpus=has_gpus)
            return "; ".join(dict.fromkeys(told))
        left = remaining
    of = "" if left.all() else "that would do "
    for row, show in _SHOW.items():
        largest = float(cluster.allocatable[row, left].max())
        if group.amounts[row] > largest:
            number = show(largest).split()[0]
            hint = "; with gpus: 0 it runs on a CPU" if row == GPUS and not largest else ""
            return f"no node {of}has {show(group.amounts[row])}: the largest has {number}{hint}"
    if not (left & group.eligible).any():
        counts = {state: int((left & obstacles[state]).sum()) for state, _ in _STATES}
        states = [text.format(counts[state]) for state, text in _STATES if counts[state]]
        nodes = [cluster.nodes[i] for i in np.flatnonzero(left & obstacles[Obstacle.TAINT])]
        taints = _fewest_taints(nodes, rules)
        if taints:
            states.append(f"tolerations of {join(taints[:_MOST_NAMES])} would do")
        return f"none of the {int(left.sum())} nodes {of}can be used: {', '.join(states)}"
    return None


def _fewest_taints(nodes: Iterable[Node], rules: Rules) -> list[str]:
    """Return the taints of the node that is kept closed by the fewest that authors may tolerate."""
    found = [repelling(node.taints, rules) for node in nodes]
    # Kubernetes sets these on nodes that are ill, or run the cluster itself.
    open_ones = [
        sorted(map(_show, taints))
        for taints in found
        if not any(taint.key.startswith(_OF_KUBERNETES) for taint in taints)
    ]
    return min(open_ones, key=lambda each: (len(each), each), default=[])


def _explain_never(workload: Workload, gang: Gang, empty: Room, cluster: Cluster) -> str:
    needs = _needs(gang)
    if gang.required is not None:
        return f"{_explain_level(workload, gang, empty)}, even when no other job runs"
    for group in gang.groups:
        count = _count(group, empty)
        if count < len(group.members):
            pods = _pods(count, group)
            text = f"{needs}; the cluster has room for {pods} when no other job runs"
            if group.amounts[GPUS] > 0:
                held_back = _held_back(group, empty, cluster)
                text += "".join(f"; further {_gpus(count)} {where}" for count, where in held_back)
            return text
    return f"{needs}; they do not fit on the cluster together even when no other job runs"


def _explain_level(workload: Workload, gang: Gang, room: Room) -> str:
    level, label = gang.required, workload.rules.required_level
    assert level is not None
    needs = f"{_needs(gang)} on one value of {label}"
    if not level.num_values:
        return f"{needs}, a label that no node has"
    if len(level.taken) > 1:
        return f"{needs}, and its other pods are on {len(level.taken)} of them"
    group = gang.groups[0]
    by_value = np.bincount(level.values, _fitting(group, room), level.num_values + 1)
    if level.taken:
        most = int(by_value[next(iter(level.taken))])
        return f"{needs}, the one that its other pods are on; it has room for {_pods(most, group)}"
    most = int(by_value[: level.num_values].max())
    room_for = f"room for more than {_pods(most, group)}"
    return f"{needs}; none of its {level.num_values} values has {room_for}"


def _explain_free(group: Group, cluster: Cluster) -> str:
    free = np.maximum(cluster.free, 0)
    row = GPUS if group.amounts[GPUS] > 0 else CPU
    amount = group.amounts[row]
    enough = group.eligible & (free[row] >= amount)
    unit = "GPU" if row == GPUS else "CPU core"
    number = amount if row == GPUS else amount / 1000
    count = int(enough.sum())
    of_nodes = f"{count} of {len(cluster.nodes)} nodes {'has' if count == 1 else 'have'}"
    text = f"{of_nodes} {_plural(number, 'free ' + unit)}"
    fitting = int((_fitting(group, free) > 0).sum())
    if fitting < count:
        rest = [
            show(group.amounts[r]) for r, show in _SHOW.items() if r != row and group.amounts[r]
        ]
        text += f", {fitting} of them with {' and '.join(rest) or 'a place for a pod'}"
    if row != GPUS:
        return text
    parts = [f"{_gpus(free[GPUS].sum())} free in all"]
    for count, where in _held_back(group, free, cluster):
        parts.append(f"{count} of them {where}")
    return f"{text} ({', '.join(parts)})"


def _held_back(group: Group, room: Room, cluster: Cluster) -> list[tuple[int, str]]:
    """Return how many GPUs of some room are on nodes that will not do now, and on which."""
    obstacles = cluster.obstacles(group.rules, has_gpus=True)
    counts = {name: int(room[GPUS, obstacles[state]].sum()) for state, name in _ON_NODES}
    return [(count, f"on {name}") for name, count in counts.items() if count]


def _explain_rule(rules: Rules, obstacle: Obstacle, nodes: Sequence[Node]) -> str:
    if obstacle is Obstacle.PRODUCT:
        return no_product(rules.gpu_products, nodes)
    if obstacle is Obstacle.GPU_MEMORY:
        return no_memory(rules.min_gpu_memory_gib, nodes)
    if obstacle is Obstacle.MODEL:
        return no_model(rules.least_gpu_bytes, nodes)
    return no_labels(rules.node_selector.items())


def _show(taint: Taint) -> str:
    return f"{taint.key}={taint.value}" if taint.value else taint.key


def _fitting(group: Group, room: Room) -> Room:
    """Return how many pods of the group fit on each node, [N]."""
    fitting = np.where(group.eligible, float(len(group.members)), 0.0)
    for row, amount in zip(room, group.amounts, strict=True):
        if amount > 0:
            fitting = np.minimum(fitting, np.floor(row / amount))
    return np.maximum(fitting, 0)


def _count(group: Group, room: Room) -> int:
    return int(_fitting(group, room).sum())


def _needs(gang: Gang) -> str:
    pods = " and ".join(_pods(len(group.members), group) for group in gang.groups)
    return f"needs {pods}{' at once' if len(gang.pods) > 1 else ''}"


def _pods(count: int, group: Group) -> str:
    row = GPUS if group.amounts[GPUS] > 0 else CPU
    each = " each" if count > 1 else ""
    return f"{_plural(count, 'pod')} with {_SHOW[row](group.amounts[row])}{each}"


def _noun(workload: Workload) -> str:
    return "job" if workload.is_gang else "pool"


def _plural(number: float, noun: str) -> str:
    return f"{number:g} {noun}{'' if number == 1 else 's'}"


def _gpus(number: float) -> str:
    return _plural(number, "GPU")


def _list(keys: Sequence[NamespacedName]) -> str:
    names = [str(key) for key in keys[:_MOST_NAMES]]
    more = len(keys) - len(names)
    return join([*names, f"{more} more"] if more else names)


_SHOW: dict[int, Callable[[float], str]] = {
    GPUS: _gpus,
    CPU: lambda milli: _plural(milli / 1000, "CPU core"),
    MEMORY: lambda size_bytes: f"{size_bytes / GIB:g} GiB of memory",
}
