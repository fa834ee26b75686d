"""The vision tower: the transformers module, frozen, one image at a time.

An image's features depend on the image alone and are kept for a while: the samples of a group and
the steps of an epoch show the same one again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from tinsmith_engine.base.types import ImageInput, ImageRules
from tinsmith_engine.files.hub_files import stored_tensors
from tinsmith_engine.packing.images import patches
from tinsmith_runtime.errors import CheckpointIncompatibleError

_PREFIXES = ("visual.", "model.visual.")
_MODULE = "model.visual"
_MAX_FEATURES = 64


class VisionTower:
    """Turns images into the embeddings of their placeholder tokens."""

    def __init__(self, module: nn.Module, rules: ImageRules) -> None:
        self._module: Any = module.eval().requires_grad_(False)
        self._rules = rules
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.linear_modules = [
            f"{_MODULE}.{name}"
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear)
        ]

    @classmethod
    def load(
        cls,
        directory: Path,
        hf_config: Any,
        rules: ImageRules,
        dtype: torch.dtype,
        device: torch.device,
    ) -> VisionTower:
        """Load the tower of a model directory.

        Raises:
            CheckpointIncompatibleError: A tensor is absent or has another shape than the
                configuration implies.
        """
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel as Tower,
        )

        tower: Any = Tower
        module = tower._from_config(hf_config.vision_config, dtype=dtype)
        state: dict[str, Tensor] = {}
        for name, file in stored_tensors(directory).items():
            prefix = next((one for one in _PREFIXES if name.startswith(one)), None)
            if prefix is not None:
                with safe_open(file, framework="pt") as weights:
                    state[name.removeprefix(prefix)] = weights.get_tensor(name)
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointIncompatibleError(
                f"the vision tower of {directory} does not fit its configuration: {error}",
                model=directory,
            ) from error
        return cls(module.to(device), rules)

    def features(self, image: ImageInput) -> Tensor:
        """Return the embeddings of a placed image's tokens, [tokens, H] in the model's dtype."""
        pixels = image.pixels
        if pixels is None:
            raise ValueError("the image was not placed")
        key = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).digest()
        if key not in self._kept:
            self._kept[key] = self._read(image)
            while len(self._kept) > _MAX_FEATURES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]

    def _read(self, image: ImageInput) -> Tensor:
        first = next(self._module.parameters())
        rows, columns = (side * self._rules.merge_size for side in image.grid)
        grid = torch.tensor([[1, rows, columns]], device=first.device)
        pixels = torch.from_numpy(patches(image, self._rules)).to(first)
        with torch.no_grad():
            found: Tensor = self._module(pixels, grid_thw=grid, return_dict=True).pooler_output
        return found
