"""Versions of weights as folders in shared memory, from where vLLM reads them.

A folder is kept as long as its version: vLLM reads an adapter again that it had put aside, and a
restarted one reads all of them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tinsmith_engine import LoraConfig
from tinsmith_engine.files.weight_files import ADAPTER_CONFIG_FILE, weights_file
from tinsmith_runtime.errors import CheckpointIncompatibleError

_SHARED_MEMORY = Path("/dev/shm")


class WeightFolders:
    """The folders of one engine; `close` removes all of them."""

    def __init__(self) -> None:
        parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
        self._root = Path(tempfile.mkdtemp(prefix="tinsmith-vllm-", dir=parent))

    def write(self, name: str, tensors: Mapping[str, Tensor], config: LoraConfig) -> Path:
        """Write a version and return its folder.

        Raises:
            CheckpointIncompatibleError: If a number is not finite.
        """
        for tensor_name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointIncompatibleError(
                    f"tensor {tensor_name} holds NaN or infinity", tensor=tensor_name
                )
        folder = self._root / name
        folder.mkdir()
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()},
            folder / weights_file(config),
        )
        (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(_peft_config(tensors, config)))
        return folder

    def remove(self, folder: Path) -> None:
        """Remove the folder of a version."""
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self._root, ignore_errors=True)


def _peft_config(tensors: Mapping[str, Tensor], config: LoraConfig) -> dict[str, object]:
    modules = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "bias": "none",
        "target_modules": sorted(modules),
    }
