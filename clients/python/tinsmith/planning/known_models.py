"""Shapes of models that are known by name, as the `config.json` of each says on its hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tinsmith.errors import ConfigurationError
from tinsmith.planning.model_shape import ModelShape


def _llama(hidden: int, inner: int, layers: int, heads: int, head_dim: int = 128) -> ModelShape:
    return ModelShape(
        family="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        is_tied=hidden <= 3072,
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> ModelShape:
    return ModelShape(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        is_tied=hidden <= 2560,
    )


def _qwen3_moe(hidden: int, inner: int, layers: int, heads: int, expert: int) -> ModelShape:
    return ModelShape(
        family="qwen3_moe",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=4,
        head_dim=128,
        is_tied=False,
        num_experts=128,
        num_chosen_experts=8,
        expert_size=expert,
        num_expert_layers=layers,
    )


_LLAMA_8B, _LLAMA_70B = _llama(4096, 14336, 32, 32), _llama(8192, 28672, 80, 64)
_QWEN_30B, _QWEN_235B = (
    _qwen3_moe(2048, 6144, 48, 32, 768),
    _qwen3_moe(4096, 12288, 94, 64, 1536),
)

KNOWN_MODELS: Mapping[str, ModelShape] = {
    "meta-llama/Llama-3.2-1B": _llama(2048, 8192, 16, 32, 64),
    "meta-llama/Llama-3.2-3B": _llama(3072, 8192, 28, 24),
    "meta-llama/Llama-3.1-8B": _LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_8B,
    "meta-llama/Llama-3.1-70B": _LLAMA_70B,
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_70B,
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32),
    "Qwen/Qwen3-4B-Instruct-2507": _qwen3(2560, 9728, 36, 32),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32),
    "Qwen/Qwen3-8B-Base": _qwen3(4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64),
    "Qwen/Qwen3-30B-A3B": _QWEN_30B,
    "Qwen/Qwen3-30B-A3B-Base": _QWEN_30B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN_30B,
    "Qwen/Qwen3-235B-A22B-Instruct-2507": _QWEN_235B,
}


def find_shape(model: str | Path | ModelShape) -> ModelShape:
    """Return the shape of a model.

    Args:
        model: A shape, a name of `KNOWN_MODELS` with or without its owner, or the path of a
            directory in Hugging Face layout or of its `config.json`.

    Raises:
        ConfigurationError: If it is none of these.
    """
    if isinstance(model, ModelShape):
        return model
    wanted = str(model).lower()
    for name, shape in KNOWN_MODELS.items():
        if wanted in (name.lower(), name.lower().rpartition("/")[2]):
            return shape
    if Path(model).exists():
        return ModelShape.read(Path(model))
    raise ConfigurationError(
        f"the shape of {model} is not known here",
        remedy="name a directory in Hugging Face layout, its config.json, or one of "
        f"{', '.join(KNOWN_MODELS)}",
    )
