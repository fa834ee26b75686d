"""What a run trains, and its one stored form: the ledger, manifests and the scheduler share it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """A low-rank adapter on the linear layers of the base model.

    The forward pass adds `alpha / rank * B A x` to each adapted linear layer.
    """

    rank: int = 32
    seed: int = 0
    """Seeds the initial A; B starts at zero."""
    alpha: float = 32.0
    train_attention: bool = True
    train_mlp: bool = True
    train_unembedding: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FullConfig:
    """Every weight of the model is trained; the run starts from the base model's weights."""


AdapterConfig = LoraConfig | FullConfig


def adapter_to_json(config: AdapterConfig) -> str:
    """Return the stored form of what a run trains."""
    if isinstance(config, FullConfig):
        return json.dumps({"kind": "full"})
    return json.dumps({"kind": "lora", **asdict(config)}, sort_keys=True)


def adapter_from_json(text: str) -> AdapterConfig:
    """Return what a run trains from its stored form."""
    fields = json.loads(text)
    return FullConfig() if fields.pop("kind") == "full" else LoraConfig(**fields)
