"""The `status` of our resources, to JSON and back.

Reading is lenient: another release or a person may have written the status, so what cannot be
understood is left out.
"""

from __future__ import annotations

import datetime
import enum
from collections.abc import Mapping
from typing import Any, TypeVar

from tinsmith_jobs.conditions import Condition, Phase, PoolPhase
from tinsmith_jobs.naming import NamespacedName
from tinsmith_jobs.spec import SAMPLER, TRAINER
from tinsmith_jobs.status import (
    Assignment,
    Failure,
    Progress,
    Refusal,
    RoleStatus,
    Saved,
    Status,
)

EnumT = TypeVar("EnumT", bound=enum.Enum)

_MAX_METRICS = 64
_MAX_MESSAGE = 4096


def encode_time(time: datetime.datetime) -> str:
    """Return a time as Kubernetes writes it, in whole seconds."""
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def decode_time(value: object) -> datetime.datetime | None:
    """Return the time that a text means, or None."""
    if not isinstance(value, str):
        return None
    try:
        time = datetime.datetime.fromisoformat(value)
    except ValueError:
        return None
    return time if time.tzinfo is not None else time.replace(tzinfo=datetime.UTC)


def encode_status(status: Status) -> dict[str, Any]:
    """Return a status as JSON; what is not set is left out."""
    encoded: dict[str, Any] = {
        "observedGeneration": status.observed_generation,
        "phase": status.phase.value,
        "waitingFor": status.waiting_for[:_MAX_MESSAGE],
        "epoch": status.epoch,
        "assignedGPUs": sum(entry.gpus for entry in status.assignments),
        "nodesSummary": _nodes_summary(status),
        "restartCount": status.restart_count,
        "samplerReplicas": _num_assigned(status, SAMPLER),
        "samplerSelector": status.sampler_selector,
        "endpoint": status.endpoint,
        "refusals": [
            {"node": entry.node, "time": encode_time(entry.time)} for entry in status.refusals
        ],
        "preemptedBy": _encode_key(status.preempted_by),
        "conditions": [_encode_condition(entry) for entry in status.conditions],
        "assignments": [_encode_assignment(entry) for entry in status.assignments],
        "roleStatuses": [
            {
                "name": entry.name,
                "desired": entry.desired,
                "ready": entry.ready,
                "restarts": entry.restarts,
            }
            for entry in status.role_statuses
        ],
        "activeSeconds": status.active_s,
    }
    if isinstance(status.phase, PoolPhase):
        for name in ("preemptedBy", "endpoint", "activeSeconds"):
            del encoded[name]
        ready = {entry.name: entry.ready for entry in status.role_statuses}
        encoded["trainerReplicas"] = ready.get(TRAINER, 0)
    if status.progress is not None:
        encoded["progress"] = _encode_progress(status.progress)
    saved = {"latest": status.latest, "final": status.final}
    checkpoint = {name: _encode_saved(entry) for name, entry in saved.items() if entry is not None}
    if checkpoint:
        encoded["checkpoint"] = checkpoint
    if status.failure is not None:
        encoded["failure"] = _encode_failure(status.failure)
    times = {
        "lastRestartTime": status.last_restart_time,
        "queuedTime": status.queued_time,
        "startTime": status.start_time,
        "assignedTime": status.assigned_time,
        "stopTime": status.stop_time,
        "completionTime": status.completion_time,
    }
    encoded |= {name: encode_time(time) for name, time in times.items() if time is not None}
    pruned: dict[str, Any] = _pruned(encoded)
    return pruned


def decode_status(value: object, *, is_pool: bool = False) -> Status:
    """Return the status that an object has; an empty one if it has none."""
    fields = value if isinstance(value, Mapping) else {}
    checkpoint = _object(fields.get("checkpoint"))
    phase: Phase | PoolPhase = (
        _enum(PoolPhase, fields.get("phase"), PoolPhase.PENDING)
        if is_pool
        else _enum(Phase, fields.get("phase"), Phase.PENDING)
    )
    return Status(
        phase=phase,
        observed_generation=_int(fields.get("observedGeneration")),
        waiting_for=_text(fields.get("waitingFor")),
        conditions=tuple(
            found for entry in _objects(fields, "conditions") if (found := _condition(entry))
        ),
        epoch=_int(fields.get("epoch")),
        assignments=tuple(_assignment(entry) for entry in _objects(fields, "assignments")),
        role_statuses=tuple(
            RoleStatus(
                _text(entry.get("name")),
                _int(entry.get("desired")),
                _int(entry.get("ready")),
                _int(entry.get("restarts")),
            )
            for entry in _objects(fields, "roleStatuses")
        ),
        sampler_selector=_text(fields.get("samplerSelector")),
        restart_count=_int(fields.get("restartCount")),
        last_restart_time=decode_time(fields.get("lastRestartTime")),
        refusals=tuple(
            Refusal(node, time)
            for entry in _objects(fields, "refusals")
            if (node := _text(entry.get("node"))) and (time := decode_time(entry.get("time")))
        ),
        preempted_by=_decode_key(fields.get("preemptedBy")),
        progress=_progress(_object(fields.get("progress"))),
        latest=_saved(_object(checkpoint.get("latest"))),
        final=_saved(_object(checkpoint.get("final"))),
        failure=_failure(_object(fields.get("failure"))),
        queued_time=decode_time(fields.get("queuedTime")),
        start_time=decode_time(fields.get("startTime")),
        assigned_time=decode_time(fields.get("assignedTime")),
        stop_time=decode_time(fields.get("stopTime")),
        active_s=_int(fields.get("activeSeconds")),
        completion_time=decode_time(fields.get("completionTime")),
        endpoint=_text(fields.get("endpoint")),
    )


def _pruned(value: Any) -> Any:
    """Return JSON without what is empty: old servers take an empty text for no text at all."""
    if isinstance(value, dict):
        pruned = {name: _pruned(entry) for name, entry in value.items()}
        return {name: entry for name, entry in pruned.items() if entry not in ("", [], None)}
    return [_pruned(entry) for entry in value] if isinstance(value, list) else value


def _nodes_summary(status: Status) -> str:
    gpus: dict[str, int] = {}
    for entry in status.assignments:
        if entry.node:
            gpus[entry.node] = gpus.get(entry.node, 0) + entry.gpus
    shown = [f"{node} ({count})" if count else node for node, count in sorted(gpus.items())]
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    return ", ".join(shown[:4]) + more


def _num_assigned(status: Status, kind: str) -> int:
    return sum(
        entry.role == kind or entry.role.endswith(f"/{kind}") for entry in status.assignments
    )


def _encode_key(key: NamespacedName | None) -> str:
    return f"{key.kind}/{key.namespace}/{key.name}" if key is not None else ""


def _decode_key(value: object) -> NamespacedName | None:
    parts = value.split("/") if isinstance(value, str) else []
    return NamespacedName(*parts) if len(parts) == 3 else None


def _encode_condition(condition: Condition) -> dict[str, Any]:
    return {
        "type": condition.type,
        "status": "True" if condition.is_true else "False",
        "observedGeneration": condition.observed_generation,
        "lastTransitionTime": encode_time(condition.transition_time),
        "reason": condition.reason,
        "message": condition.message[:_MAX_MESSAGE] or condition.reason,
    }


def _condition(entry: Mapping[str, Any]) -> Condition | None:
    time = decode_time(entry.get("lastTransitionTime"))
    if time is None or not _text(entry.get("type")):
        return None
    return Condition(
        _text(entry.get("type")),
        entry.get("status") == "True",
        _text(entry.get("reason")),
        _text(entry.get("message")),
        time,
        _int(entry.get("observedGeneration")),
    )


def _encode_assignment(assignment: Assignment) -> dict[str, Any]:
    return {
        "pod": assignment.pod,
        "role": assignment.role,
        "index": assignment.index,
        "node": assignment.node,
        "gpus": assignment.gpus,
        "epoch": assignment.epoch,
        "uid": assignment.uid,
    }


def _assignment(entry: Mapping[str, Any]) -> Assignment:
    return Assignment(
        _text(entry.get("pod")),
        _text(entry.get("role")),
        _int(entry.get("index")),
        _text(entry.get("node")),
        _int(entry.get("gpus")),
        _int(entry.get("epoch")),
        _text(entry.get("uid")),
    )


def _encode_progress(progress: Progress) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "step": progress.step,
        "summary": f"{progress.step}/{progress.max_steps}"
        if progress.max_steps
        else str(progress.step),
        "lastUpdateTime": encode_time(progress.update_time),
        "metrics": [
            {"name": name, "value": f"{value:.6g}"}
            for name, value in sorted(_short_names(progress.metrics).items())[:_MAX_METRICS]
        ],
    }
    # Servers of before 1.21 take an empty text for null, and refuse it.
    if progress.run:
        encoded["run"] = progress.run
    if progress.max_steps:
        encoded["maxSteps"] = progress.max_steps
        encoded["percent"] = min(100, 100 * progress.step // progress.max_steps)
    if "reward" in progress.metrics:
        encoded["reward"] = f"{progress.metrics['reward']:.4g}"
    if progress.seconds_left is not None:
        encoded["eta"] = _duration(progress.seconds_left)
    return encoded


def _short_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics by names of which no two are equal, and none is empty."""
    return {name[:256]: value for name, value in metrics.items() if name}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def _progress(fields: Mapping[str, Any]) -> Progress | None:
    time = decode_time(fields.get("lastUpdateTime"))
    if time is None:
        return None
    metrics = {}
    for entry in _objects(fields, "metrics"):
        try:
            metrics[_text(entry.get("name"))] = float(_text(entry.get("value")))
        except ValueError:
            continue
    return Progress(
        _int(fields.get("step")),
        _int(fields.get("maxSteps")),
        _text(fields.get("run")),
        time,
        metrics,
    )


def _encode_saved(saved: Saved) -> dict[str, Any]:
    encoded: dict[str, Any] = {"name": saved.name, "step": saved.step, "uri": saved.uri}
    if saved.time is not None:
        encoded["time"] = encode_time(saved.time)
    return encoded


def _saved(fields: Mapping[str, Any]) -> Saved | None:
    name = _text(fields.get("name"))
    if not name:
        return None
    return Saved(
        name, _int(fields.get("step")), _text(fields.get("uri")), decode_time(fields.get("time"))
    )


def _encode_failure(failure: Failure) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "reason": failure.reason,
        "message": failure.message[:_MAX_MESSAGE],
        "role": failure.role,
        "pod": failure.pod,
        "node": failure.node,
    }
    if failure.exit_code is not None:
        encoded["exitCode"] = failure.exit_code
    return encoded


def _failure(fields: Mapping[str, Any]) -> Failure | None:
    if not fields.get("reason"):
        return None
    code = fields.get("exitCode")
    return Failure(
        _text(fields.get("reason")),
        _text(fields.get("message")),
        _text(fields.get("role")),
        _text(fields.get("pod")),
        _text(fields.get("node")),
        code if isinstance(code, int) else None,
    )


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(fields: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = fields.get(name)
    return [e for e in value if isinstance(e, Mapping)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _int(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _enum(kind: type[EnumT], value: object, default: EnumT) -> EnumT:
    try:
        return kind(value)
    except ValueError:
        return default
