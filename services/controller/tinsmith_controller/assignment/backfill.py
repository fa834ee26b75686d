"""Backfill: which workloads may go ahead of one that does not fit.

A large job amid a stream of small ones would never find enough nodes free at once. So once it has
waited for `backfill_patience_s`, nodes are reserved for it: those where it can start soonest.
Durations are not known, so the nodes are ranked by the age of the workloads that run there.
"""

from __future__ import annotations

import datetime

import numpy as np

from tinsmith_controller.assignment.capacity import (
    CPU,
    GPUS,
    Cluster,
    Indices,
    Room,
    seconds,
)
from tinsmith_controller.assignment.gang_assignment import Gang, place_soonest
from tinsmith_controller.assignment.types import QueueConfig, Workload


def is_overdue(workload: Workload, policy: QueueConfig, now: datetime.datetime) -> bool:
    """Whether the workload has waited for its patience, and no later one may go ahead of it."""
    return seconds(now) - seconds(workload.queued) >= policy.backfill_patience_s


def reserve(
    cluster: Cluster, gang: Gang, workload: Workload, kept: Room, overdue_since_s: float
) -> list[int] | None:
    """Return the nodes on which the workload can start soonest, one by pod, or None if on none.

    Jobs that were there when its patience ended are gone after the longest of them, whichever they
    are; so it starts by then if it keeps to their nodes. Among those it takes the ones with the
    most free. Nodes that got newer jobs since come after them, by how new those are.

    Args:
        cluster: The cluster.
        gang: The pods of the workload.
        workload: The workload.
        kept: What is kept for others already, [4, N].
        overdue_since_s: When the workload's patience ended, in seconds since 1970.
    """
    return place_soonest(
        gang, cluster.drained(workload) - kept, _ranking(cluster, gang, kept, overdue_since_s)
    )


def _ranking(cluster: Cluster, gang: Gang, kept: Room, overdue_since_s: float) -> Indices:
    soon = cluster.free + cluster.releasing - kept
    largest = gang.groups[0].amounts
    fits = ((largest[:, None] <= soon) | (largest[:, None] == 0)).all(axis=0)
    lateness_s = np.where(fits, 0.0, np.maximum(cluster.youngest - overdue_since_s, 0.0))
    scarce = GPUS if largest[GPUS] > 0 else CPU
    order: Indices = np.lexsort(
        (np.arange(len(fits)), -cluster.free[scarce], -soon[scarce], lateness_s)
    )
    return order
