"""Teardown: the driver saves and ends first, because it needs the other pods for that."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_jobs.plan.actions import PodDeletion
from tinsmith_jobs.plan.observed import Observed, PodView
from tinsmith_jobs.spec import DRIVER

_MARGIN_S = 15.0
"""For the cluster to notice that a driver's grace is over."""


@dataclass(frozen=True, slots=True)
class TeardownStep:
    """One step of giving back.

    Attributes:
        delete: Pods to delete now.
        is_done: Whether nothing runs any more; what is on lost nodes does not count.
        waiting_for: What it waits for.
    """

    delete: tuple[PodDeletion, ...]
    is_done: bool
    waiting_for: str


def tear_down(
    observed: Observed,
    *,
    since: datetime.datetime,
    now: datetime.datetime,
    grace_s: int,
    keeps_ended: bool = False,
) -> TeardownStep:
    """Return the next step of stopping all pods of a job.

    Args:
        observed: What there is.
        since: When it was told to stop.
        now: The time.
        grace_s: How long the driver may take to save.
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
    return TeardownStep(
        _delete(gone, None),
        not running,
        f"waits for {left}{more} to end" if running else "",
    )


def _runs(pod: PodView, observed: Observed) -> bool:
    return not pod.has_ended and pod.node not in observed.lost_nodes


def _delete(pods: Sequence[PodView], grace_s: int | None) -> tuple[PodDeletion, ...]:
    return tuple(
        PodDeletion(pod.name, pod.uid, grace_s)
        for pod in sorted(pods, key=lambda pod: pod.name)
        if not pod.is_deleting
    )
