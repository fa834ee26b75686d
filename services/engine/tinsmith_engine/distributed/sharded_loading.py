"""Loads a base model on all ranks, and makes sure that they agree about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinsmith.planning.several_devices import Work, refusal
from tinsmith_engine.distributed.process_group import Ranks
from tinsmith_engine.distributed.sharded_decoder import ShardedDecoder, sharded_decoder
from tinsmith_engine.distributed.sharded_engine import ShardedEngine
from tinsmith_engine.loading.base_model import LoadedModel, ModelSharding, whole_decoder
from tinsmith_runtime.errors import ConfigError


def load_sharded_engine(
    ranks: Ranks, model_dir: str | Path, *, shard_base: bool, **settings: Any
) -> ShardedEngine:
    """Load a base model; all ranks call this with the same arguments.

    Args:
        ranks: All ranks.
        model_dir: See `Engine.load`.
        shard_base: Whether each rank keeps a part of the base model only.
        settings: See `Engine.load`, but for the device, which is the rank's own.

    Raises:
        ConfigError: The ranks would compute different bits, or the model cannot be sharded.
        ExactnessUnavailableError: See `Engine.load`.
        ModelNotFoundError: See `Engine.load`.
        CheckpointIncompatibleError: See `Engine.load`.
    """

    def check_family(family: str) -> None:
        why = refusal(Work.ADAPTERS, family, ranks.world_size) if shard_base else ""
        if why:
            raise ConfigError(f"shard_base: {why}")

    def check(loaded: LoadedModel) -> None:
        ranks.meet()
        if shard_base and not isinstance(loaded.model, ShardedDecoder):
            raise ConfigError(
                f"shard_base: this model of the type {loaded.info.family} runs on its transformers "
                "module, which is not kept in parts; take one device that holds it"
            )
        _check_same(ranks, loaded.info.fingerprint)

    sharding = ModelSharding(
        build=sharded_decoder(ranks) if shard_base else whole_decoder,
        check_family=check_family,
        details={"ranks": ranks.world_size, "base": "sharded" if shard_base else "replicated"},
        check=check,
        engine_arguments=(ranks,),
    )
    return ShardedEngine.load(model_dir, device=str(ranks.device), sharding=sharding, **settings)


def _check_same(ranks: Ranks, fingerprint: str) -> None:
    """Raise ConfigError unless all ranks compute the same bits."""
    found = [text.decode() for text in ranks.all_gather(fingerprint.encode(), "fingerprint")]
    if len(set(found)) > 1:
        raise ConfigError(
            "the ranks would compute different bits: "
            + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found))
        )
