"""The shape of a decoder, read from `config.json`, and what follows from it by counting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tinsmith.errors import ConfigurationError

_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a decoder of the Llama kind."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the MLP of a dense layer."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool
    """Whether the unembedding is the embedding."""
    num_experts: int = 0
    num_chosen_experts: int = 0
    """Experts of each token."""
    expert_size: int = 0
    """Intermediate size of one expert."""
    num_expert_layers: int = 0
    """Layers with experts in the place of an MLP."""

    @classmethod
    def read(cls, model: Path) -> Self:
        """Read the shape of a directory in Hugging Face layout, or of a `config.json`.

        Raises:
            ConfigurationError: If there is none, or it is of a family that is not known here.
        """
        file = model / "config.json" if model.is_dir() else model
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{file} cannot be read as a model's configuration",
                remedy="name a directory in Hugging Face layout, or its config.json",
            ) from error
        if not isinstance(config, dict):
            raise ConfigurationError(f"{file} holds no table", remedy="name a model's config.json")
        return cls.of(config)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Return the shape that a configuration describes.

        Raises:
            ConfigurationError: If a size is missing or the family is not known here.
        """
        family = config.get("model_type", "")
        if family not in _FAMILIES:
            raise ConfigurationError(
                f"models of the type {family or 'none'} cannot be planned for",
                remedy=f"known are {', '.join(_FAMILIES)}",
            )
        wrong = [name for name in _SIZES if not _is_size(config.get(name))]
        if wrong:
            raise ConfigurationError(
                f"the configuration has no {wrong[0]}", remedy="name a model's config.json"
            )
        num_heads = config["num_attention_heads"]
        is_moe = family == "qwen3_moe"
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            is_tied=bool(config.get("tie_word_embeddings", False)),
            num_experts=config["num_experts"] if is_moe else 0,
            num_chosen_experts=config["num_experts_per_tok"] if is_moe else 0,
            expert_size=config["moe_intermediate_size"] if is_moe else 0,
            num_expert_layers=_num_expert_layers(config) if is_moe else 0,
        )

    @property
    def num_parameters(self) -> int:
        """All weights, embeddings included."""
        return self._embeddings + self._layers_with(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token is multiplied with: its experts alone, no embedding."""
        head = self.vocab_size * self.hidden_size
        return self._layers_with(self.num_chosen_experts) + head

    @property
    def kv_numbers_per_token(self) -> int:
        """Keys and values that a token leaves in the cache of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def num_adapter_parameters(
        self, rank: int, *, attention: bool = True, mlp: bool = True, unembedding: bool = False
    ) -> int:
        """Numbers of a LoRA adapter: A [rank, in] and B [out, rank] of each projection.

        Projections that read the same input have an A each, as PEFT has it.
        """
        h, queries = self.hidden_size, self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        sides = 0
        if attention:
            sides += self.num_layers * (3 * h + queries + 2 * keys + queries + h)
        if mlp:
            dense = self.num_layers - self.num_expert_layers
            sides += dense * 3 * (h + self.intermediate_size)
            sides += self.num_expert_layers * self.num_experts * 3 * (h + self.expert_size)
        if unembedding:
            sides += h + self.vocab_size
        return rank * sides

    @property
    def _embeddings(self) -> int:
        return self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)

    def _layers_with(self, num_experts: int) -> int:
        h, queries = self.hidden_size, self.num_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        attention = h * (queries + 2 * keys) + queries * h
        if self.family == "qwen2":
            attention += queries + 2 * keys
        if self.family in ("qwen3", "qwen3_moe"):
            attention += 2 * self.head_dim
        dense = self.num_layers - self.num_expert_layers
        mlps = dense * 3 * h * self.intermediate_size
        experts = num_experts * 3 * h * self.expert_size + self.num_experts * h
        norms = (2 * self.num_layers + 1) * h
        return self.num_layers * attention + mlps + self.num_expert_layers * experts + norms


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _num_expert_layers(config: Mapping[str, Any]) -> int:
    step = config.get("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    layers = range(config["num_hidden_layers"])
    return sum(index not in dense and (index + 1) % step == 0 for index in layers)
