"""The `status` of our resources, to JSON and back.

Reading is lenient: another release or a person may have written the status, so what cannot be
understood is left out.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import typing
from collections.abc import Callable, Mapping
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
_NAMES = {"active_s": "activeSeconds"}
"""Fields whose JSON name is not theirs in camel case."""
_JOB_FIELDS = ("preemptedBy", "endpoint", "activeSeconds")


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
        **_encode_fields(status),
        "phase": status.phase.value,
        "waitingFor": status.waiting_for[:_MAX_MESSAGE],
        "assignedGPUs": sum(entry.gpus for entry in status.assignments),
        "nodesSummary": _nodes_summary(status),
        "samplerReplicas": _num_assigned(status, SAMPLER),
        "refusals": [_encode_fields(entry) for entry in status.refusals],
        "preemptedBy": _encode_key(status.preempted_by),
        "conditions": [_encode_condition(entry) for entry in status.conditions],
        "namedCheckpoints": dict(status.named_checkpoints),
        "assignments": [_encode_fields(entry) for entry in status.assignments],
        "roleStatuses": [_encode_fields(entry) for entry in status.role_statuses],
        "progress": status.progress and _encode_progress(status.progress),
        "checkpoint": {
            name: _encode_fields(saved)
            for name, saved in (("latest", status.latest), ("final", status.final))
            if saved is not None
        },
    }
    if isinstance(status.phase, PoolPhase):
        encoded = {name: value for name, value in encoded.items() if name not in _JOB_FIELDS}
        ready = {entry.name: entry.ready for entry in status.role_statuses}
        encoded["trainerReplicas"] = ready.get(TRAINER, 0)
    if status.failure is not None:
        message = status.failure.message[:_MAX_MESSAGE]
        encoded["failure"] = {**_encode_fields(status.failure), "message": message}
    pruned: dict[str, Any] = _pruned(encoded)
    return pruned


def decode_status(value: object, *, is_pool: bool = False) -> Status:
    """Return the status that an object has; an empty one if it has none."""
    fields = _object(value)
    checkpoint = _object(fields.get("checkpoint"))
    phase: Phase | PoolPhase = (
        _enum(PoolPhase, fields.get("phase"), PoolPhase.PENDING)
        if is_pool
        else _enum(Phase, fields.get("phase"), Phase.PENDING)
    )
    failure = Failure(**_decode_fields(Failure, _object(fields.get("failure"))))
    return Status(
        **_decode_fields(Status, fields),
        phase=phase,
        conditions=tuple(
            found for entry in _objects(fields, "conditions") if (found := _condition(entry))
        ),
        assignments=tuple(
            Assignment(**_decode_fields(Assignment, entry))
            for entry in _objects(fields, "assignments")
        ),
        role_statuses=tuple(
            RoleStatus(**_decode_fields(RoleStatus, entry))
            for entry in _objects(fields, "roleStatuses")
        ),
        refusals=tuple(
            Refusal(node, time)
            for entry in _objects(fields, "refusals")
            if (node := _text(entry.get("node"))) and (time := decode_time(entry.get("time")))
        ),
        preempted_by=_decode_key(fields.get("preemptedBy")),
        progress=_progress(_object(fields.get("progress"))),
        latest=_saved(_object(checkpoint.get("latest"))),
        final=_saved(_object(checkpoint.get("final"))),
        failure=failure if failure.reason else None,
        named_checkpoints={
            name: checkpoint
            for name, checkpoint in _object(fields.get("namedCheckpoints")).items()
            if isinstance(checkpoint, str)
        },
    )


def _encode_fields(value: Any) -> dict[str, Any]:
    """Return the texts, numbers and times of a value by their JSON names."""
    kind: type = type(value)
    found = {name: getattr(value, field) for field, name in _json_names(kind).items()}
    return {
        name: encode_time(entry) if isinstance(entry, datetime.datetime) else entry
        for name, entry in found.items()
        if isinstance(entry, str | int | datetime.datetime)
    }


@functools.cache
def _json_names(kind: type) -> dict[str, str]:
    """Return the JSON names of a class's fields, by field."""
    return {field.name: _json_name(field.name) for field in dataclasses.fields(kind)}


def _decode_fields(kind: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts, numbers and times of JSON by the names of a class's fields."""
    return {name: read(fields.get(_json_name(name))) for name, read in _readers(kind).items()}


@functools.cache
def _readers(kind: type) -> dict[str, Callable[[object], Any]]:
    readers: dict[object, Callable[[object], Any]] = {
        str: _text,
        int: _int,
        int | None: _optional_int,
        datetime.datetime | None: decode_time,
    }
    hints = typing.get_type_hints(kind)
    return {name: readers[hint] for name, hint in hints.items() if hint in readers}


@functools.cache
def _json_name(field: str) -> str:
    first, *rest = field.split("_")
    return _NAMES.get(field, first + "".join(word.title() for word in rest))


def _pruned(value: Any) -> Any:
    """Return JSON without what is empty: old servers take an empty text for no text at all."""
    if isinstance(value, dict):
        pruned = {name: _pruned(entry) for name, entry in value.items()}
        return {name: entry for name, entry in pruned.items() if entry not in ("", [], {}, None)}
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
    known = _decode_fields(Condition, entry)
    return Condition(**known, is_true=entry.get("status") == "True", transition_time=time)


def _encode_progress(progress: Progress) -> dict[str, Any]:
    step, max_steps = progress.step, progress.max_steps
    encoded: dict[str, Any] = {
        "step": step,
        "summary": f"{step}/{max_steps}" if max_steps else str(step),
        "lastUpdateTime": encode_time(progress.update_time),
        # No two names are equal, and none is empty.
        "metrics": [
            {"name": name, "value": f"{value:.6g}"}
            for name, value in sorted(
                {name[:256]: value for name, value in progress.metrics.items() if name}.items()
            )[:_MAX_METRICS]
        ],
        "run": progress.run,
    }
    if max_steps:
        encoded["maxSteps"] = max_steps
        encoded["percent"] = min(100, 100 * step // max_steps)
    if "reward" in progress.metrics:
        encoded["reward"] = f"{progress.metrics['reward']:.4g}"
    if progress.seconds_left is not None:
        encoded["eta"] = _duration(progress.seconds_left)
    return encoded


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
    return Progress(**_decode_fields(Progress, fields), update_time=time, metrics=metrics)


def _saved(fields: Mapping[str, Any]) -> Saved | None:
    saved = Saved(**_decode_fields(Saved, fields))
    return saved if saved.name else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(fields: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = fields.get(name)
    return [e for e in value if isinstance(e, Mapping)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _int(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _optional_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _enum(kind: type[EnumT], value: object, default: EnumT) -> EnumT:
    try:
        return kind(value)
    except ValueError:
        return default
