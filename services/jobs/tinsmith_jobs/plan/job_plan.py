"""The plan for one job: a pure function of the job, what is observed, and the time.

Its author, a job of higher priority, or its own end stops a job; then it gives its nodes back
(`teardown`). Otherwise it waits until nodes are assigned, or it holds nodes, and its pods are kept
(`pod_maintenance`).
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import ENDED, Phase
from tinsmith_jobs.naming import sampler_selector
from tinsmith_jobs.plan.actions import Event, Plan, PodDeletion
from tinsmith_jobs.plan.deadlines import late, next_look_s, overdue, with_report, with_stall
from tinsmith_jobs.plan.divergence import with_divergence
from tinsmith_jobs.plan.failure_policy import (
    RECIPE_RULES,
    backoff_left_s,
    describe,
    react,
    was_told_to_stop,
    with_refusals,
)
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import Job, Observed, PodPhase, PodView
from tinsmith_jobs.plan.pod_maintenance import PodMaintenance, maintain_pods
from tinsmith_jobs.plan.retry_policy import (
    advice,
    begun_anew,
    is_corrected,
    is_retried,
    report_of_this_attempt,
)
from tinsmith_jobs.plan.status_transitions import accept_spec, assign_nodes
from tinsmith_jobs.plan.teardown import TeardownStep, tear_down, with_overdue
from tinsmith_jobs.spec import (
    DRIVER,
    SAMPLER,
    WORKER,
    FailureRule,
    JobSpec,
    Method,
    Reaction,
    Scheduling,
)
from tinsmith_jobs.status import Assignment, Failure, Status


def plan_job(job: Job, observed: Observed, now: datetime.datetime, limits: Limits) -> Plan:
    """Return the next actions for a job."""
    if job.is_deleting:
        return Plan(status=job.status)
    return _Planner(job, observed, now, limits).plan()


class _Planner:
    """Plans for one job; `plan` is called once."""

    def __init__(
        self, job: Job, observed: Observed, now: datetime.datetime, limits: Limits
    ) -> None:
        self._job = job
        self._observed = observed
        self._now = now
        self._limits = limits
        # What was asked for after the end was not done, so it counts as not seen.
        is_over = job.status.phase in ENDED
        generation = job.status.observed_generation if is_over else job.generation
        status = replace(job.status, observed_generation=generation)
        status, refused = accept_spec(job, status, now)
        status = with_report(status, observed.report)
        self._status, told = with_divergence(status, observed.report, now)
        self._events: list[Event] = [event for event in (refused, told) if event is not None]

    def plan(self) -> Plan:
        """Return the plan."""
        spec = self._job.spec
        if self._status.phase in ENDED:
            if is_retried(self._job):
                return self._retry()
            if not is_corrected(self._job, self._observed):
                return self._clean_up()
            self._status = begun_anew(self._status, self._job.generation)
        if spec is None:
            return self._fail(
                Failure(conditions.INVALID_SPEC, f"the job cannot be run: {self._job.spec_error}")
            )
        if self._observed.rejection:
            return self._fail(Failure(conditions.POD_REJECTED, self._observed.rejection))
        if self._driver_succeeded():
            return self._end(
                Phase.SUCCEEDED, conditions.DRIVER_SUCCEEDED, "the driver ended with success"
            )
        if spec.cancel or spec.suspend or self._status.preempted_by is not None:
            return self._stop(spec)
        if self._status.stop_time is not None:
            # Resumed before everything was given back: what is still there is given back first.
            return self._stop(spec)
        if self._status.assigned_time is None:
            return self._wait(spec)
        return self._hold(spec)

    def _driver_pods(self) -> list[PodView]:
        current = self._status.assigned_to(DRIVER, 0)
        return [
            pod
            for pod in self._observed.pods.values()
            if pod.role == DRIVER and current is not None and pod.name == current.pod
        ]

    def _driver_succeeded(self) -> bool:
        """Whether the driver did what the job is for.

        Our own ends with 0 for that alone. A program of the author's may also do so when it was
        told to stop, and then what it reported counts: a job that ends too early is lost, one that
        is resumed in vain ends again.
        """
        ended = [pod for pod in self._driver_pods() if pod.phase is PodPhase.SUCCEEDED]
        if not ended:
            return False
        spec, report = self._job.spec, self._observed.report
        is_foreign = spec is not None and spec.method is Method.CUSTOM
        was_told = self._status.stop_time is not None or any(map(was_told_to_stop, ended))
        return not (is_foreign and was_told) or (report is not None and report.has_succeeded)

    # Ends.

    def _fail(self, failure: Failure) -> Plan:
        self._status = replace(self._status, failure=failure)
        return self._end(Phase.FAILED, failure.reason, failure.message)

    def _end(self, phase: Phase, reason: str, message: str) -> Plan:
        """End the job; its pods are stopped from the next look on, the driver first."""
        status = self._status
        if phase is Phase.SUCCEEDED:
            status = replace(status, final=status.latest, failure=None)
        kind = conditions.FAILED if phase is Phase.FAILED else conditions.COMPLETE
        status = replace(
            status,
            phase=phase,
            completion_time=self._now,
            stop_time=status.stop_time or self._now,
            waiting_for="",
            preempted_by=None,
        )
        status = status.with_condition(kind, True, reason, message, self._now)
        self._status = status.with_condition(conditions.READY, False, reason, message, self._now)
        self._events.append(Event(phase.value, message, is_warning=phase is Phase.FAILED))
        # Pods go once the end is stored: a plan that sees neither could not tell that it was
        # reached.
        return self._planned(self._status, keys=self._keys(), requeue_s=0.0)

    def _clean_up(self) -> Plan:
        spec = self._job.spec
        since = self._status.stop_time or self._status.completion_time or self._now
        left = tear_down(
            self._observed,
            since=since,
            now=self._now,
            grace_s=(spec.scheduling if spec is not None else Scheduling()).grace_s,
            termination_s=self._limits.termination_s,
            keeps_ended=True,
        )
        self._note_overdue(left)
        if left.is_done:
            self._release()
        ended = self._status.completion_time or self._now
        age_s = (self._now - ended).total_seconds()
        ttl_s = spec.ttl_s if spec is not None else None
        # Its keys are revoked by the plan that stores the release, which comes before.
        is_released = left.is_done and not self._job.status.assignments
        is_old = is_released and ttl_s is not None and age_s >= ttl_s
        requeue_s = None if ttl_s is None else max(1.0, ttl_s - age_s)
        told = [advice(self._job), "" if left.is_done else left.waiting_for]
        return Plan(
            status=replace(self._status, waiting_for="; ".join(filter(None, told))),
            delete=left.delete,
            key_epochs=self._keys(),
            delete_self=is_old,
            requeue_s=requeue_s if left.is_done else 5.0,
            events=tuple(self._events),
        )

    def _retry(self) -> Plan:
        """Begin anew; the pods that were kept for their logs go."""
        told = "the job begins anew, as its author asked"
        self._events.append(Event(conditions.RETRIED, told))
        delete = tuple(
            PodDeletion(pod.name, pod.uid, None)
            for pod in self._observed.pods.values()
            if not pod.is_deleting
        )
        status = begun_anew(self._status, self._job.generation)
        return self._planned(status, delete=delete, requeue_s=0.0)

    # Stops.

    def _stop(self, spec: JobSpec) -> Plan:
        """Stop for the strongest reason that there is, and say so."""
        phase, reason, message = self._why_stop(spec)
        if self._status.stop_time is None and self._status.assigned_time is not None:
            self._status = replace(self._status, stop_time=self._now)
            self._events.append(Event(reason, message))
        if self._status.phase is not phase and self._status.stop_time is not None:
            self._status = replace(self._status, phase=phase)
            if reason == conditions.NODES_OVERDRAWN:
                self._events.append(Event(reason, message, is_warning=True))
        self._status = self._status.with_condition(
            conditions.READY, False, reason, message, self._now
        )
        left = tear_down(
            self._observed,
            since=self._status.stop_time or self._now,
            now=self._now,
            grace_s=spec.scheduling.grace_s,
            termination_s=self._limits.termination_s,
        )
        self._note_overdue(left)
        if not left.is_done:
            waiting_for = f"{message}; {left.waiting_for}"
            return self._planned(
                replace(self._status, waiting_for=waiting_for),
                delete=left.delete,
                keys=self._keys(),
                requeue_s=5.0,
            )
        self._release()
        return self._stopped(spec, phase, message, left.delete)

    def _why_stop(self, spec: JobSpec) -> tuple[Phase, str, str]:
        if spec.cancel:
            return Phase.CANCELLING, conditions.CANCELLED_BY_SPEC, "the job was cancelled"
        if spec.suspend:
            return Phase.SUSPENDING, conditions.SUSPENDED_BY_SPEC, "spec.suspend is true"
        if self._status.preempted_by is not None:
            return (
                Phase.PREEMPTING,
                conditions.PREEMPTED_BY_PRIORITY,
                f"gives way to {self._status.preempted_by}, which has a higher priority",
            )
        assigned = self._status.condition(conditions.ASSIGNED)
        if assigned is not None and assigned.reason == conditions.NODES_OVERDRAWN:
            return Phase.SUSPENDING, conditions.NODES_OVERDRAWN, assigned.message
        return Phase.SUSPENDING, conditions.RESUMED, "is resumed once everything was given back"

    def _stopped(
        self, spec: JobSpec, phase: Phase, message: str, delete: Sequence[PodDeletion]
    ) -> Plan:
        """Settle a job that has nothing any more."""
        if spec.cancel:
            return self._end(Phase.CANCELLED, conditions.CANCELLED_BY_SPEC, message)
        status = self._status
        if spec.suspend:
            status = replace(
                status,
                phase=Phase.SUSPENDED,
                waiting_for="suspended; set spec.suspend to false to go on",
                queued_time=None,
                preempted_by=None,
            ).with_condition(
                conditions.SUSPENDED, True, conditions.SUSPENDED_BY_SPEC, message, self._now
            )
            return self._planned(status, delete=delete)
        if phase is Phase.PREEMPTING:
            status = status.with_condition(
                conditions.PREEMPTED, True, conditions.PREEMPTED_BY_PRIORITY, message, self._now
            )
        self._status = replace(status, preempted_by=None)
        return self._wait(spec)

    def _note_overdue(self, step: TeardownStep) -> None:
        """Say which pods did not end in time, until they are gone."""
        self._status, event = with_overdue(self._status, step, self._observed, self._now)
        if event is not None:
            self._events.append(event)

    def _release(self) -> None:
        """Give all nodes back."""
        status = self._status
        if status.assigned_time is not None:
            held_s = int((self._now - status.assigned_time).total_seconds())
            status = replace(status, active_s=status.active_s + max(0, held_s))
        if status.assignments or status.assigned_time is not None:
            status = status.with_condition(
                conditions.ASSIGNED,
                False,
                conditions.NODES_RELEASED,
                "all nodes were given back",
                self._now,
            )
        self._status = replace(
            status,
            assignments=(),
            assigned_time=None,
            stop_time=None,
            accepted_spec="",
            role_statuses=tuple(replace(entry, ready=0) for entry in status.role_statuses),
        )

    # Waiting for nodes.

    def _wait(self, spec: JobSpec) -> Plan:
        status = self._status
        if status.condition(conditions.SUSPENDED) is not None:
            status = status.with_condition(
                conditions.SUSPENDED, False, conditions.RESUMED, "the job goes on", self._now
            )
        if self._observed.missing:
            return self._wait_for_server(spec, status)
        needs_nodes = any(role.is_placed and role.replicas for role in spec.roles)
        obstacle = self._observed.obstacle
        pause_s = backoff_left_s(self._status, self._now, self._limits)
        if not needs_nodes and not obstacle and pause_s <= 0:
            assigned = assign_nodes(replace(self._job, status=status), (), self._now)
            return self._planned(assigned, requeue_s=0.0)
        if obstacle and obstacle != self._job.status.waiting_for:
            self._events.append(Event(conditions.WAITING, obstacle, is_warning=True))
        is_new = status.phase is not Phase.QUEUED
        status = replace(
            status,
            phase=Phase.QUEUED,
            queued_time=status.queued_time or self._now,
            waiting_for=obstacle
            or ("waits for the next assignment of nodes" if is_new else status.waiting_for),
        )
        if is_new:
            status = status.with_condition(
                conditions.READY, False, conditions.WAITING_FOR_NODES, "has no nodes", self._now
            )
        # Pods of an earlier attempt are not wanted.
        delete = tear_down(
            self._observed,
            since=self._now,
            now=self._now,
            grace_s=spec.scheduling.grace_s,
            termination_s=self._limits.termination_s,
        ).delete
        return self._planned(status, delete=delete, requeue_s=pause_s or None)

    def _wait_for_server(self, spec: JobSpec, status: Status) -> Plan:
        queued = status.queued_time or self._now
        if (self._now - queued).total_seconds() >= spec.startup_deadline_s:
            return self._fail(
                Failure(
                    conditions.STARTUP_DEADLINE_EXCEEDED,
                    f"after {spec.startup_deadline_s} s the job still waits for "
                    f"{self._observed.missing}",
                )
            )
        status = replace(
            status,
            phase=Phase.PENDING,
            queued_time=queued,
            waiting_for=self._observed.missing,
        ).with_condition(
            conditions.READY, False, conditions.PODS_NOT_READY, self._observed.missing, self._now
        )
        return self._planned(status, requeue_s=float(spec.startup_deadline_s))

    # Holding nodes.

    def _hold(self, spec: JobSpec) -> Plan:
        too_long = overdue(spec, self._status, self._now)
        if too_long is not None:
            return self._fail(too_long)
        pause_s = backoff_left_s(self._status, self._now, self._limits)
        report = report_of_this_attempt(self._status, self._observed.report)
        kept = maintain_pods(
            self._job.key.name,
            spec.roles,
            self._status,
            self._observed,
            react=lambda pod: react(pod, _rules(spec), report),
            groups=[role.name for role in spec.roles if spec.is_group(role)],
            may_create=pause_s <= 0 and not self._observed.obstacle and not self._observed.missing,
        )
        if self._observed.missing:
            not_ready = (self._observed.missing, *kept.not_ready)
            kept = replace(kept, is_ready=False, not_ready=not_ready)
        for why in kept.lost:
            self._events.append(Event(conditions.POD_LOST, why, is_warning=True))
        verdict = self._count_failures(spec, kept)
        if verdict is not None:
            return self._fail(verdict)
        status = replace(
            self._status,
            assignments=kept.assignments,
            epoch=kept.epoch,
            role_statuses=kept.role_statuses,
            sampler_selector=sampler_selector(self._job.key.kind, self._job.key.name)
            if spec.role(SAMPLER)
            else "",
        )
        status = with_refusals(status, kept.refused, self._now, self._limits)
        self._status = self._readiness(
            spec, status, kept, backoff_left_s(self._status, self._now, self._limits)
        )
        too_late = late(spec, self._status, kept, self._now)
        if too_late is not None:
            return self._fail(too_late)
        status, stall = with_stall(spec, self._status, self._now)
        if stall is not None:
            self._events.append(stall)
        return self._planned(
            status,
            create=kept.create,
            delete=kept.delete,
            keys=self._keys(),
            requeue_s=next_look_s(spec, status, self._now, pause_s=pause_s),
        )

    def _count_failures(self, spec: JobSpec, kept: PodMaintenance) -> Failure | None:
        """Count the failures of this look; return one that ends the job."""
        counted = [pod for pod, reaction in kept.failures if reaction is not Reaction.IGNORE]
        for pod, reaction in kept.failures:
            failure = describe(pod, conditions.POD_FAILED)
            self._events.append(Event(conditions.POD_FAILED, failure.message, is_warning=True))
            if reaction is Reaction.FAIL_JOB:
                return replace(failure, reason=conditions.FAILURE_POLICY)
        if not counted:
            if kept.failures or kept.num_stopped:
                # Not a failure that counts, but no reason to start pods without a pause either.
                self._status = replace(self._status, last_restart_time=self._now)
            return None
        failure = describe(counted[0], conditions.POD_FAILED)
        count = self._status.restart_count + 1
        if count > spec.backoff_limit:
            return replace(
                failure,
                reason=conditions.BACKOFF_LIMIT_EXCEEDED,
                message=f"{failure.message} (failure {count}, backoffLimit is "
                f"{spec.backoff_limit})",
            )
        self._status = replace(
            self._status, restart_count=count, last_restart_time=self._now, failure=failure
        )
        return None

    def _readiness(
        self, spec: JobSpec, status: Status, kept: PodMaintenance, pause_s: float
    ) -> Status:
        if kept.is_ready:
            if status.phase is not Phase.RUNNING:
                self._events.append(Event(conditions.PODS_READY, "all pods are ready"))
            status = replace(
                status,
                phase=Phase.RUNNING,
                waiting_for="",
                endpoint=self._limits.endpoint if spec.is_serving else "",
            )
            return status.with_condition(
                conditions.READY, True, conditions.PODS_READY, "all pods are ready", self._now
            )
        if kept.num_unplaced:
            # True again with the last node: from then on the time of the start counts.
            status = status.with_condition(
                conditions.ASSIGNED,
                False,
                conditions.WAITING_FOR_NODES,
                f"{kept.num_unplaced} of its pods have no node",
                self._now,
            )
        was_running = status.phase in (Phase.RUNNING, Phase.RESTARTING)
        # A driver that was not started yet is no reason to speak of a restart.
        phase = Phase.RESTARTING if was_running else Phase.STARTING
        waiting_for = status.waiting_for if kept.num_unplaced else "; ".join(kept.not_ready[:3])
        if pause_s > 0 and status.failure is not None:
            waiting_for = f"pauses {pause_s:.0f} s after a failure: {status.failure.message}"
        status = replace(status, phase=phase, waiting_for=waiting_for)
        return status.with_condition(
            conditions.READY,
            False,
            conditions.PODS_NOT_READY,
            "; ".join(kept.not_ready) or "pods wait for nodes",
            self._now,
        )

    def _keys(self) -> frozenset[int | None]:
        """Return whose keys are good: the current driver's, and the agents'.

        A key is good once the assignment that it belongs to is stored. A key made earlier could
        not be revoked later, because nothing would name it.
        """
        spec = self._job.spec
        driver = self._status.assigned_to(DRIVER, 0)
        stored = self._job.status.assigned_to(DRIVER, 0)
        if driver is None or stored is None or spec is None:
            return frozenset()
        found: set[int | None] = {driver.epoch} if driver.epoch == stored.epoch else set()
        if any(role.kind == WORKER for role in spec.roles):
            found.add(None)
        return frozenset(found)

    def _planned(
        self,
        status: Status,
        *,
        create: tuple[Assignment, ...] = (),
        delete: Sequence[PodDeletion] = (),
        keys: frozenset[int | None] = frozenset(),
        requeue_s: float | None = None,
    ) -> Plan:
        return Plan(
            status=status,
            create=create,
            delete=tuple(delete),
            key_epochs=keys,
            requeue_s=requeue_s,
            events=tuple(self._events),
        )


def _rules(spec: JobSpec) -> tuple[FailureRule, ...]:
    return spec.rules if spec.method is Method.CUSTOM else (*spec.rules, *RECIPE_RULES)
