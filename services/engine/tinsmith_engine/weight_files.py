"""Names and reading of the weight files of a checkpoint, for all who write or load one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from tinsmith_engine.values import AdapterConfig, FullConfig
from tinsmith_runtime.errors import CheckpointCorruptError, CheckpointIncompatibleError

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
MODEL_FILE = "model.safetensors"


def weights_file(config: AdapterConfig) -> str:
    """Return the name of the file that holds the weights of a run."""
    return MODEL_FILE if isinstance(config, FullConfig) else ADAPTER_FILE


def parse_tensors(files: Mapping[str, bytes], name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one safetensors file.

    Raises:
        CheckpointIncompatibleError: If the checkpoint has no such file.
        CheckpointCorruptError: If the file can not be read.
    """
    if name not in files:
        raise CheckpointIncompatibleError(
            f"the checkpoint holds no {name}; it was saved by another kind of run", file=name
        )
    try:
        return load(files[name])
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointCorruptError(
            f"{name} is not a safetensors file: {error}; use another checkpoint", file=name
        ) from error
