"""Teardown: the driver saves and ends first, because it needs the other pods for that.

A pod that does not end, because its node is away or hangs, is waited for up to a deadline. It
counts from the time that the pod was given, so that no pod is given up before it was told to go.
Then the job gives back what it holds, and its keys are revoked, though the pod may still run.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_jobs import conditions
from tinsmith_jobs.plan.actions import Event, PodDeletion
from tinsmith_jobs.plan.observed import Observed, PodView
from tinsmith_jobs.spec import DRIVER
from tinsmith_jobs.status import Status

_MARGIN_S = 15.0
"""For the cluster to notice that a driver's grace is over."""


@dataclass(frozen=True, slots=True)
class TeardownStep:
    """One step of giving back.

    Attributes:
        delete: Pods to delete now.
        is_done: Whether nothing runs any more; what is on lost nodes or overdue does not count.
        waiting_for: What it waits for.
        overdue: Pods that were to have ended and still run.
    """

    delete: tuple[PodDeletion, ...]
    is_done: bool
    waiting_for: str
    overdue: tuple[PodView, ...] = ()


def tear_down(
    observed: Observed,
    *,
    since: datetime.datetime,
    now: datetime.datetime,
    grace_s: int,
    termination_s: float,
    keeps_ended: bool = False,
) -> TeardownStep:
    """Return the next step of stopping all pods of a job.

    Args:
        observed: What there is.
        since: When it was told to stop.
        now: The time.
        grace_s: How long the driver may take to save.
        termination_s: How long a pod may take to be gone once its own grace is over.
        keeps_ended: Whether pods that ended by themselves stay, for their logs.
    """
    running = [pod for pod in observed.pods.values() if _runs(pod, observed)]
    drivers = [pod for pod in running if pod.role == DRIVER]
    is_in_time = (now - since).total_seconds() < grace_s + _MARGIN_S
    if drivers and is_in_time:
        return TeardownStep(
            _delete(drivers, grace_s), False, "waits for the driver to save and end"
        )
    left = ", ".join(f"{pod.role} {pod.index}" for pod in running[:3])
    more = f" and {len(running) - 3} more" if len(running) > 3 else ""
    gone = [pod for pod in observed.pods.values() if not (keeps_ended and pod.has_ended)]
    if running and all(_is_overdue(pod, now, termination_s) for pod in running):
        return TeardownStep(_delete(gone, None), True, "", tuple(running))
    return TeardownStep(
        _delete(gone, None),
        not running,
        f"waits for {left}{more} to end" if running else "",
    )


def with_overdue(
    status: Status, step: TeardownStep, observed: Observed, now: datetime.datetime
) -> tuple[Status, Event | None]:
    """Return a status that says which pods are overdue, and an event when it begins to.

    Args:
        status: The status so far.
        step: What the teardown came to.
        observed: What there is.
        now: The time.
    """
    old = status.condition(conditions.TERMINATION_OVERDUE)
    was_overdue = old is not None and old.is_true
    if was_overdue:
        if any(_runs(pod, observed) for pod in observed.pods.values()):
            return status, None
        said = "all pods have ended"
        return (
            status.with_condition(
                conditions.TERMINATION_OVERDUE, False, conditions.PODS_GONE, said, now
            ),
            None,
        )
    if not step.overdue:
        return status, None
    names = ", ".join(f"{pod.name} on {pod.node or 'no node'}" for pod in step.overdue[:3])
    more = f" and {len(step.overdue) - 3} more" if len(step.overdue) > 3 else ""
    message = f"these pods did not end in time and may still run: {names}{more}; keys are revoked"
    return (
        status.with_condition(
            conditions.TERMINATION_OVERDUE, True, conditions.POD_STUCK, message, now
        ),
        Event(conditions.POD_STUCK, message, is_warning=True),
    )


def _runs(pod: PodView, observed: Observed) -> bool:
    return not pod.has_ended and pod.node not in observed.lost_nodes


def _is_overdue(pod: PodView, now: datetime.datetime, termination_s: float) -> bool:
    """Whether a pod was told to go so long ago that it is no longer waited for."""
    return pod.end_by is not None and (now - pod.end_by).total_seconds() >= termination_s


def _delete(pods: Sequence[PodView], grace_s: int | None) -> tuple[PodDeletion, ...]:
    return tuple(
        PodDeletion(pod.name, pod.uid, grace_s)
        for pod in sorted(pods, key=lambda pod: pod.name)
        if not pod.is_deleting
    )
