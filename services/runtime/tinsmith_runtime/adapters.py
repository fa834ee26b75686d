"""What a run trains, and its one stored form: the ledger, manifests and the scheduler share it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """How the conversations of a run are written; what is stored with what it trains."""

    chat_template: str = ""
    """Its own template; that of the base model if it is empty."""
    stop_token_ids: tuple[int, ...] = ()
    """What ends an answer by it, beside the stop tokens of the base model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(_Written):
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
class FullConfig(_Written):
    """Every weight of the model is trained; the run starts from the base model's weights."""


AdapterConfig = LoraConfig | FullConfig


def adapter_to_json(config: AdapterConfig) -> str:
    """Return the stored form of what a run trains."""
    kind = "full" if isinstance(config, FullConfig) else "lora"
    # Runs without a template have the form that releases before it read.
    written = {field.name for field in fields(_Written)}
    given = {name: value for name, value in asdict(config).items() if value or name not in written}
    return json.dumps({"kind": kind, **given}, sort_keys=True)


def adapter_from_json(text: str) -> AdapterConfig:
    """Return what a run trains from its stored form."""
    stored = json.loads(text)
    stored["stop_token_ids"] = tuple(stored.get("stop_token_ids", ()))
    return FullConfig(**stored) if stored.pop("kind") == "full" else LoraConfig(**stored)
