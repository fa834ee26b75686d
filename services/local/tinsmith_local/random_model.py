"""Models with the shapes of real ones and random weights, made on the spot.

Widths, heads, norms, vocabulary and file layout are those of the published checkpoints; weights and
tokenizer are not. With them a machine can be sized, and what depends on widths be measured and
tested, where no hub is in reach. The tokenizer is that of the tiny model: its tokens are the first
of the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tinsmith_local.random_shapes import SHAPES
from tinsmith_local.tiny_model import write_tokenizer
from tinsmith_runtime.errors import ConfigError


def build_random_model(
    directory: Path | str,
    shape: str,
    *,
    num_layers: int | None = None,
    dtype: str = "float32",
) -> Path:
    """Write a model of a real shape with random weights, in Hugging Face layout.

    Args:
        directory: Where the files go; made if missing.
        shape: One of `SHAPES`.
        num_layers: How many of its layers; all when missing.
        dtype: Of the weights, float32 or bfloat16.

    Returns:
        The directory, absolute.

    Raises:
        ConfigError: There is no such shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if shape not in SHAPES:
        raise ConfigError(f"there is no shape {shape!r}; use one of {', '.join(SHAPES)}")
    fields = dict(SHAPES[shape]) | {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.for_model(**fields)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    write_tokenizer(directory, max_tokens=int(fields["max_position_embeddings"]))
    marker = {"shape": shape, "weights": "random", "seed": 0}
    (directory / "tinsmith-random.json").write_text(json.dumps(marker), encoding="utf-8")
    return directory
