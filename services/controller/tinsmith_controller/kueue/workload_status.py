"""What the controller writes into the status of a Workload."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from tinsmith_controller.kueue.conditions import (
    ADMITTED,
    EVICTED,
    FAILED,
    FINISHED,
    NO_RESERVATION,
    NODE_FAILURES,
    PENDING,
    PODS_READY,
    PREEMPTED,
    QUOTA_RESERVED,
    RECOVERED,
    REQUEUED,
    STARTED,
    SUCCEEDED,
    WAIT_FOR_RECOVERY,
    WAIT_FOR_START,
    WorkloadCondition,
    with_condition,
)
from tinsmith_controller.kueue.workload_record import KueueWorkload
from tinsmith_jobs.status_codec import decode_time

_AT_ONCE = frozenset({PREEMPTED, NODE_FAILURES})
"""Evictions after which a Workload is queued again at once; else Kueue says when."""
_PAST_TIME = "accumulatedPastExecutionTimeSeconds"


def released(workload: KueueWorkload, now: datetime.datetime) -> dict[str, Any]:
    """Return a Workload that has given its quota back after an eviction."""
    evicted = workload.conditions[EVICTED]
    status = dict(workload.content.get("status") or {})
    changes = {
        QUOTA_RESERVED: WorkloadCondition(False, PENDING, evicted.message),
        REQUEUED: WorkloadCondition(evicted.reason in _AT_ONCE, evicted.reason, evicted.message),
    }
    if workload.is_true(ADMITTED):
        told = "The workload has no reservation"
        changes[ADMITTED] = WorkloadCondition(False, NO_RESERVATION, told)
        status[_PAST_TIME] = int(status.get(_PAST_TIME) or 0) + _admitted_s(workload, now)
    if PODS_READY in workload.conditions:
        changes[PODS_READY] = WorkloadCondition(False, WAIT_FOR_START, "the job waits in its queue")
    for field in ("admission", "reclaimablePods"):
        status.pop(field, None)
    return _with(workload, status, changes, now)


def finished(
    workload: KueueWorkload, *, has_succeeded: bool, message: str, now: datetime.datetime
) -> dict[str, Any]:
    """Return a Workload whose job is over."""
    reason = SUCCEEDED if has_succeeded else FAILED
    changes = {FINISHED: WorkloadCondition(True, reason, message)}
    return _with(workload, dict(workload.content.get("status") or {}), changes, now)


def reported(
    workload: KueueWorkload,
    *,
    is_ready: bool,
    done: Mapping[str, int],
    now: datetime.datetime,
) -> dict[str, Any] | None:
    """Return a Workload that says how the pods of its job are; None if it says so already.

    Args:
        workload: The Workload.
        is_ready: Whether all pods are ready or done.
        done: Pods that are done for good, by pod set.
        now: The time.
    """
    status = dict(workload.content.get("status") or {})
    condition = _readiness(workload.conditions.get(PODS_READY), is_ready)
    old = workload.conditions.get(PODS_READY)
    is_same = old is not None and (old.is_true, old.reason) == (condition.is_true, condition.reason)
    reclaimable = _reclaimable(status, done)
    if is_same and reclaimable == (status.get("reclaimablePods") or []):
        return None
    if reclaimable:
        status["reclaimablePods"] = reclaimable
    return _with(workload, status, {PODS_READY: condition}, now)


def _readiness(old: WorkloadCondition | None, is_ready: bool) -> WorkloadCondition:
    was_started = old is not None and (old.is_true or old.reason == WAIT_FOR_RECOVERY)
    if is_ready:
        if old is not None and old.is_true:
            return old
        reason = RECOVERED if was_started else STARTED
        return WorkloadCondition(True, reason, "all pods are ready or done")
    reason = WAIT_FOR_RECOVERY if was_started else WAIT_FOR_START
    return WorkloadCondition(False, reason, "some pods are not ready")


def _reclaimable(status: Mapping[str, Any], done: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the pods that need nothing any more; Kueue lets their number only grow."""
    before = {entry["name"]: entry["count"] for entry in status.get("reclaimablePods") or []}
    counts = {
        name: max(int(before.get(name, 0)), done.get(name, 0))
        for name in dict.fromkeys((*before, *done))
    }
    return [{"name": name, "count": count} for name, count in counts.items() if count]


def _admitted_s(workload: KueueWorkload, now: datetime.datetime) -> int:
    for entry in (workload.content.get("status") or {}).get("conditions") or []:
        since = decode_time(entry.get("lastTransitionTime"))
        if entry.get("type") == ADMITTED and since is not None:
            return max(0, int((now - since).total_seconds()))
    return 0


def _with(
    workload: KueueWorkload,
    status: dict[str, Any],
    changes: Mapping[str, WorkloadCondition],
    now: datetime.datetime,
) -> dict[str, Any]:
    conditions = status.get("conditions") or []
    generation = int(workload.content["metadata"].get("generation") or 0)
    for kind, condition in changes.items():
        conditions = with_condition(conditions, kind, condition, generation=generation, now=now)
    return {**workload.content, "status": {**status, "conditions": conditions}}
