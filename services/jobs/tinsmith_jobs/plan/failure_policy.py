"""The failure policy: what the end of a pod means, and the pause before a restart."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from dataclasses import replace

from tinsmith_jobs.plan.limits import Limits
from tinsmith_jobs.plan.observed import DISRUPTION, PodView, Report
from tinsmith_jobs.spec import DRIVER, FailureRule, Reaction
from tinsmith_jobs.status import Failure, Refusal, Status

_AGENT = "agent"
FAILED_EXIT_CODE = 1
_SETTINGS_EXIT_CODE = 2
"""With it a driver says that it cannot run what it was told, however often it is started."""
RECIPE_RULES = (
    FailureRule(
        Reaction.FAIL_JOB, roles=frozenset({DRIVER}), exit_codes=frozenset({FAILED_EXIT_CODE})
    ),
)
"""With 1 our own driver says that a restart would not help; other programs may mean anything."""
SIGTERM_EXIT_CODE = 128 + 15
"""With it a driver says that it saved and stopped as it was told."""
_MAX_DOUBLINGS = 16
_MAX_REFUSALS = 16


def react(pod: PodView, rules: Sequence[FailureRule], report: Report | None = None) -> Reaction:
    """Return what to do about a pod that failed: the first rule that fits, else the default.

    By default a disruption by the cluster, and a driver that saved and stopped as it was told,
    are no failures. A driver that cannot run its settings, or reported that it cannot go on, fails
    the job. Everything else restarts the role.
    """
    for rule in rules:
        if (
            (not rule.roles or _role_word(pod.role) in rule.roles)
            and (not rule.exit_codes or pod.exit_code in rule.exit_codes)
            and (not rule.pod_conditions or rule.pod_conditions & pod.conditions)
        ):
            return rule.action
    if DISRUPTION in pod.conditions:
        return Reaction.IGNORE
    if pod.role == DRIVER and pod.exit_code == _SETTINGS_EXIT_CODE:
        return Reaction.FAIL_JOB
    if pod.role == DRIVER and pod.exit_code == SIGTERM_EXIT_CODE:
        return Reaction.IGNORE
    if pod.role == DRIVER and report is not None and report.has_failed:
        return Reaction.FAIL_JOB
    return Reaction.RESTART_ROLE


def was_told_to_stop(pod: PodView) -> bool:
    """Whether the cluster, or a person, had a pod stop: a drain, an eviction, `kubectl delete`."""
    return pod.is_deleting or DISRUPTION in pod.conditions


def describe(pod: PodView, reason: str) -> Failure:
    """Return why a pod failed, in one sentence."""
    code = f"exit code {pod.exit_code}" if pod.exit_code is not None else "no exit code"
    problem = f": {pod.problem}" if pod.problem else ""
    return Failure(
        reason=reason,
        message=f"{pod.role} {pod.index} ended with {code}{problem}",
        role=pod.role,
        pod=pod.name,
        node=pod.node,
        exit_code=pod.exit_code,
    )


def backoff_left_s(status: Status, now: datetime.datetime, limits: Limits) -> float:
    """Return how long nothing is started after a pod ended; it doubles with each failure."""
    if status.last_restart_time is None:
        return 0.0
    num_doublings = min(max(0, status.restart_count - 1), _MAX_DOUBLINGS)
    pause_s = min(limits.backoff_max_s, limits.backoff_base_s * 2.0**num_doublings)
    return max(0.0, pause_s - (now - status.last_restart_time).total_seconds())


def with_refusals(
    status: Status, nodes: Collection[str], now: datetime.datetime, limits: Limits
) -> Status:
    """Return the status with the nodes that refused a pod just now, without those of long ago.

    A node may report what it does not have, such as a GPU that broke. Without these entries the
    pod would be placed there again until its job has failed.
    """
    earlier = [
        entry
        for entry in status.refusals
        if entry.node not in nodes and not _is_over(entry, now, limits)
    ]
    found = (*earlier, *(Refusal(node, now) for node in sorted(nodes)))
    return replace(status, refusals=found[-_MAX_REFUSALS:])


def avoided_nodes(status: Status, now: datetime.datetime, limits: Limits) -> frozenset[str]:
    """Return the nodes that get no pods of the workload now."""
    return frozenset(entry.node for entry in status.refusals if not _is_over(entry, now, limits))


def _is_over(refusal: Refusal, now: datetime.datetime, limits: Limits) -> bool:
    # A time in the future comes from a wrong clock, and counts as over once it is far enough.
    return abs((now - refusal.time).total_seconds()) >= limits.refusal_s


def _role_word(role: str) -> str:
    return _AGENT if role.startswith(f"{_AGENT}/") else role
