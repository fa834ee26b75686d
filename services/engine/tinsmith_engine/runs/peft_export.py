"""Runs in the names and formats of other tools.

An adapter's tensors carry PEFT's names and its configuration loads with `PeftModel`; a
full-parameter run's tensors carry the Hugging Face state-dict names. Pure functions: the trainer
decides where the files go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tinsmith_engine.arena.adapter_targets import TargetSpec
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.base.types import AdapterConfig, FullConfig, LoraConfig
from tinsmith_runtime.errors import CheckpointIncompatibleError

_PEFT_PREFIX = "base_model.model."


def export_tensors(
    config: AdapterConfig, layout: ParameterLayout, theta_P: Tensor
) -> dict[str, Tensor]:
    """Return float32 CPU copies of a run's weights under their public names."""
    prefix = _prefix(config)
    return {
        prefix + name: view.detach().to("cpu", copy=True)
        for name, view in layout.views(theta_P).items()
    }


def view_tensors(
    config: AdapterConfig, layout: ParameterLayout, theta_P: Tensor
) -> dict[str, Tensor]:
    """Return a run's weights on the host under their public names: views of a row that is there."""
    prefix = _prefix(config)
    return {prefix + name: view.detach().to("cpu") for name, view in layout.views(theta_P).items()}


def import_tensors_(
    config: AdapterConfig, layout: ParameterLayout, theta_P: Tensor, tensors: Mapping[str, Tensor]
) -> None:
    """Fill a row from tensors under their public names; changes nothing if any of them is wrong.

    Raises:
        CheckpointIncompatibleError: Names the tensor that is absent, unknown, not floating, of
            another shape, or not finite.
    """
    prefix = _prefix(config)
    for name, entry in layout.entries.items():
        tensor = tensors.get(prefix + name)
        if tensor is None:
            raise _incompatible(prefix + name, "is missing")
        if tuple(tensor.shape) != entry.shape:
            raise _incompatible(
                prefix + name, f"has shape {list(tensor.shape)}, the run needs {list(entry.shape)}"
            )
        if not tensor.dtype.is_floating_point:
            raise _incompatible(prefix + name, f"has dtype {tensor.dtype}, not a floating type")
        if not _is_finite(tensor):
            raise _incompatible(prefix + name, "holds NaN or infinity")
    unknown = sorted(set(tensors) - {prefix + name for name in layout.entries})
    if unknown:
        raise _incompatible(unknown[0], "has no place in the run")
    for name, view in layout.views(theta_P).items():
        view.copy_(tensors[prefix + name])


def export_config(
    config: AdapterConfig,
    targets: Sequence[TargetSpec],
    base_model: str,
    other_modules: Sequence[str] = (),
) -> dict[str, Any]:
    """Return PEFT's adapter_config.json for an adapter; empty for a full-parameter run.

    `other_modules` are linear layers of the model that are in no target.
    """
    if isinstance(config, FullConfig):
        return {}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": _target_modules(config, targets, other_modules),
    }


def _target_modules(
    config: LoraConfig, targets: Sequence[TargetSpec], other_modules: Sequence[str]
) -> list[str]:
    """Return last path components, or whole paths where a component alone would match too much."""
    adapted = {name for target in targets if target.is_adapted_by(config) for name in target.names}
    others = {
        name for target in targets if not target.is_adapted_by(config) for name in target.names
    }
    others |= set(other_modules)
    suffixes = {name.rsplit(".", 1)[-1] for name in adapted}
    if suffixes & {name.rsplit(".", 1)[-1] for name in others}:
        return sorted(adapted)
    return sorted(suffixes)


def _is_finite(tensor: Tensor) -> bool:
    """Return whether no number is NaN or infinite; reads the tensor once and copies nothing."""
    if not tensor.numel():
        return True
    # A NaN is both the least and the greatest number.
    least, greatest = torch.aminmax(tensor)
    return math.isfinite(least.item()) and math.isfinite(greatest.item())


def _prefix(config: AdapterConfig) -> str:
    return _PEFT_PREFIX if isinstance(config, LoraConfig) else ""


def _incompatible(name: str, problem: str) -> CheckpointIncompatibleError:
    return CheckpointIncompatibleError(f"tensor {name} {problem}", tensor=name)
