"""Conditions of a Workload: their types and reasons, as Kueue has them, and how one is set."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith_jobs.status_codec import encode_time

QUOTA_RESERVED = "QuotaReserved"
ADMITTED = "Admitted"
EVICTED = "Evicted"
REQUEUED = "Requeued"
PODS_READY = "PodsReady"
FINISHED = "Finished"

PENDING = "Pending"
NO_RESERVATION = "NoReservation"
PREEMPTED = "Preempted"
NODE_FAILURES = "NodeFailures"
WAIT_FOR_START = "WaitForStart"
WAIT_FOR_RECOVERY = "WaitForRecovery"
STARTED = "Started"
RECOVERED = "Recovered"
SUCCEEDED = "Succeeded"
FAILED = "Failed"

_MAX_MESSAGE = 32768


@dataclass(frozen=True, slots=True)
class WorkloadCondition:
    """A condition of a Workload."""

    is_true: bool
    reason: str = ""
    message: str = ""


def decode_conditions(status: Mapping[str, Any]) -> dict[str, WorkloadCondition]:
    """Return the conditions of a status by their type."""
    return {
        str(entry.get("type")): WorkloadCondition(
            entry.get("status") == "True",
            str(entry.get("reason") or ""),
            str(entry.get("message") or ""),
        )
        for entry in status.get("conditions") or []
    }


def with_condition(
    conditions: Iterable[Mapping[str, Any]],
    kind: str,
    new: WorkloadCondition,
    *,
    generation: int,
    now: datetime.datetime,
) -> list[dict[str, Any]]:
    """Return conditions with one of them set; its time is that of its last change of state."""
    entry: dict[str, Any] = {
        "type": kind,
        "status": "True" if new.is_true else "False",
        "reason": new.reason,
        "message": new.message[:_MAX_MESSAGE],
        "observedGeneration": generation,
        "lastTransitionTime": encode_time(now),
    }
    found = [dict(each) for each in conditions]
    for position, old in enumerate(found):
        if old.get("type") == kind:
            if old.get("status") == entry["status"]:
                entry["lastTransitionTime"] = old.get("lastTransitionTime")
            found[position] = entry
            return found
    return [*found, entry]
