"""When a job that failed begins anew, with what it had saved, and what its status says till then.

One that could not be run, and of which nothing had started, does so once its spec is corrected. Any
other does so when its author asks for it: the annotation names the end that is to be undone, by its
time, so that a later failure is not undone too.
"""

from __future__ import annotations

from tinsmith_jobs import conditions
from tinsmith_jobs.conditions import Phase
from tinsmith_jobs.plan.observed import Observed, ObservedJob, Report
from tinsmith_jobs.status import Status


def is_corrected(job: ObservedJob, observed: Observed) -> bool:
    """Return whether a job that could not be run can be now; nothing of it had started."""
    status = job.status
    reason = status.failure.reason if status.failure is not None else ""
    return (
        status.phase is Phase.FAILED
        and reason in (conditions.INVALID_SPEC, conditions.POD_REJECTED)
        and status.start_time is None
        and job.generation != status.observed_generation
        and job.spec is not None
        and not observed.rejection
    )


def is_retried(job: ObservedJob) -> bool:
    """Return whether the end of a failed job is to be undone, and all was given back."""
    return _is_asked_for(job) and not job.status.assignments


def _is_asked_for(job: ObservedJob) -> bool:
    """Whether the end of a failed job is to be undone, now or once all was given back."""
    status = job.status
    return (
        status.phase is Phase.FAILED
        and job.retried_end is not None
        and job.retried_end == status.completion_time
    )


def begun_anew(status: Status, generation: int) -> Status:
    """Return the status of a job that failed and begins anew: its failures are forgotten.

    Names of pods that it had stay taken, and its driver goes on from what was saved.
    """
    return Status(
        observed_generation=generation,
        fencing_token=status.fencing_token,
        epoch=status.epoch,
        refusals=status.refusals,
        progress=status.progress,
        latest=status.latest,
        named_checkpoints=status.named_checkpoints,
    )


def advice(job: ObservedJob) -> str:
    """Return what becomes of a failed job, or what to do about it; empty where that is plain.

    A job that is tried again says so, and one whose spec was changed since says how to.
    """
    if _is_asked_for(job):
        return "begins anew once everything was given back"
    if job.status.phase is not Phase.FAILED or job.generation == job.status.observed_generation:
        return ""
    return (
        "a change of the spec does not start a failed job again: run "
        f"`tinsmith jobs retry {job.key.name}`, or delete it and apply it anew"
    )


def report_of_this_attempt(status: Status, report: Report | None) -> Report | None:
    """Return what the driver reported since the job got its nodes; ends before do not count."""
    since = status.assigned_time
    return report if report is None or since is None or report.update_time >= since else None
