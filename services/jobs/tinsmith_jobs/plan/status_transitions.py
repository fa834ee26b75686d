"""Transitions of a status when nodes are assigned."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from dataclasses import replace

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.naming import pod_name
from tinsmith_jobs.plan.actions import Event
from tinsmith_jobs.plan.observed import Observed, ObservedJob, ObservedPool
from tinsmith_jobs.plan.pod_maintenance import PodMaintenance, maintain_pods, with_pods
from tinsmith_jobs.spec import Reaction
from tinsmith_jobs.status import Assignment, Binding, Status


def assign_nodes(job: ObservedJob, bindings: Sequence[Binding], now: datetime.datetime) -> Status:
    """Return the status of a job that was given nodes, or needs none: it begins to hold them.

    Pods without a chosen node get their names here too. Replacements for lost pods join what the
    job holds. A job that begins says at once which pods it waits for.
    """
    spec, status = job.spec, job.status
    if spec is None:
        return status
    epoch = status.epoch + 1
    held = {(entry.role, entry.index) for entry in status.assignments}
    placed = {(entry.role, entry.index): entry for entry in bindings}
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
        observed_generation=status.observed_generation or job.generation,
        queued_time=status.queued_time or now,
        epoch=epoch,
        assignments=(*status.assignments, *added),
        phase=Phase.STARTING if is_first else Phase.RESTARTING,
        assigned_time=now if is_first else status.assigned_time,
        start_time=status.start_time or now,
        waiting_for="",
        accepted_spec=job.spec_text,
    )
    status = status.with_condition(
        conditions.ASSIGNED, True, conditions.NODES_ASSIGNED, message, now
    )
    if not is_first:
        return status
    kept = maintain_pods(
        job.key.name, spec.roles, status, Observed(), react=lambda _: Reaction.RESTART_ROLE
    )
    status = replace(with_pods(status, job.key, kept), waiting_for=waits_for(kept))
    return with_not_ready(status, kept, now)


def is_start(status: Status) -> bool:
    """Return whether a job starts and no pod of it has had a client yet."""
    return status.phase is Phase.STARTING and not any(entry.uid for entry in status.assignments)


def waits_for(kept: PodMaintenance) -> str:
    """Return what a job with nodes for all of its pods waits for; the condition has the rest."""
    return "; ".join(kept.not_ready[:3])


def with_not_ready(status: Status, kept: PodMaintenance, now: datetime.datetime) -> Status:
    """Return a status whose condition says which pods are not ready."""
    message = "; ".join(kept.not_ready) or "pods wait for nodes"
    return status.with_condition(conditions.READY, False, conditions.PODS_NOT_READY, message, now)


def assign_pool_nodes(
    pool: ObservedPool, bindings: Sequence[Binding], now: datetime.datetime
) -> Status:
    """Return the status of a pool that was given nodes for some of its replicas."""
    status = pool.status
    epoch = status.epoch + 1
    added = tuple(
        _assignment(pod_name(pool.key.name, entry.role, entry.index, epoch), entry, epoch)
        for entry in bindings
    )
    status = replace(
        status,
        epoch=epoch,
        assignments=(*status.assignments, *added),
        assigned_time=status.assigned_time or now,
        start_time=status.start_time or now,
        waiting_for="",
        accepted_spec=pool.spec_text,
    )
    message = f"{len(status.assignments)} replicas have nodes"
    return status.with_condition(conditions.ASSIGNED, True, conditions.NODES_ASSIGNED, message, now)


def is_fresh(job: ObservedJob) -> bool:
    """Return whether nothing of a job was stored yet, but what a new leader stores."""
    return job.status == Status(fencing_token=job.status.fencing_token)


def queued(status: Status, now: datetime.datetime) -> Status:
    """Return the status of a job that waits for nodes from now on, or has waited already."""
    if status.phase is Phase.QUEUED:
        return status
    status = replace(status, phase=Phase.QUEUED, queued_time=status.queued_time or now)
    return status.with_condition(
        conditions.READY, False, conditions.WAITING_FOR_NODES, "has no nodes", now
    )


def wait_for_nodes(
    status: Status, sentence: str, now: datetime.datetime, *, is_unfit: bool
) -> Status:
    """Return the status of a job that holds nothing and waits for nodes, with why in a condition.

    Args:
        status: Its status.
        sentence: What it waits for.
        now: The time.
        is_unfit: Whether it would wait even if no other job ran.
    """
    if not is_unfit:
        return status.with_condition(
            conditions.ASSIGNED, False, conditions.WAITING_FOR_NODES, sentence, now
        )
    message = (
        f"{sentence}. The job starts once the cluster has such nodes; else change spec.roles "
        "or spec.scheduling"
    )
    return status.with_condition(conditions.ASSIGNED, False, conditions.NO_NODE_FITS, message, now)


def give_back(
    item: ObservedJob | ObservedPool,
    pods: Collection[tuple[str, int]],
    now: datetime.datetime,
    *,
    gives_all: bool,
) -> Status:
    """Return the status of a workload that loses the nodes of some pods, to be placed anew.

    Args:
        item: The workload.
        pods: Role and index of the pods.
        now: The time.
        gives_all: Whether it gives back all that it holds, because these have no room anywhere.
    """
    status, spec = item.status, item.spec
    lost = [entry for entry in status.assignments if (entry.role, entry.index) in pods]
    where = ", ".join(sorted({entry.node for entry in lost}))
    message = f"others have what {len(lost)} of its pods were given on {where}"
    status = status.with_condition(
        conditions.ASSIGNED, False, conditions.NODES_OVERDRAWN, message, now
    )
    if gives_all:
        # What nothing is bound to counts as free from here on; the rest once its pods are gone.
        kept = tuple(entry for entry in status.assignments if entry not in lost)
        return replace(status, assignments=kept, stop_time=now)
    # The ranks of a group know each other by the names of their pods.
    roles = {entry.role for entry in lost}
    groups = {
        role.name
        for role in (spec.roles if spec is not None else ())
        if spec is not None and role.name in roles and spec.is_group(role)
    }
    epoch = status.epoch + 1
    kept = tuple(
        replace(
            entry,
            pod=pod_name(item.key.name, entry.role, entry.index, epoch),
            epoch=epoch,
            uid="",
        )
        if entry.role in groups
        else entry
        for entry in status.assignments
        if entry not in lost
    )
    return replace(status, assignments=kept, epoch=epoch)


def accept_spec(
    item: ObservedJob | ObservedPool, status: Status, now: datetime.datetime
) -> tuple[Status, Event | None]:
    """Return the status that says which spec holds while nodes are held, and an event of a refusal.

    A refused edit leaves the pods as they are, with a condition that says what is wrong.
    """
    if status.assigned_time is not None:
        status = replace(status, accepted_spec=item.spec_text)
    old = status.condition(conditions.SPEC_ACCEPTED)
    if not item.edit_error:
        if old is not None and not old.is_true:
            status = status.with_condition(
                conditions.SPEC_ACCEPTED, True, conditions.EDIT_ACCEPTED, "the spec holds", now
            )
        return status, None
    message = f"{item.edit_error}; until that is mended, the spec before this edit holds"
    is_told = old is not None and not old.is_true and old.message == message
    status = status.with_condition(
        conditions.SPEC_ACCEPTED, False, conditions.EDIT_REFUSED, message, now
    )
    event = None if is_told else Event(conditions.EDIT_REFUSED, message, is_warning=True)
    return status, event


def _assignment(pod: str, binding: Binding, epoch: int) -> Assignment:
    given = binding.resources
    return Assignment(
        pod,
        binding.role,
        binding.index,
        binding.node,
        given.gpus,
        epoch,
        cpu_milli=given.cpu_milli,
        memory_bytes=given.memory_bytes,
    )
