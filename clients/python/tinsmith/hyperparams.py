"""Advice on hyper-parameters: learning rate, size of an adapter, batch and steps.

The functions have the names of `tinker_cookbook.hyperparam_utils` and give its figures, where the
cookbook has any. A model is a name such as `Qwen/Qwen3-8B`, a directory in Hugging Face layout, or
a `ModelShape`. Advice is a place to begin a sweep at, which `learning_rate=1e-4,3e-4,1e-3` runs.

Sources: Tinker's documentation, pages "Supervised learning hyperparameters" and "LoRA primer", and
Schulman et al. 2025, "LoRA Without Regret", https://thinkingmachines.ai/blog/lora/.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import ConfigurationError
from tinsmith.planning.known_models import find_shape
from tinsmith.planning.model_shape import ModelShape

Model = str | Path | ModelShape

FULL_RATE = 5e-5
"""For all weights of a model whose hidden size is 2000."""
LORA_MULTIPLIER = 10.0
"""Rate of an adapter over that of all weights, as the sweeps of "LoRA Without Regret" found."""

_EXPONENTS = {"llama": 0.781, "qwen2": 0.0775, "qwen3": 0.0775, "qwen3_moe": 0.0775}
"""By family: how the best rate falls with the hidden size, fitted by Tinker's authors."""
_MAX_RANK = 128


def get_lr(model: Model, is_lora: bool = True) -> float:
    """Return the learning rate to begin with: `5e-5 * 10 * (2000 / hidden size) ** P`.

    P is 0.781 for Llama and 0.0775 for Qwen; 10 is for adapters and left out for all weights. It
    was fitted to supervised runs on models from 1B to 70B: at other sizes it is an extrapolation.
    It does not depend on the rank.

    Raises:
        ConfigurationError: If the model's shape is not known, or none was fitted for its family.

    Example:
        >>> rate = get_lr("meta-llama/Llama-3.1-8B")  # 2.86e-4
    """
    shape = find_shape(model)
    if shape.family not in _EXPONENTS:
        raise ConfigurationError(
            f"no learning rate was fitted for models of the type {shape.family}",
            remedy="sweep it: learning_rate=1e-4,3e-4,1e-3",
        )
    rate = FULL_RATE * LORA_MULTIPLIER if is_lora else FULL_RATE
    return rate * math.pow(2000 / shape.hidden_size, _EXPONENTS[shape.family])


def get_lora_lr_over_full_finetune_lr(model: Model, lora_alpha: float = 32.0) -> float:
    """Return the rate of an adapter over that of all weights that follows from the width alone.

    It is `hidden size / (2 * lora_alpha)`, which gives the figures of Tinker's LoRA primer: 32 for
    Llama-3.2-1B and 128 for Llama-3.1-70B. Later sweeps found 10 for every model. `get_lr` has
    that, and so has the cookbook since; this is for rates that are taken over from papers.

    Raises:
        ConfigurationError: If the model's shape is not known.

    Example:
        >>> rate = 1e-6 * get_lora_lr_over_full_finetune_lr("meta-llama/Llama-3.2-1B")
    """
    return find_shape(model).hidden_size / (2 * lora_alpha)


def get_lora_param_count(
    model: Model,
    lora_rank: int = 32,
    train_mlp: bool = True,
    train_attn: bool = True,
    train_unembed: bool = True,
) -> int:
    """Return how many numbers an adapter trains, by counting A and B of each projection.

    Every expert has an A and a B of its own here. Tinker shares one of the two among the experts
    of a layer, and counts fewer for such models; for dense ones the counts are equal.

    Raises:
        ConfigurationError: If the model's shape is not known.

    Example:
        >>> count = get_lora_param_count("meta-llama/Llama-3.1-8B", lora_rank=32)
    """
    return find_shape(model).num_adapter_parameters(
        lora_rank, attention=train_attn, mlp=train_mlp, unembedding=train_unembed
    )


@dataclass(frozen=True, slots=True)
class Advice:
    """What to begin with.

    Attributes:
        learning_rate: Of an adapter.
        full_learning_rate: Of all weights.
        rank: Of the adapter.
        num_adapter_parameters: At this rank, without the unembedding.
        batch_size: Examples of a step.
        num_steps: Steps that are worth while; ten times as many are often better.
        num_epochs: How often that reads the examples; None if their number is not known.
        note: What else to know; may be empty.
    """

    learning_rate: float
    full_learning_rate: float
    rank: int
    num_adapter_parameters: int
    batch_size: int
    num_steps: int
    num_epochs: float | None
    note: str = ""


def advise(model: Model, *, num_examples: int = 0, num_trained_tokens: int = 0) -> Advice:
    """Return what to begin supervised fine-tuning with.

    A batch of 128 and at least 100 steps is what Tinker's documentation advises; with fewer than
    12,800 examples the batch shrinks to a power of two, so that two epochs have 100 steps. The rank
    is 32, or larger where the data holds more trained tokens than the adapter has parameters:
    that is the rule of the LoRA primer for how much an adapter takes in.

    Args:
        model: The base model.
        num_examples: Of the data; 0 if it is not known.
        num_trained_tokens: Tokens with a weight, in all of the data; 0 if it is not known.

    Raises:
        ConfigurationError: If nothing is known of the model.

    Example:
        >>> advice = advise("Qwen/Qwen3-8B", num_examples=2_000)
    """
    shape = find_shape(model)
    rank = 32
    while rank < _MAX_RANK and _capacity(shape, rank) < num_trained_tokens:
        rank *= 2
    batch_size, num_steps = 128, 100
    while num_examples and batch_size > 8 and 2 * num_examples < batch_size * num_steps:
        batch_size //= 2
    is_short = num_trained_tokens > _capacity(shape, rank)
    return Advice(
        learning_rate=get_lr(shape),
        full_learning_rate=get_lr(shape, is_lora=False),
        rank=rank,
        num_adapter_parameters=_capacity(shape, rank),
        batch_size=batch_size,
        num_steps=num_steps,
        num_epochs=batch_size * num_steps / num_examples if num_examples else None,
        note="the data holds more than an adapter of the largest rank takes in: train all weights"
        if is_short
        else "",
    )


def _capacity(shape: ModelShape, rank: int) -> int:
    return get_lora_param_count(shape, rank, train_unembed=False)
