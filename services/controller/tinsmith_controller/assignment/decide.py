"""Decides which workloads get nodes, which are preempted, and what the others wait for.

One call repeats assignment passes until a pass adds nothing, so a second call decides nothing more.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence

from tinsmith_controller.assignment.assignment_pass import AssignmentPass
from tinsmith_controller.assignment.ordering import unique
from tinsmith_controller.assignment.types import Decisions, Node, QueueConfig, Stage, Workload
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.status import Binding


def decide(
    workloads: Sequence[Workload],
    nodes: Sequence[Node],
    policy: QueueConfig,
    now: datetime.datetime,
) -> Decisions:
    """Return what one pass decides. Pure; the order of its arguments does not matter.

    Passes are made until one adds nothing: what a pass assigns changes the shares of projects, and
    with them the order of workloads and the nodes kept for them. So a second call on the same
    state, with these decisions applied, decides nothing more.
    """
    workloads = unique(workloads)
    assign: dict[NamespacedName, tuple[Binding, ...]] = {}
    preempt: dict[NamespacedName, NamespacedName] = {}
    state = workloads
    while True:
        added = AssignmentPass(state, nodes, policy, now).run()
        if not added.assign and not added.preempt:
            return Decisions(assign, preempt, added.waiting, unfit=added.unfit)
        for key, bindings in added.assign.items():
            assign[key] = assign.get(key, ()) + bindings
        # A pass that assigned nodes preempts nothing yet, nor for a workload that found a place.
        preempt = {
            victim: for_whom for victim, for_whom in preempt.items() if for_whom not in added.assign
        } | ({} if added.assign else dict(added.preempt))
        if not added.waiting:
            return Decisions(assign, preempt, {})
        state = apply(workloads, Decisions(assign, preempt, {}), now)


def apply(
    workloads: Iterable[Workload], decisions: Decisions, now: datetime.datetime
) -> list[Workload]:
    """Return the workloads as they are once the decisions are carried out."""
    return [_apply_one(workload, decisions, now) for workload in workloads]


def _apply_one(workload: Workload, decisions: Decisions, now: datetime.datetime) -> Workload:
    if workload.key in decisions.preempt:
        return dataclasses.replace(
            workload, stage=Stage.RELEASING, preempted_by=decisions.preempt[workload.key]
        )
    bindings = decisions.assign.get(workload.key, ())
    if not bindings:
        return workload
    given = {(binding.role, binding.index) for binding in bindings}
    return dataclasses.replace(
        workload,
        stage=Stage.HOLDING,
        pods=tuple(pod for pod in workload.pods if (pod.role, pod.index) not in given),
        placed=workload.placed + bindings,
        assigned=now,
    )
