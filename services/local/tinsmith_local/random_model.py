"""Models with the shapes of real ones and random weights, made on the spot.

Widths, heads, norms, vocabulary and file layout are those of the published checkpoints; weights and
tokenizer are not. With them a machine can be sized, and what depends on widths be measured and
tested, where no hub is in reach. The tokenizer is that of the tiny model: its tokens are the first
of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tinsmith_local.tiny_model import write_tokenizer
from tinsmith_runtime.errors import ConfigError

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
}
"""Fields of the configuration by name, as published."""


def build_random_model(
    directory: Path | str,
    shape: str,
    *,
    num_layers: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write a model of a real shape with random weights, in Hugging Face layout.

    Args:
        directory: Where the files go; made if missing.
        shape: One of `SHAPES`.
        num_layers: How many of its layers; all when missing.
        dtype: Of the weights, float32 or bfloat16.
        seed: Of the weights.

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
    torch.manual_seed(seed)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.for_model(**fields)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    write_tokenizer(directory, max_tokens=int(fields["max_position_embeddings"]))
    marker = {"shape": shape, "weights": "random", "seed": seed}
    (directory / "tinsmith-random.json").write_text(json.dumps(marker), encoding="utf-8")
    return directory
