"""Builds the plan for one job: its status so far, what is told, and the ends that it reaches."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import ENDED, Phase
from tinsmith_jobs.plan.actions import Event, Plan, PodDeletion
from tinsmith_jobs.plan.deadlines import with_report
from tinsmith_jobs.plan.divergence import with_divergence
from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import Observed, ObservedJob
from tinsmith_jobs.plan.status_transitions import accept_spec
from tinsmith_jobs.plan.teardown import TeardownStep, tear_down, with_overdue
from tinsmith_jobs.spec import DRIVER, WORKER, Scheduling
from tinsmith_jobs.status import Assignment, Failure, Status


class PlanBuilder:
    """Builds the plan for one job.

    Attributes:
        job: The job as it is stored.
        observed: What is there of it.
        now: The time.
        limits: Settings of plans.
        status: The status that the plan will have.
        events: What will be told.
    """

    def __init__(
        self, job: ObservedJob, observed: Observed, now: datetime.datetime, limits: Limits
    ) -> None:
        self.job = job
        self.observed = observed
        self.now = now
        self.limits = limits
        # What was asked for after the end was not done, so it counts as not seen.
        is_over = job.status.phase in ENDED
        generation = job.status.observed_generation if is_over else job.generation
        status = replace(job.status, observed_generation=generation)
        status, refused = accept_spec(job, status, now)
        status = with_report(status, observed.report)
        self.status, told = with_divergence(status, observed.report, now)
        self.events: list[Event] = [event for event in (refused, told) if event is not None]

    def fail(self, failure: Failure) -> Plan:
        """End the job for a failure."""
        self.status = replace(self.status, failure=failure)
        return self.end(Phase.FAILED, failure.reason, failure.message)

    def end(self, phase: Phase, reason: str, message: str) -> Plan:
        """End the job; its pods are stopped from the next look on, the driver first."""
        status = self.status
        if phase is Phase.SUCCEEDED:
            status = replace(status, final=status.latest, failure=None)
        kind = conditions.FAILED if phase is Phase.FAILED else conditions.COMPLETE
        status = replace(
            status,
            phase=phase,
            completion_time=self.now,
            stop_time=status.stop_time or self.now,
            waiting_for=self._waits_at_end(),
            preempted_by=None,
        )
        status = status.with_condition(kind, True, reason, message, self.now)
        self.status = status.with_condition(conditions.READY, False, reason, message, self.now)
        self.events.append(Event(phase.value, message, is_warning=phase is Phase.FAILED))
        # Pods go once the end is stored: a plan that sees neither could not tell that it was
        # reached.
        return self.planned(self.status, keys=self.keys(), requeue_s=0.0)

    def _waits_at_end(self) -> str:
        """Return what the next look will wait for, so that it need not say so itself."""
        spec = self.job.spec
        return tear_down(
            self.observed,
            since=self.status.stop_time or self.now,
            now=self.now,
            grace_s=(spec.scheduling if spec is not None else Scheduling()).grace_s,
            termination_s=self.limits.termination_s,
        ).waiting_for

    def note_overdue(self, step: TeardownStep) -> None:
        """Say which pods did not end in time, until they are gone."""
        self.status, event = with_overdue(self.status, step, self.observed, self.now)
        if event is not None:
            self.events.append(event)

    def release(self) -> None:
        """Give all nodes back."""
        status = self.status
        if status.assigned_time is not None:
            held_s = int((self.now - status.assigned_time).total_seconds())
            status = replace(status, active_s=status.active_s + max(0, held_s))
        if status.assignments or status.assigned_time is not None:
            status = status.with_condition(
                conditions.ASSIGNED,
                False,
                conditions.NODES_RELEASED,
                "all nodes were given back",
                self.now,
            )
        self.status = replace(
            status,
            assignments=(),
            assigned_time=None,
            stop_time=None,
            accepted_spec="",
            role_statuses=tuple(replace(entry, ready=0) for entry in status.role_statuses),
        )

    def keys(self) -> frozenset[int | None]:
        """Return whose keys are good: the current driver's, and the agents'.

        A key is good once the assignment that it belongs to is stored. A key made earlier could
        not be revoked later, because nothing would name it.
        """
        spec = self.job.spec
        driver = self.status.assigned_to(DRIVER, 0)
        stored = self.job.status.assigned_to(DRIVER, 0)
        if driver is None or stored is None or spec is None:
            return frozenset()
        found: set[int | None] = {driver.epoch} if driver.epoch == stored.epoch else set()
        if any(role.kind == WORKER for role in spec.roles):
            found.add(None)
        return frozenset(found)

    def planned(
        self,
        status: Status,
        *,
        create: tuple[Assignment, ...] = (),
        delete: Sequence[PodDeletion] = (),
        keys: frozenset[int | None] = frozenset(),
        takes_uids: bool = True,
        requeue_s: float | None = None,
    ) -> Plan:
        """Return the plan with a status, and with what was told until now."""
        return Plan(
            status=status,
            create=create,
            delete=tuple(delete),
            key_epochs=keys,
            takes_uids=takes_uids,
            requeue_s=requeue_s,
            events=tuple(self.events),
        )
