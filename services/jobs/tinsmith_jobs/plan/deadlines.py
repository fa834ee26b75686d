"""Deadlines of a job: of its end, its start and its reports."""

from __future__ import annotations

import datetime
from dataclasses import replace

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.plan.actions import Event
from tinsmith_jobs.plan.observed import Report
from tinsmith_jobs.plan.pod_maintenance import PodMaintenance
from tinsmith_jobs.spec import JobSpec
from tinsmith_jobs.status import Failure, Progress, Status

_UNREADY_LOOK_S = 5.0
_SOONEST_LOOK_S = 0.5


def with_report(status: Status, report: Report | None) -> Status:
    """Return a status with what the driver reported last."""
    if report is None:
        return status
    progress = Progress(
        report.step,
        report.max_steps,
        report.run,
        report.update_time,
        report.metrics,
        _seconds_left(status, report),
    )
    return replace(status, progress=progress, latest=report.checkpoint or status.latest)


def overdue(spec: JobSpec, status: Status, now: datetime.datetime) -> Failure | None:
    """Return the failure of a job that held nodes for too long, attempts added up."""
    if spec.active_deadline_s is None or _active_s(status, now) < spec.active_deadline_s:
        return None
    return Failure(
        conditions.DEADLINE_EXCEEDED,
        f"the job held nodes for its activeDeadlineSeconds, {spec.active_deadline_s} s",
    )


def late(
    spec: JobSpec, status: Status, kept: PodMaintenance, now: datetime.datetime
) -> Failure | None:
    """Return the failure of a start that took too long; waiting for a node does not count."""
    if kept.is_ready or kept.num_unplaced:
        return None
    found = (status.condition(conditions.READY), status.condition(conditions.ASSIGNED))
    begun = [entry.transition_time for entry in found if entry is not None]
    waited_s = (now - max(begun, default=now)).total_seconds()
    if waited_s < spec.startup_deadline_s:
        return None
    return Failure(
        conditions.STARTUP_DEADLINE_EXCEEDED,
        f"not all pods were ready after {spec.startup_deadline_s} s: "
        f"{'; '.join(kept.not_ready[:3])}",
    )


def with_stall(
    spec: JobSpec, status: Status, now: datetime.datetime
) -> tuple[Status, Event | None]:
    """Return a status that says whether the driver reports, and an event if it has stopped to."""
    if status.phase is not Phase.RUNNING or spec.is_serving:
        return status, None
    ready = status.condition(conditions.READY)
    times = [ready.transition_time if ready is not None else now]
    if status.progress is not None:
        times.append(status.progress.update_time)
    old = status.condition(conditions.STALLED)
    if (now - max(times)).total_seconds() < spec.stall_timeout_s:
        if old is None:
            return status, None
        said = "the driver reports"
        return (
            status.with_condition(conditions.STALLED, False, conditions.PROGRESSING, said, now),
            None,
        )
    message = f"the driver has not reported progress for {spec.stall_timeout_s} s or more"
    is_new = old is None or not old.is_true
    return (
        replace(status, waiting_for=message).with_condition(
            conditions.STALLED, True, conditions.NO_PROGRESS, message, now
        ),
        Event(conditions.NO_PROGRESS, message, is_warning=True) if is_new else None,
    )


def next_look_s(spec: JobSpec, status: Status, now: datetime.datetime, *, pause_s: float) -> float:
    """Return when something of a job that holds nodes may be late."""
    looks = [float(spec.stall_timeout_s)]
    if pause_s > 0:
        looks.append(pause_s)
    if status.phase is not Phase.RUNNING:
        looks.append(_UNREADY_LOOK_S)
    if spec.active_deadline_s is not None:
        looks.append(spec.active_deadline_s - _active_s(status, now))
    return max(_SOONEST_LOOK_S, min(looks))


def _active_s(status: Status, now: datetime.datetime) -> float:
    if status.assigned_time is None:
        return status.active_s
    return status.active_s + (now - status.assigned_time).total_seconds()


def _seconds_left(status: Status, report: Report) -> float | None:
    if status.assigned_time is None or not 0 < report.step < report.max_steps:
        return None
    active_s = max(0.0, _active_s(status, report.update_time))
    return active_s / report.step * (report.max_steps - report.step)
