"""What to do about a job and its Workload: a pure function of the two, in the order of the rules.

The order is that of Kueue's own integrations. A job without an admission is suspended first. Quota
is given back only when nothing of the job runs any more.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Action(enum.Enum):
    """One write, or none."""

    NONE = "nothing"
    CREATE = "create the Workload"
    UPDATE = "have the Workload follow its job"
    DELETE = "delete the Workload"
    SUSPEND = "suspend the job"
    RESUME = "resume the job"
    RELEASE = "give the quota back"
    FINISH = "say that the job is over"
    REPORT = "say how the pods are"


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """A job, as far as Kueue is concerned.

    Attributes:
        has_queue: Whether it has the label of a queue.
        is_suspended: Whether `spec.suspend` is true.
        is_cancelled: Whether `spec.cancel` is true; it ends by itself.
        has_ended: Whether it is over.
        is_active: Whether it holds nodes or has pods that run.
    """

    has_queue: bool = True
    is_suspended: bool = True
    is_cancelled: bool = False
    has_ended: bool = False
    is_active: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadView:
    """The Workload of a job, compared with what it is to be.

    Attributes:
        is_deleting: Whether it was told to go.
        has_quota: Whether quota is reserved for it.
        is_admitted: Whether its job may run.
        is_evicted: Whether it was told to give its quota back.
        is_finished: Whether its job is over for Kueue.
        counts_right: Whether it counts the pods and requests of the job, in its queue.
        is_current: Whether it describes the job in every respect but priority.
        has_priority: Whether it has the priority of the job.
    """

    is_deleting: bool = False
    has_quota: bool = False
    is_admitted: bool = False
    is_evicted: bool = False
    is_finished: bool = False
    counts_right: bool = True
    is_current: bool = True
    has_priority: bool = True


def decide(job: QueuedJob, workload: WorkloadView | None) -> Action:
    """Return the next write; the one after it follows from what that one changed."""
    if not job.has_queue:
        return _without_queue(job, workload)
    if job.has_ended:
        return _after_the_end(job, workload)
    if job.is_cancelled:
        return Action.NONE
    if not job.is_suspended and not _may_run(workload):
        return Action.SUSPEND
    if workload is None:
        return Action.NONE if job.is_active else Action.CREATE
    if workload.is_deleting:
        return Action.NONE
    # Before an edit of the job counts: what was stopped stays so, and waits as long as it was told.
    if workload.is_evicted and workload.has_quota and not workload.is_finished:
        return Action.NONE if job.is_active else Action.RELEASE
    if job.is_suspended and (workload.is_finished or not workload.is_current):
        return _made_anew(job, workload)
    if not workload.has_priority and not workload.has_quota:
        return Action.UPDATE
    if workload.is_admitted and not workload.is_evicted:
        return Action.RESUME if job.is_suspended else Action.REPORT
    return Action.NONE


def _may_run(workload: WorkloadView | None) -> bool:
    return (
        workload is not None
        and workload.is_admitted
        and workload.counts_right
        and not (workload.is_deleting or workload.is_evicted or workload.is_finished)
    )


def _without_queue(job: QueuedJob, workload: WorkloadView | None) -> Action:
    """Return what is done once a job has no queue any more.

    What runs on quota obeys Kueue until it has given its pods back.
    """
    if workload is None or workload.is_deleting:
        return Action.NONE
    if job.has_ended or not job.is_active:
        return Action.DELETE
    return Action.NONE if job.is_suspended or not workload.is_evicted else Action.SUSPEND


def _after_the_end(job: QueuedJob, workload: WorkloadView | None) -> Action:
    is_told = workload is None or workload.is_finished or workload.is_deleting
    # Until its last pod is gone it uses what was admitted.
    return Action.NONE if is_told or job.is_active else Action.FINISH


def _made_anew(job: QueuedJob, workload: WorkloadView) -> Action:
    """Return how a Workload follows a suspended job that is not what it was made for.

    What quota was reserved for cannot be changed, nor what is finished.
    """
    if job.is_active:
        return Action.NONE
    is_fixed = workload.is_finished or workload.has_quota
    return Action.DELETE if is_fixed else Action.UPDATE
