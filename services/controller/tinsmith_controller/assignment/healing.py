"""Gives back nodes that a workload was given and cannot have.

A pod of another owner can take the GPUs of a pod that is being replaced. The cluster's scheduler
may refuse a pod on its node for its own reasons. A pod that waits there would wait until its job
fails. So where assignments and other people's pods are more than a node has, the youngest
assignments without a bound pod are placed anew. A pod that stays unschedulable is placed anew if
another node has room for it.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from tinsmith_controller.assignment.capacity import seconds
from tinsmith_controller.assignment.decide import decide
from tinsmith_controller.assignment.types import (
    Decisions,
    Node,
    PodKey,
    PodRequest,
    QueueConfig,
    Stage,
    Workload,
)
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.status import Binding

_GivenBack = dict[NamespacedName, frozenset[PodKey]]


def decide_and_heal(
    workloads: Sequence[Workload],
    nodes: Sequence[Node],
    policy: QueueConfig,
    now: datetime.datetime,
) -> Decisions:
    """Return what one pass decides, with what has to be given back. Pure, as `decide` is.

    A job whose pods have no room any more anywhere gives back all that it holds: what is left of a
    gang is idle.
    """
    over = find_overdrawn(workloads, nodes)
    stuck = {
        workload.key: workload.stuck
        for workload in workloads
        if workload.stuck and workload.stage is Stage.HOLDING and workload.key not in over
    }
    decisions = decide(_without(workloads, over | stuck), nodes, policy, now)
    left = {key for key in stuck if not _is_moved(key, stuck[key], decisions)}
    if left:
        stuck = {key: pods for key, pods in stuck.items() if key not in left}
        decisions = decide(_without(workloads, over | stuck), nodes, policy, now)
        stuck = {key: pods for key, pods in stuck.items() if key in decisions.assign}
    if not over and not stuck:
        return decisions
    gangs = {workload.key for workload in workloads if workload.is_gang}
    released = frozenset(key for key in over if key in gangs and key not in decisions.assign)
    return dataclasses.replace(decisions, given_back=over | stuck, released=released)


def find_overdrawn(workloads: Iterable[Workload], nodes: Iterable[Node]) -> _GivenBack:
    """Return the pods without a bound one that are too many for their nodes, by workload."""
    held: dict[str, int] = defaultdict(int)
    idle: dict[str, list[tuple[Workload, Binding]]] = defaultdict(list)
    for workload in workloads:
        is_leaving = workload.stage is Stage.RELEASING
        for entry in workload.placed:
            is_idle = (entry.role, entry.index) in workload.idle
            if not (is_leaving and is_idle):  # else it is about to be given back anyway
                held[entry.node] += entry.resources.gpus
            if is_idle and not is_leaving and entry.resources.gpus:
                idle[entry.node].append((workload, entry))
    found: dict[NamespacedName, set[PodKey]] = defaultdict(set)
    for node in nodes:
        excess = held[node.name] + node.others.gpus - node.allocatable.gpus
        if not node.is_ready or excess <= 0:
            continue
        for workload, entry in sorted(idle[node.name], key=_youngest_first):
            if excess > 0:
                found[workload.key].add((entry.role, entry.index))
                excess -= entry.resources.gpus
    return {key: frozenset(pods) for key, pods in found.items()}


def _youngest_first(held: tuple[Workload, Binding]) -> tuple[float, NamespacedName, str, int]:
    workload, entry = held
    since_s = seconds(workload.assigned or workload.created)
    return (-since_s, workload.key, entry.role, -entry.index)


def _is_moved(key: NamespacedName, pods: Collection[PodKey], decisions: Decisions) -> bool:
    placed = {(entry.role, entry.index) for entry in decisions.assign.get(key, ())}
    return placed.issuperset(pods) and key not in decisions.preempt


def _without(workloads: Iterable[Workload], given_back: _GivenBack) -> list[Workload]:
    return [
        _without_pods(workload, given_back[workload.key])
        if workload.key in given_back
        else workload
        for workload in workloads
    ]


def _without_pods(workload: Workload, pods: Collection[PodKey]) -> Workload:
    """Return a workload that wants pods placed anew, and elsewhere if they are stuck."""
    gone = [entry for entry in workload.placed if (entry.role, entry.index) in pods]
    stuck = {entry.node for entry in gone if (entry.role, entry.index) in workload.stuck}
    wanted = tuple(PodRequest(entry.role, entry.index, entry.resources) for entry in gone)
    rules = dataclasses.replace(workload.rules, avoided=workload.rules.avoided | stuck)
    return dataclasses.replace(
        workload,
        pods=workload.pods + wanted,
        placed=tuple(entry for entry in workload.placed if entry not in gone),
        rules=rules,
    )
