"""The plan for one job: a pure function of the job, what is observed, and the time.

Its author, a job of higher priority, or its own end stops a job; then it gives its nodes back
(`teardown`). Otherwise it waits until nodes are assigned, or it holds nodes (`holding`).
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import ENDED, Phase
from tinsmith_jobs.plan.actions import Event, Plan, PodDeletion
from tinsmith_jobs.plan.failure_policy import backoff_left_s, was_told_to_stop
from tinsmith_jobs.plan.holding import hold
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import Observed, ObservedJob, PodPhase, PodView
from tinsmith_jobs.plan.plan_builder import PlanBuilder
from tinsmith_jobs.plan.retry_policy import advice, begun_anew, is_corrected, is_retried
from tinsmith_jobs.plan.status_transitions import assign_nodes, is_fresh, queued
from tinsmith_jobs.plan.teardown import tear_down
from tinsmith_jobs.spec import DRIVER, JobSpec, Method, Scheduling
from tinsmith_jobs.status import Failure, Status


def plan_job(job: ObservedJob, observed: Observed, now: datetime.datetime, limits: Limits) -> Plan:
    """Return the next actions for a job."""
    if job.is_deleting:
        return Plan(status=job.status)
    builder = PlanBuilder(job, observed, now, limits)
    spec = builder.job.spec
    if builder.status.phase in ENDED:
        if is_retried(builder.job):
            return _retry(builder)
        if not is_corrected(builder.job, builder.observed):
            return _clean_up(builder)
        builder.status = begun_anew(builder.status, builder.job.generation)
    if spec is None:
        return builder.fail(
            Failure(conditions.INVALID_SPEC, f"the job cannot be run: {builder.job.spec_error}")
        )
    if builder.observed.rejection:
        return builder.fail(Failure(conditions.POD_REJECTED, builder.observed.rejection))
    if _driver_succeeded(builder):
        return builder.end(
            Phase.SUCCEEDED, conditions.DRIVER_SUCCEEDED, "the driver ended with success"
        )
    if spec.cancel or spec.suspend or builder.status.preempted_by is not None:
        return _stop(builder, spec)
    if builder.status.stop_time is not None:
        # Resumed before everything was given back: what is still there is given back first.
        return _stop(builder, spec)
    if builder.status.assigned_time is None:
        return _wait(builder, spec)
    return hold(builder, spec)


def _driver_pods(builder: PlanBuilder) -> list[PodView]:
    current = builder.status.assigned_to(DRIVER, 0)
    return [
        pod
        for pod in builder.observed.pods.values()
        if pod.role == DRIVER and current is not None and pod.name == current.pod
    ]


def _driver_succeeded(builder: PlanBuilder) -> bool:
    """Whether the driver did what the job is for.

    Our own ends with 0 for that alone. A program of the author's may also do so when it was
    told to stop, and then what it reported counts: a job that ends too early is lost, one that
    is resumed in vain ends again.
    """
    ended = [pod for pod in _driver_pods(builder) if pod.phase is PodPhase.SUCCEEDED]
    if not ended:
        return False
    spec, report = builder.job.spec, builder.observed.report
    is_foreign = spec is not None and spec.method is Method.CUSTOM
    was_told = builder.status.stop_time is not None or any(map(was_told_to_stop, ended))
    return not (is_foreign and was_told) or (report is not None and report.has_succeeded)


def _clean_up(builder: PlanBuilder) -> Plan:
    spec = builder.job.spec
    since = builder.status.stop_time or builder.status.completion_time or builder.now
    left = tear_down(
        builder.observed,
        since=since,
        now=builder.now,
        grace_s=(spec.scheduling if spec is not None else Scheduling()).grace_s,
        termination_s=builder.limits.termination_s,
        keeps_ended=True,
    )
    builder.note_overdue(left)
    if left.is_done:
        builder.release()
    ended = builder.status.completion_time or builder.now
    age_s = (builder.now - ended).total_seconds()
    ttl_s = spec.ttl_s if spec is not None else None
    # Its keys are revoked by the plan that stores the release, which comes before.
    is_released = left.is_done and not builder.job.status.assignments
    is_old = is_released and ttl_s is not None and age_s >= ttl_s
    requeue_s = None if ttl_s is None else max(1.0, ttl_s - age_s)
    told = [advice(builder.job), "" if left.is_done else left.waiting_for]
    return Plan(
        status=replace(builder.status, waiting_for="; ".join(filter(None, told))),
        delete=left.delete,
        key_epochs=builder.keys(),
        delete_self=is_old,
        requeue_s=requeue_s if left.is_done else 5.0,
        events=tuple(builder.events),
    )


def _retry(builder: PlanBuilder) -> Plan:
    """Begin anew; the pods that were kept for their logs go."""
    told = "the job begins anew, as its author asked"
    builder.events.append(Event(conditions.RETRIED, told))
    delete = tuple(
        PodDeletion(pod.name, pod.uid, None)
        for pod in builder.observed.pods.values()
        if not pod.is_deleting
    )
    status = begun_anew(builder.status, builder.job.generation)
    return builder.planned(status, delete=delete, requeue_s=0.0)


def _stop(builder: PlanBuilder, spec: JobSpec) -> Plan:
    """Stop for the strongest reason that there is, and say so."""
    phase, reason, message = _why_stop(builder, spec)
    if builder.status.stop_time is None and builder.status.assigned_time is not None:
        builder.status = replace(builder.status, stop_time=builder.now)
        builder.events.append(Event(reason, message))
    if builder.status.phase is not phase and builder.status.stop_time is not None:
        builder.status = replace(builder.status, phase=phase)
        if reason == conditions.NODES_OVERDRAWN:
            builder.events.append(Event(reason, message, is_warning=True))
    builder.status = builder.status.with_condition(
        conditions.READY, False, reason, message, builder.now
    )
    left = tear_down(
        builder.observed,
        since=builder.status.stop_time or builder.now,
        now=builder.now,
        grace_s=spec.scheduling.grace_s,
        termination_s=builder.limits.termination_s,
    )
    builder.note_overdue(left)
    if not left.is_done:
        waiting_for = f"{message}; {left.waiting_for}"
        return builder.planned(
            replace(builder.status, waiting_for=waiting_for),
            delete=left.delete,
            keys=builder.keys(),
            requeue_s=5.0,
        )
    builder.release()
    return _stopped(builder, spec, phase, message, left.delete)


def _why_stop(builder: PlanBuilder, spec: JobSpec) -> tuple[Phase, str, str]:
    if spec.cancel:
        return Phase.CANCELLING, conditions.CANCELLED_BY_SPEC, "the job was cancelled"
    if spec.suspend:
        why = builder.observed.queue_wait or "spec.suspend is true"
        return Phase.SUSPENDING, conditions.SUSPENDED_BY_SPEC, why
    if builder.status.preempted_by is not None:
        return (
            Phase.PREEMPTING,
            conditions.PREEMPTED_BY_PRIORITY,
            f"gives way to {builder.status.preempted_by}, which has a higher priority",
        )
    assigned = builder.status.condition(conditions.ASSIGNED)
    if assigned is not None and assigned.reason == conditions.NODES_OVERDRAWN:
        return Phase.SUSPENDING, conditions.NODES_OVERDRAWN, assigned.message
    return Phase.SUSPENDING, conditions.RESUMED, "is resumed once everything was given back"


def _stopped(
    builder: PlanBuilder, spec: JobSpec, phase: Phase, message: str, delete: Sequence[PodDeletion]
) -> Plan:
    """Settle a job that has nothing any more."""
    if spec.cancel:
        return builder.end(Phase.CANCELLED, conditions.CANCELLED_BY_SPEC, message)
    status = builder.status
    if spec.suspend:
        status = replace(
            status,
            phase=Phase.SUSPENDED,
            waiting_for=builder.observed.queue_wait
            or "suspended; set spec.suspend to false to go on",
            queued_time=None,
            preempted_by=None,
        ).with_condition(
            conditions.SUSPENDED, True, conditions.SUSPENDED_BY_SPEC, message, builder.now
        )
        return builder.planned(status, delete=delete)
    if phase is Phase.PREEMPTING:
        status = status.with_condition(
            conditions.PREEMPTED, True, conditions.PREEMPTED_BY_PRIORITY, message, builder.now
        )
    builder.status = replace(status, preempted_by=None)
    return _wait(builder, spec)


def _wait(builder: PlanBuilder, spec: JobSpec) -> Plan:
    status = builder.status
    if status.condition(conditions.SUSPENDED) is not None:
        status = status.with_condition(
            conditions.SUSPENDED, False, conditions.RESUMED, "the job goes on", builder.now
        )
    if builder.observed.missing:
        return _wait_for_server(builder, spec, status)
    needs_nodes = any(role.is_placed and role.replicas for role in spec.roles)
    obstacle = builder.observed.obstacle
    pause_s = backoff_left_s(builder.status, builder.now, builder.limits)
    if not needs_nodes and not obstacle and pause_s <= 0:
        assigned = assign_nodes(replace(builder.job, status=status), (), builder.now)
        return builder.planned(assigned, requeue_s=0.0)
    if obstacle:
        if obstacle != builder.job.status.waiting_for:
            builder.events.append(Event(conditions.WAITING, obstacle, is_warning=True))
        status = status.with_condition(
            conditions.ASSIGNED, False, conditions.WAITING, obstacle, builder.now
        )
    elif is_fresh(builder.job) and not builder.observed.is_queued_elsewhere:
        # The next assignment stores what comes of it.
        return Plan(status=builder.job.status)
    is_new = status.phase is not Phase.QUEUED
    waiting_for = "waits for the next assignment of nodes" if is_new else status.waiting_for
    status = replace(queued(status, builder.now), waiting_for=obstacle or waiting_for)
    # Pods of an earlier attempt are not wanted.
    delete = tear_down(
        builder.observed,
        since=builder.now,
        now=builder.now,
        grace_s=spec.scheduling.grace_s,
        termination_s=builder.limits.termination_s,
    ).delete
    return builder.planned(status, delete=delete, requeue_s=pause_s or None)


def _wait_for_server(builder: PlanBuilder, spec: JobSpec, status: Status) -> Plan:
    queued = status.queued_time or builder.now
    if (builder.now - queued).total_seconds() >= spec.startup_deadline_s:
        return builder.fail(
            Failure(
                conditions.STARTUP_DEADLINE_EXCEEDED,
                f"after {spec.startup_deadline_s} s the job still waits for "
                f"{builder.observed.missing}",
            )
        )
    status = replace(
        status,
        phase=Phase.PENDING,
        queued_time=queued,
        waiting_for=builder.observed.missing,
    ).with_condition(
        conditions.READY, False, conditions.PODS_NOT_READY, builder.observed.missing, builder.now
    )
    return builder.planned(status, requeue_s=float(spec.startup_deadline_s))
