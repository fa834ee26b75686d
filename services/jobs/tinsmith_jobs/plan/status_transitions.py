"""Transitions of a status when nodes are assigned."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.naming import pod_name
from tinsmith_jobs.plan.observed import Job, Pool
from tinsmith_jobs.status import Assignment, Placement, Status


def assign_nodes(job: Job, placements: Sequence[Placement], now: datetime.datetime) -> Status:
    """Return the status of a job that was given nodes, or needs none: it begins to hold them.

    Pods without a chosen node get their names here too. Replacements for lost pods join what the
    job holds.
    """
    spec, status = job.spec, job.status
    if spec is None:
        return status
    epoch = status.epoch + 1
    held = {(entry.role, entry.index) for entry in status.assignments}
    placed = {(entry.role, entry.index): entry for entry in placements}
    added = []
    for role in spec.roles:
        for index in range(role.replicas):
            key = (role.name, index)
            if key in held or (role.is_placed and key not in placed):
                continue
            pod = pod_name(job.key.name, *key, epoch)
            added.append(
                _assignment(pod, placed[key], epoch)
                if key in placed
                else Assignment(pod, *key, "", 0, epoch)
            )
    is_first = status.assigned_time is None
    message = f"nodes were given to {len(placed)} of its pods" if placed else "no pod needs a node"
    status = replace(
        status,
        epoch=epoch,
        assignments=(*status.assignments, *added),
        phase=Phase.STARTING if is_first else Phase.RESTARTING,
        assigned_time=now if is_first else status.assigned_time,
        start_time=status.start_time or now,
        waiting_for="",
    )
    return status.with_condition(conditions.ASSIGNED, True, conditions.NODES_ASSIGNED, message, now)


def assign_pool_nodes(
    pool: Pool, placements: Sequence[Placement], now: datetime.datetime
) -> Status:
    """Return the status of a pool that was given nodes for some of its replicas."""
    status = pool.status
    epoch = status.epoch + 1
    added = tuple(
        _assignment(pod_name(pool.key.name, entry.role, entry.index, epoch), entry, epoch)
        for entry in placements
    )
    status = replace(
        status,
        epoch=epoch,
        assignments=(*status.assignments, *added),
        assigned_time=status.assigned_time or now,
        start_time=status.start_time or now,
        waiting_for="",
    )
    message = f"{len(status.assignments)} replicas have nodes"
    return status.with_condition(conditions.ASSIGNED, True, conditions.NODES_ASSIGNED, message, now)


def _assignment(pod: str, placement: Placement, epoch: int) -> Assignment:
    given = placement.resources
    return Assignment(
        pod,
        placement.role,
        placement.index,
        placement.node,
        given.gpus,
        epoch,
        cpu_milli=given.cpu_milli,
        memory_bytes=given.memory_bytes,
    )
