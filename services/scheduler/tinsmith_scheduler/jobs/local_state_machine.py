"""What becomes of a job on one machine: decided here, done by `local_launcher`.

`decide` is pure: the description, the status so far, what was observed and the time go in; the new
status and at most one action come out. Phases and conditions are those of the cluster's resource.
"""

from __future__ import annotations

import datetime
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinsmith_scheduler.jobs.launcher import FINISHED_PHASES
from tinsmith_scheduler.jobs.spec_rules import look_up
from tinsmith_scheduler.store.records import JobOutcome, JobReport, Json

SAVED_EXIT_CODE = 143
_MISCONFIGURED_EXIT_CODE = 2
_MAX_PAUSE_S = 60.0
_MAX_METRICS = 64
NODE = "local"

_DEFAULTS = {
    "startupDeadlineSeconds": 1800,
    "stallTimeoutSeconds": 1800,
    "backoffLimit": 3,
}
_DEFAULT_GRACE_S = 120


class Action(enum.Enum):
    """What is to be done."""

    NONE = "none"
    START = "start"
    """Start the driver."""
    STOP = "stop"
    """Tell the driver to save and end."""
    KILL = "kill"
    FORGET = "forget"
    """Forget the job, which ended long ago."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What is seen of a job.

    Attributes:
        is_running: Whether its driver runs.
        has_ended: Whether it ran until just now.
        exit_code: What it ended with; None if nobody saw it.
        stop_time_s: When it was told to end; None if it was not.
        report: What it reported last, if it ever began.
        first_step: Steps that were done when it was started.
        model_problem: Why its base model cannot be used now, in a sentence; empty if it can.
        queue_problem: Why it is not its turn, in a sentence; empty if it is.
        endpoint: Where the model is served, for `serve`.
    """

    is_running: bool = False
    has_ended: bool = False
    exit_code: int | None = None
    stop_time_s: float | None = None
    report: JobReport | None = None
    first_step: int = 0
    model_problem: str = ""
    queue_problem: str = ""
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The new status, and what to do."""

    status: dict[str, Any] = field(default_factory=dict)
    action: Action = Action.NONE


def decide(job_id: str, spec: Json, before: Json, seen: Observed, now_s: float) -> Decision:
    """Return what becomes of a job.

    Args:
        job_id: Last part of its name.
        spec: Its description.
        before: Its status so far; empty for a new one.
        seen: What was observed.
        now_s: Seconds since the epoch.
    """
    status = {**before, "waitingFor": ""}
    if before.get("phase") in FINISHED_PHASES:
        ttl_s = spec.get("ttlSecondsAfterFinished")
        is_over = ttl_s is not None and now_s >= _seconds(before["completionTime"]) + ttl_s
        return Decision(dict(before), Action.FORGET if is_over else Action.NONE)
    if "queuedTime" not in status:
        status["queuedTime"] = format_time(now_s)
    _add_progress(status, seen, now_s)
    if seen.is_running:
        action = _while_running(spec, status, seen, now_s)
    elif seen.has_ended:
        action = _after_end(spec, status, seen, now_s)
    else:
        action = _while_idle(job_id, spec, status, seen, now_s)
    _set_conditions(status, now_s)
    return Decision(status, action)


def _while_running(spec: Json, status: dict[str, Any], seen: Observed, now_s: float) -> Action:
    is_over = _active_seconds(status, now_s) > spec.get("activeDeadlineSeconds", math.inf)
    if is_over:
        status["failure"] = {
            "reason": "DeadlineExceeded",
            "message": f"the job ran for {spec['activeDeadlineSeconds']} s, its limit",
        }
    if is_over or spec.get("cancel") or spec.get("suspend"):
        status["phase"] = "Cancelling" if is_over or spec.get("cancel") else "Suspending"
        status["waitingFor"] = "the driver to save and end"
        if seen.stop_time_s is None:
            return Action.STOP
        grace_s = look_up(spec, "scheduling", "preemptionGraceSeconds", default=_DEFAULT_GRACE_S)
        return Action.KILL if now_s > seen.stop_time_s + grace_s else Action.NONE
    assigned_s = _seconds(status["assignedTime"])
    reported_s = seen.report.update_time_s if seen.report is not None else None
    has_reported = reported_s is not None and reported_s >= assigned_s
    status["phase"] = "Running" if has_reported else "Starting"
    silent_s = now_s - max(assigned_s, reported_s or 0.0)
    stall_s = _setting(spec, "stallTimeoutSeconds")
    if silent_s > stall_s:
        status["waitingFor"] = f"a report of the driver, which said nothing for {silent_s:.0f} s"
    elif not has_reported:
        status["waitingFor"] = "the first report of the driver"
    return Action.NONE


def _after_end(spec: Json, status: dict[str, Any], seen: Observed, now_s: float) -> Action:
    outcome = JobOutcome.NONE
    reported_s = seen.report.update_time_s if seen.report is not None else None
    if seen.report is not None and (reported_s or 0.0) >= _seconds(status["assignedTime"]):
        # Said by this part of the job, and not by the one before.
        outcome = seen.report.outcome
    status["activeSeconds"] = int(_active_seconds(status, now_s))
    status.pop("assignedTime", None)
    status["assignments"] = []
    if outcome is JobOutcome.SUCCEEDED or (
        seen.exit_code == 0 and look_up(spec, "method", "type") == "custom"
    ):
        _finish(status, "Succeeded", now_s)
    elif look_up(status, "failure", "reason") == "DeadlineExceeded":
        _finish(status, "Failed", now_s)
    elif spec.get("cancel"):
        _finish(status, "Cancelled", now_s)
    elif spec.get("suspend"):
        status["phase"] = "Suspended"
    elif outcome is JobOutcome.SAVED or seen.exit_code == SAVED_EXIT_CODE:
        # Told to end together with the server.
        status["phase"] = "Queued"
        status["queuedTime"] = format_time(now_s)
    else:
        _note_failure(spec, status, seen, outcome, now_s)
    return Action.NONE


def _note_failure(
    spec: Json, status: dict[str, Any], seen: Observed, outcome: JobOutcome, now_s: float
) -> None:
    is_final = outcome is JobOutcome.FAILED or seen.exit_code == _MISCONFIGURED_EXIT_CODE
    message = seen.report.message if seen.report is not None and is_final else ""
    code = "without an exit code" if seen.exit_code is None else f"with exit code {seen.exit_code}"
    status["failure"] = {
        "reason": "DriverFailed",
        "message": message or f"the driver ended {code}; its log says why",
        "role": "driver",
        **({} if seen.exit_code is None else {"exitCode": seen.exit_code}),
    }
    limit = _setting(spec, "backoffLimit")
    if is_final:
        _finish(status, "Failed", now_s)
    elif status.get("restartCount", 0) >= limit:
        status["failure"]["reason"] = "BackoffLimitExceeded"
        _finish(status, "Failed", now_s)
    else:
        status["restartCount"] = status.get("restartCount", 0) + 1
        status["lastRestartTime"] = format_time(now_s)
        status["phase"] = "Restarting"


def _while_idle(
    job_id: str, spec: Json, status: dict[str, Any], seen: Observed, now_s: float
) -> Action:
    if spec.get("cancel"):
        _finish(status, "Cancelled", now_s)
        return Action.NONE
    if spec.get("suspend"):
        status["phase"] = "Suspended"
        return Action.NONE
    if status.get("phase") == "Suspended":
        status["queuedTime"] = format_time(now_s)
    if seen.model_problem:
        status["phase"] = "Pending"
        status["waitingFor"] = seen.model_problem
        limit_s = _setting(spec, "startupDeadlineSeconds")
        if now_s > _seconds(status["queuedTime"]) + limit_s:
            status["failure"] = {
                "reason": "StartupDeadlineExceeded",
                "message": f"after {limit_s} s the job still waited for {seen.model_problem}",
            }
            _finish(status, "Failed", now_s)
        return Action.NONE
    if look_up(spec, "method", "type") == "serve":
        status["phase"] = "Running"
        status["endpoint"] = seen.endpoint
        status.setdefault("startTime", format_time(now_s))
        return Action.NONE
    if status.get("phase") == "Restarting":
        count = status.get("restartCount", 1)
        left_s = _seconds(status["lastRestartTime"]) + pause_s(count) - now_s
        if left_s > 0:
            status["waitingFor"] = f"the pause before restart {count}"
            return Action.NONE
    if seen.queue_problem:
        status["phase"] = "Queued"
        status["waitingFor"] = seen.queue_problem
        return Action.NONE
    epoch = status.get("epoch", 0) + 1
    status.update(
        phase="Starting",
        epoch=epoch,
        assignedTime=format_time(now_s),
        nodesSummary=NODE,
        assignments=[
            {
                "pod": f"{job_id}-driver-0-e{epoch}",
                "role": "driver",
                "index": 0,
                "node": NODE,
                "epoch": epoch,
            }
        ],
    )
    status.setdefault("startTime", format_time(now_s))
    return Action.START


def pause_s(num_restarts: int) -> float:
    """Return the pause before a restart: one second, then twice as long each time."""
    return min(2.0 ** (num_restarts - 1), _MAX_PAUSE_S)


def _finish(status: dict[str, Any], phase: str, now_s: float) -> None:
    status["phase"] = phase
    status["completionTime"] = format_time(now_s)
    saved = look_up(status, "checkpoint", "latest")
    if phase == "Succeeded" and saved:
        status["checkpoint"] = {"latest": saved, "final": saved}


def _add_progress(status: dict[str, Any], seen: Observed, now_s: float) -> None:
    report = seen.report
    if report is None or report.update_time_s is None:
        return
    progress: dict[str, Any] = {
        "step": report.step,
        "run": report.run,
        "lastUpdateTime": format_time(report.update_time_s),
        "metrics": [
            {"name": name, "value": f"{value:.6g}"}
            for name, value in sorted(report.metrics.items())[:_MAX_METRICS]
        ],
    }
    if report.max_steps:
        progress["maxSteps"] = report.max_steps
        progress["percent"] = min(100 * report.step // report.max_steps, 100)
        progress["summary"] = f"{report.step}/{report.max_steps}"
    else:
        progress["summary"] = str(report.step)
    if "reward" in report.metrics:
        progress["reward"] = f"{report.metrics['reward']:.4g}"
    num_done = report.step - seen.first_step
    if seen.is_running and num_done > 0 and report.max_steps and "assignedTime" in status:
        took_s = (report.step_time_s or now_s) - _seconds(status["assignedTime"])
        left_s = max(took_s, 0.0) / num_done * (report.max_steps - report.step)
        progress["eta"] = _duration(left_s)
    status["progress"] = progress
    if report.checkpoint:
        latest = look_up(status, "checkpoint", "latest", default={})
        if latest.get("name") != report.checkpoint:
            status["checkpoint"] = {
                "latest": {
                    "name": report.checkpoint,
                    "step": report.checkpoint_step,
                    "time": format_time(report.update_time_s),
                }
            }


def _set_conditions(status: dict[str, Any], now_s: float) -> None:
    phase = status["phase"]
    failure = status.get("failure", {})
    is_assigned = bool(status.get("assignments"))
    wanted = {
        "Assigned": (is_assigned, phase, status["waitingFor"]),
        "Ready": (phase == "Running", phase, status["waitingFor"]),
        "Stalled": (
            phase == "Running" and bool(status["waitingFor"]),
            "NoReport" if status["waitingFor"] else "Reported",
            status["waitingFor"],
        ),
        "Suspended": (phase == "Suspended", phase, ""),
        "Complete": (phase == "Succeeded", phase, ""),
        "Failed": (
            phase == "Failed",
            failure.get("reason", phase) if phase == "Failed" else phase,
            failure.get("message", "") if phase == "Failed" else "",
        ),
    }
    known: Mapping[str, Mapping[str, Any]] = {
        each["type"]: each for each in status.get("conditions", [])
    }
    status["conditions"] = [
        _condition(known.get(kind, {}), kind, "True" if holds else "False", reason, message, now_s)
        for kind, (holds, reason, message) in wanted.items()
    ]


def _condition(
    known: Mapping[str, Any], kind: str, value: str, reason: str, message: str, now_s: float
) -> dict[str, Any]:
    since = known.get("lastTransitionTime") if known.get("status") == value else None
    if known and known.get("status") == value:
        # The reason is of the moment when it began to hold; a sentence may change on the way.
        reason = known["reason"]
    return {
        "type": kind,
        "status": value,
        "lastTransitionTime": since or format_time(now_s),
        "reason": reason,
        "message": message,
    }


def _active_seconds(status: Json, now_s: float) -> float:
    """Return the time that the job held the machine, this attempt included."""
    earlier: float = status.get("activeSeconds", 0)
    return earlier + (now_s - _seconds(status["assignedTime"]) if "assignedTime" in status else 0)


def _setting(spec: Json, name: str) -> int:
    return int(spec.get(name, _DEFAULTS[name]))


def format_time(time_s: float) -> str:
    """Return a point in time as the resource has it."""
    moment = datetime.datetime.fromtimestamp(time_s, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
