"""Phases, condition types and reasons: the words of a status, in one place."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Phase(enum.Enum):
    """Where a job stands, in one word."""

    PENDING = "Pending"
    """Not looked at yet."""
    QUEUED = "Queued"
    """Waits for nodes."""
    STARTING = "Starting"
    """Has nodes; its pods are not all ready."""
    RUNNING = "Running"
    RESTARTING = "Restarting"
    """Pods failed or were lost, and are being replaced."""
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    PREEMPTING = "Preempting"
    """Saves and gives its nodes to another job."""
    CANCELLING = "Cancelling"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
STOPPING = frozenset({Phase.SUSPENDING, Phase.PREEMPTING, Phase.CANCELLING})


class PoolPhase(enum.Enum):
    """Where a pool stands, in one word."""

    PENDING = "Pending"
    QUEUED = "Queued"
    """No replica has a node."""
    STARTING = "Starting"
    READY = "Ready"
    DEGRADED = "Degraded"
    """Some replicas are ready, some are not."""
    FAILED = "Failed"
    """Its spec cannot be run."""


# Types of conditions.
ASSIGNED = "Assigned"
READY = "Ready"
STALLED = "Stalled"
REPLAY_DIVERGED = "ReplayDiverged"
SUSPENDED = "Suspended"
IMAGE_UNAVAILABLE = "ImageUnavailable"
TERMINATION_OVERDUE = "TerminationOverdue"
PREEMPTED = "Preempted"
SPEC_ACCEPTED = "SpecAccepted"
COMPLETE = "Complete"
FAILED = "Failed"

# Reasons.
INVALID_SPEC = "InvalidSpec"
NODES_ASSIGNED = "NodesAssigned"
WAITING_FOR_NODES = "WaitingForNodes"
NO_NODE_FITS = "NoNodeFits"
"""Would wait for nodes even if no other job ran."""
WAITING = "Waiting"
"""For something else than nodes; also of the one event about what a job waits for."""
NODES_RELEASED = "NodesReleased"
NODES_OVERDRAWN = "NodesOverdrawn"
PODS_READY = "PodsReady"
PODS_NOT_READY = "PodsNotReady"
POD_LOST = "PodLost"
POD_FAILED = "PodFailed"
POD_OUTDATED = "PodOutdated"
BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
FAILURE_POLICY = "FailurePolicy"
DEADLINE_EXCEEDED = "DeadlineExceeded"
STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
DRIVER_SUCCEEDED = "DriverSucceeded"
SUSPENDED_BY_SPEC = "SuspendedBySpec"
CANCELLED_BY_SPEC = "CancelledBySpec"
PREEMPTED_BY_PRIORITY = "PreemptedByPriority"
NO_PROGRESS = "NoProgress"
PROGRESSING = "Progressing"
OTHER_BITS = "OtherBits"
RESUMED = "Resumed"
RETRIED = "Retried"
IMAGE_PULL_FAILED = "ImagePullFailed"
IMAGE_PULLED = "ImagePulled"
POD_REJECTED = "PodRejected"
EDIT_REFUSED = "EditRefused"
EDIT_ACCEPTED = "EditAccepted"
POD_STUCK = "PodStuck"
PODS_GONE = "PodsGone"


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a status."""

    type: str
    is_true: bool
    reason: str
    message: str
    transition_time: datetime.datetime
    observed_generation: int = 0


def with_condition(
    conditions: Sequence[Condition],
    type_: str,
    is_true: bool,
    reason: str,
    message: str,
    *,
    now: datetime.datetime,
    generation: int,
) -> tuple[Condition, ...]:
    """Return conditions with one set; its transition time changes with its truth alone."""
    old = next((entry for entry in conditions if entry.type == type_), None)
    changed = old is None or old.is_true != is_true
    new = Condition(
        type_,
        is_true,
        reason,
        message,
        now if changed or old is None else old.transition_time,
        generation,
    )
    return tuple(sorted([*(e for e in conditions if e.type != type_), new], key=lambda e: e.type))
