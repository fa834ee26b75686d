"""What a job must say, and what its driver is told: pure functions of the description.

The rules are those of the Kubernetes resource (k8s/crd), which its API server checks itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith.driver.methods import read_method
from tinsmith.errors import ConfigurationError
from tinsmith.jobs.data import RECIPE_METHODS
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_scheduler.store.records import Json

_METHODS = ("supervised", "rl", "rl_episodes", "custom", "serve")
_SAMPLING_METHODS = ("rl", "rl_episodes", "serve")
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_CHECKPOINT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_MAX_RANK = 128
_POSITIVE = (
    ("method", "maxSteps"),
    ("checkpoint", "everySteps"),
    ("checkpoint", "keepLast"),
    ("scheduling", "preemptionGraceSeconds"),
    ("startupDeadlineSeconds",),
    ("activeDeadlineSeconds",),
    ("stallTimeoutSeconds",),
)


def check_spec(spec: Json) -> None:
    """Refuse a description that cannot be run.

    Raises:
        InvalidFieldError: If it breaks a rule; names the field.
    """
    kind = look_up(spec, "method", "type", default="")
    if kind not in _METHODS:
        raise InvalidFieldError("spec.method.type", f"must be one of {', '.join(_METHODS)}")
    model = look_up(spec, "model", "name", default="")
    if "poolRef" not in spec and not model:
        raise InvalidFieldError("spec.model", "is needed, or spec.poolRef")
    if model and _MODEL_NAME.fullmatch(model) is None:
        raise InvalidFieldError("spec.model.name", "is not the name of a model")
    roles = spec.get("roles", {})
    if "poolRef" in spec and ("trainer" in roles or "sampler" in roles):
        raise InvalidFieldError(
            "spec.poolRef", "a job that uses a pool has no trainer or sampler of its own"
        )
    if kind in _SAMPLING_METHODS and "poolRef" not in spec and "sampler" not in roles:
        raise InvalidFieldError("spec.roles.sampler", f"is needed: {kind} samples")
    template = look_up(roles, "driver", "template", default={})
    if kind == "custom" and not (template.get("image") or template.get("command")):
        raise InvalidFieldError("spec.roles.driver.template", "needs image or command")
    if look_up(spec, "adapter", "type", default="lora") not in ("lora", "full"):
        raise InvalidFieldError("spec.adapter.type", "must be lora or full")
    if not 1 <= look_up(spec, "adapter", "rank", default=1) <= _MAX_RANK:
        raise InvalidFieldError("spec.adapter.rank", f"must be 1 to {_MAX_RANK}")
    for path in _POSITIVE:
        if look_up(spec, *path, default=1) < 1:
            raise InvalidFieldError(f"spec.{'.'.join(path)}", "must be 1 at least")
    for name in ("backoffLimit", "ttlSecondsAfterFinished"):
        if spec.get(name, 0) < 0:
            raise InvalidFieldError(f"spec.{name}", "must not be negative")
    final = look_up(spec, "checkpoint", "finalName", default="final")
    if _CHECKPOINT_ID.fullmatch(final) is None:
        raise InvalidFieldError("spec.checkpoint.finalName", "is not the id of a checkpoint")


def check_local(spec: Json) -> None:
    """Refuse what only a cluster can do.

    Raises:
        InvalidFieldError: If the description asks for it; names the field.
    """
    data = spec.get("data", {})
    for name in ("configMapRef", "pvc"):
        if name in data:
            raise InvalidFieldError(
                f"spec.data.{name}",
                "needs a cluster; on one machine give the path as spec.method.parameters.data",
            )
    if look_up(spec, "roles", "agents", default=[]):
        raise InvalidFieldError("spec.roles.agents", "needs a cluster")
    has_command = bool(look_up(spec, "roles", "driver", "template", "command", default=[]))
    kind = look_up(spec, "method", "type")
    if kind == "custom" and not has_command:
        raise InvalidFieldError(
            "spec.roles.driver.template.command", "is needed: one machine runs no images"
        )
    if kind in RECIPE_METHODS and not has_command:
        _check_method(spec)


def _check_method(spec: Json) -> None:
    """Read the method as the driver will, which is of the same release on this machine."""
    model = look_up(spec, "model", "name", default="") or "of-a-pool"
    try:
        read_method(describe_method(spec, model), Path())
    except ConfigurationError as error:
        advice = f"; {error.remedy}" if error.remedy else ""
        raise InvalidFieldError("spec.method", f"is refused: {error.message}{advice}") from error


def describe_method(spec: Json, model: str) -> str:
    """Return `TINSMITH_JOB_METHOD`: what the driver is to do, as JSON.

    Args:
        spec: The description.
        model: Name of the base model, which may be that of a pool.
    """
    method = {
        **spec.get("method", {}),
        "adapter": dict(spec.get("adapter", {})),
        "model": model,
        "checkpoint": {
            key: value
            for key, value in spec.get("checkpoint", {}).items()
            if key in ("everySteps", "keepLast", "finalName", "resumeFrom")
        },
    }
    data = look_up(spec, "data", "name", default="")
    if data:
        method["data"] = data
    return json.dumps(method, sort_keys=True)


def look_up(value: Json, *path: str, default: Any = None) -> Any:
    """Return what is at a path; the default if a part of it is missing."""
    found: Any = value
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return default
        found = found[key]
    return found
