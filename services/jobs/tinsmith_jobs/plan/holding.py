"""The plan for a job that holds nodes: its pods are kept, and their failures counted."""

from __future__ import annotations

from dataclasses import replace

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.plan.actions import Event, Plan
from tinsmith_jobs.plan.deadlines import late, next_look_s, overdue, with_stall
from tinsmith_jobs.plan.failure_policy import (
    RECIPE_RULES,
    backoff_left_s,
    describe,
    react,
    with_refusals,
)
from tinsmith_jobs.plan.image_pulls import unpulled, with_image_pulls
from tinsmith_jobs.plan.plan_builder import PlanBuilder
from tinsmith_jobs.plan.pod_maintenance import PodMaintenance, maintain_pods, with_pods
from tinsmith_jobs.plan.retry_policy import report_of_this_attempt
from tinsmith_jobs.plan.status_transitions import is_start, waits_for, with_not_ready
from tinsmith_jobs.spec import FailureRule, JobSpec, Method, Reaction
from tinsmith_jobs.status import Failure, Status


def hold(builder: PlanBuilder, spec: JobSpec) -> Plan:
    """Return the plan of a job that has nodes, or waits for some of them only."""
    too_long = overdue(spec, builder.status, builder.now)
    if too_long is not None:
        return builder.fail(too_long)
    pause_s = backoff_left_s(builder.status, builder.now, builder.limits)
    report = report_of_this_attempt(builder.status, builder.observed.report)
    kept = maintain_pods(
        builder.job.key.name,
        spec.roles,
        builder.status,
        builder.observed,
        react=lambda pod: react(pod, _rules(spec), report),
        groups=[role.name for role in spec.roles if spec.is_group(role)],
        may_create=pause_s <= 0 and not builder.observed.obstacle and not builder.observed.missing,
        is_start=is_start(builder.status),
    )
    if builder.observed.missing:
        not_ready = (builder.observed.missing, *kept.not_ready)
        kept = replace(kept, is_ready=False, not_ready=not_ready)
    for why in kept.lost:
        builder.events.append(Event(conditions.POD_LOST, why, is_warning=True))
    verdict = _count_failures(builder, spec, kept)
    if verdict is not None:
        return builder.fail(verdict)
    status = with_pods(builder.status, builder.job.key, kept)
    status = with_refusals(status, kept.refused, builder.now, builder.limits)
    builder.status = _readiness(
        builder, spec, status, kept, backoff_left_s(builder.status, builder.now, builder.limits)
    )
    builder.status, begun = with_image_pulls(spec, builder.status, builder.observed, builder.now)
    if begun is not None:
        builder.events.append(begun)
    no_image = unpulled(builder.status, builder.observed, builder.now, builder.limits)
    if no_image is not None:
        return builder.fail(no_image)
    too_late = late(spec, builder.status, kept, builder.now)
    if too_late is not None:
        return builder.fail(too_late)
    status, stall = with_stall(spec, builder.status, builder.now)
    if stall is not None:
        builder.events.append(stall)
    return builder.planned(
        status,
        create=kept.create,
        delete=kept.delete,
        keys=builder.keys(),
        takes_uids=kept.takes_uids,
        requeue_s=next_look_s(spec, status, builder.now, pause_s=pause_s),
    )


def _count_failures(builder: PlanBuilder, spec: JobSpec, kept: PodMaintenance) -> Failure | None:
    """Count the failures of this look; return one that ends the job."""
    counted = [pod for pod, reaction in kept.failures if reaction is not Reaction.IGNORE]
    for pod, reaction in kept.failures:
        failure = describe(pod, conditions.POD_FAILED)
        builder.events.append(Event(conditions.POD_FAILED, failure.message, is_warning=True))
        if reaction is Reaction.FAIL_JOB:
            return replace(failure, reason=conditions.FAILURE_POLICY)
    if not counted:
        if kept.failures or kept.num_stopped:
            # Not a failure that counts, but no reason to start pods without a pause either.
            builder.status = replace(builder.status, last_restart_time=builder.now)
        return None
    failure = describe(counted[0], conditions.POD_FAILED)
    count = builder.status.restart_count + 1
    if count > spec.backoff_limit:
        return replace(
            failure,
            reason=conditions.BACKOFF_LIMIT_EXCEEDED,
            message=f"{failure.message} (failure {count}, backoffLimit is {spec.backoff_limit})",
        )
    builder.status = replace(
        builder.status, restart_count=count, last_restart_time=builder.now, failure=failure
    )
    return None


def _readiness(
    builder: PlanBuilder, spec: JobSpec, status: Status, kept: PodMaintenance, pause_s: float
) -> Status:
    if kept.is_ready:
        if status.phase is Phase.RESTARTING:
            # Ends what the warnings before began; the condition says it of the first start.
            builder.events.append(Event(conditions.PODS_READY, "all pods are ready"))
        status = replace(
            status,
            phase=Phase.RUNNING,
            waiting_for="",
            endpoint=builder.limits.endpoint if spec.is_serving else "",
        )
        return status.with_condition(
            conditions.READY, True, conditions.PODS_READY, "all pods are ready", builder.now
        )
    if kept.num_unplaced:
        # True again with the last node: from then on the time of the start counts.
        status = status.with_condition(
            conditions.ASSIGNED,
            False,
            conditions.WAITING_FOR_NODES,
            f"{kept.num_unplaced} of its pods have no node",
            builder.now,
        )
    was_running = status.phase in (Phase.RUNNING, Phase.RESTARTING)
    # A driver that was not started yet is no reason to speak of a restart.
    phase = Phase.RESTARTING if was_running else Phase.STARTING
    waiting_for = status.waiting_for if kept.num_unplaced else waits_for(kept)
    if pause_s > 0 and status.failure is not None:
        waiting_for = f"pauses {pause_s:.0f} s after a failure: {status.failure.message}"
    status = replace(status, phase=phase, waiting_for=waiting_for)
    return with_not_ready(status, kept, builder.now)


def _rules(spec: JobSpec) -> tuple[FailureRule, ...]:
    return spec.rules if spec.method is Method.CUSTOM else (*spec.rules, *RECIPE_RULES)
