"""The plan for one pool: a pure function, like that of a job, but it never ends.

Each replica that has a node has a pod. Replicas are replaced one by one: those out of date, and
those that failed, after a pause that grows with failures in a row. One whose image cannot be pulled
gives its node back, and rests.
"""

from __future__ import annotations

import datetime
from dataclasses import replace

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import PoolPhase
from tinsmith_jobs.plan.actions import Event, Plan, PodDeletion
from tinsmith_jobs.plan.failure_policy import backoff_left_s, describe, with_refusals
from tinsmith_jobs.plan.image_pulls import rest_left_s, rested, with_image_pulls, with_rest
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import Observed, ObservedPool, PodView
from tinsmith_jobs.plan.pod_maintenance import PodMaintenance, maintain_pods, with_pods
from tinsmith_jobs.plan.status_transitions import accept_spec
from tinsmith_jobs.spec import Reaction
from tinsmith_jobs.status import Failure, Status

_QUIET_S = 600.0
"""After this long without a failure, the next one counts as the first."""


def plan_pool(
    pool: ObservedPool, observed: Observed, now: datetime.datetime, limits: Limits
) -> Plan:
    """Return the next actions for a pool."""
    status = replace(pool.status, observed_generation=pool.generation)
    if pool.is_deleting:
        return Plan(status=pool.status)
    if pool.spec is None:
        return _refuse(pool, status, observed, now)
    status = replace(status, failure=_without_refusal(status.failure))
    is_edited = pool.generation != pool.status.observed_generation
    if is_edited or not rest_left_s(pool.status, now, limits):
        status = rested(status, now)
    status, refused = accept_spec(pool, status, now)
    status = _forget_old_failures(status, now)
    kept = maintain_pods(
        pool.key.name,
        pool.spec.roles,
        status,
        observed,
        # Of the reactions this is the one that replaces a single pod; failures are counted below.
        react=lambda _: Reaction.IGNORE,
        may_create=backoff_left_s(status, now, limits) <= 0 and not observed.rejection,
    )
    events = [] if refused is None else [refused]
    events += [Event(conditions.POD_LOST, why, is_warning=True) for why in kept.lost]
    for pod, _ in kept.failures:
        failure = describe(pod, conditions.POD_FAILED)
        events.append(Event(conditions.POD_FAILED, failure.message, is_warning=True))
        status = replace(
            status,
            failure=failure,
            restart_count=status.restart_count + 1,
            last_restart_time=now,
        )
    if kept.num_stopped:
        status = replace(status, last_restart_time=now)
    status = replace(status, queued_time=status.queued_time or now)
    status = with_pods(status, pool.key, kept)
    status = with_refusals(status, kept.refused, now, limits)
    if not rest_left_s(status, now, limits):
        status, begun = with_image_pulls(pool.spec, status, observed, now)
        status, given_back = with_rest(status, observed, now, limits)
        events += [event for event in (begun, given_back) if event is not None]
    rest_s = rest_left_s(status, now, limits)
    pause_s = backoff_left_s(status, now, limits)
    why = observed.rejection
    if rest_s and status.failure is not None:
        why = why or status.failure.message
    status = _readiness(status, kept, pause_s, why, now)
    outdated = None if kept.delete else _outdated(observed, is_ready=kept.is_ready)
    if outdated is not None:
        message = f"pod {outdated.name} is out of date; it drains, and is made anew"
        events.append(Event(conditions.POD_OUTDATED, message))
    return Plan(
        status=status,
        create=kept.create,
        delete=kept.delete if outdated is None else (PodDeletion(outdated.name, outdated.uid),),
        requeue_s=_next_look_s(status, pause_s, rest_s, now, limits),
        events=tuple(events),
    )


def _next_look_s(
    status: Status, pause_s: float, rest_s: float, now: datetime.datetime, limits: Limits
) -> float | None:
    """Return when something of a pool is due: the end of a pause or a rest, or a rest itself."""
    found = status.condition(conditions.IMAGE_UNAVAILABLE)
    due = [pause_s, rest_s]
    if found is not None and found.is_true and not rest_s:
        due.append(limits.image_pull_s - (now - found.transition_time).total_seconds())
    due = [max(0.5, each) for each in due if each > 0]
    return min(due, default=None)


def _outdated(observed: Observed, *, is_ready: bool) -> PodView | None:
    """Return a pod that was made from what the pool or the deployment was before.

    One goes at a time, when all are ready; one whose image cannot be pulled goes at once. A trainer
    that drains gives its runs to others, or has them back when it is there again; nothing that was
    acknowledged is lost.
    """
    found = [
        pod
        for name, pod in sorted(observed.pods.items())
        if name in observed.templates
        and pod.template != observed.templates[name]
        and (is_ready or (pod.unpulled_image and not pod.is_deleting))
    ]
    return found[0] if found else None


def _refuse(pool: ObservedPool, status: Status, observed: Observed, now: datetime.datetime) -> Plan:
    message = f"the pool cannot be run: {pool.spec_error}"
    status = replace(
        status,
        phase=PoolPhase.FAILED,
        waiting_for="",
        failure=Failure(conditions.INVALID_SPEC, message),
        assignments=(),
        assigned_time=None,
        accepted_spec="",
    ).with_condition(conditions.READY, False, conditions.INVALID_SPEC, message, now)
    is_new = pool.status.phase is not PoolPhase.FAILED
    return Plan(
        status=status,
        delete=tuple(
            PodDeletion(pod.name, pod.uid)
            for pod in sorted(observed.pods.values(), key=lambda pod: pod.name)
            if not pod.is_deleting
        ),
        events=(Event(conditions.INVALID_SPEC, message, is_warning=True),) if is_new else (),
    )


def _without_refusal(failure: Failure | None) -> Failure | None:
    return None if failure is not None and failure.reason == conditions.INVALID_SPEC else failure


def _forget_old_failures(status: Status, now: datetime.datetime) -> Status:
    last = status.last_restart_time
    if last is not None and (now - last).total_seconds() > _QUIET_S:
        return replace(status, restart_count=0, last_restart_time=None)
    return status


def _readiness(
    status: Status, kept: PodMaintenance, pause_s: float, why: str, now: datetime.datetime
) -> Status:
    num_ready = sum(role.ready for role in kept.role_statuses)
    waiting_for = status.waiting_for if kept.num_unplaced else "; ".join(kept.not_ready[:3])
    if pause_s > 0 and status.failure is not None:
        waiting_for = f"pauses {pause_s:.0f} s after a failure: {status.failure.message}"
    if why:
        waiting_for = why
    if kept.is_ready:
        phase, waiting_for = PoolPhase.READY, ""
    elif num_ready:
        phase = PoolPhase.DEGRADED
    elif status.assignments:
        phase = PoolPhase.STARTING
    else:
        phase = PoolPhase.QUEUED
        waiting_for = waiting_for or "waits for the next assignment of nodes"
    return replace(status, phase=phase, waiting_for=waiting_for).with_condition(
        conditions.READY,
        kept.is_ready,
        conditions.PODS_READY if kept.is_ready else conditions.PODS_NOT_READY,
        "all replicas are ready" if kept.is_ready else waiting_for or "replicas are starting",
        now,
    )
