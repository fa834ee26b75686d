"""Loads a base model on all ranks, and makes sure that they agree about it."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path

from tinsmith_engine.distributed.process_group import Ranks
from tinsmith_engine.distributed.sharded_decoder import ShardedDecoder, sharded_decoder
from tinsmith_engine.distributed.sharded_engine import ShardedEngine
from tinsmith_engine.loading.base_model import load_model, whole_decoder
from tinsmith_engine.training.exactness import NUM_PROBE_RUNS, check_exactness
from tinsmith_runtime.errors import ConfigError, ExactnessUnavailableError

logger = logging.getLogger(__name__)


def load_sharded_engine(
    ranks: Ranks,
    model_dir: str | Path,
    *,
    shard_base: bool,
    dtype: str = "float32",
    max_resident_runs: int = 64,
    max_sequence_tokens: int = 32_768,
    num_threads: int | None = None,
    micro_batch_tokens: int = 2048,
    max_pass_tokens: int = 8192,
    checkpoint_activations_over_tokens: int = 16_384,
    exact: bool | None = None,
    compiled: bool | None = None,
) -> ShardedEngine:
    """Load a base model; all ranks call this with the same arguments.

    Args:
        ranks: All ranks.
        model_dir: See `Engine.load`, as for the arguments that are not here.
        shard_base: Whether each rank keeps a part of the base model only.
        dtype: See `Engine.load`.
        max_resident_runs: See `Engine.load`.
        max_sequence_tokens: See `Engine.load`.
        num_threads: See `Engine.load`.
        micro_batch_tokens: See `Engine.load`.
        max_pass_tokens: Tokens of one pass of one rank.
        checkpoint_activations_over_tokens: See `Engine.load`.
        exact: See `Engine.load`.
        compiled: See `Engine.load`.

    Raises:
        ConfigError: The ranks would compute different bits, or the model cannot be sharded.
        ExactnessUnavailableError: See `Engine.load`.
        ModelNotFoundError: See `Engine.load`.
        CheckpointIncompatibleError: See `Engine.load`.
    """
    load = functools.partial(
        load_model,
        model_dir,
        dtype=dtype,
        device=str(ranks.device),
        max_sequence_tokens=max_sequence_tokens,
        num_threads=num_threads,
        micro_batch_tokens=micro_batch_tokens,
        checkpoint_activations_over_tokens=checkpoint_activations_over_tokens,
        compiled=ranks.device.type == "cuda" if compiled is None else compiled,
        build=sharded_decoder(ranks) if shard_base else whole_decoder,
        more_details={
            "ranks": ranks.world_size,
            "base": "sharded" if shard_base else "replicated",
        },
    )
    sizes = {
        "max_resident_runs": max_resident_runs,
        "micro_batch_tokens": micro_batch_tokens,
        "max_pass_tokens": max_pass_tokens,
    }
    loaded = load(exact=exact)
    ranks.meet()
    if shard_base and not isinstance(loaded.model, ShardedDecoder):
        raise ConfigError(
            f"shard_base: a model of family {loaded.info.family} runs on its transformers "
            "module, which is not sharded; set shard_base=false"
        )
    _check_same(ranks, loaded.info.fingerprint)
    try:
        if loaded.info.exactness == "exact":
            probed = dataclasses.replace(loaded, model=loaded.model.first_layers())
            check_exactness(
                ShardedEngine(probed, ranks, **sizes | {"max_resident_runs": NUM_PROBE_RUNS})
            )
    except ExactnessUnavailableError as error:
        # What a pass gives is the same on all ranks, so they all come here or none.
        if exact:
            raise
        logger.warning("%s", error)
        del loaded, probed
        loaded = load(exact=False)
        ranks.meet()
    return ShardedEngine(loaded, ranks, **sizes)


def _check_same(ranks: Ranks, fingerprint: str) -> None:
    """Raise ConfigError unless all ranks compute the same bits."""
    found = [text.decode() for text in ranks.all_gather(fingerprint.encode(), "fingerprint")]
    if len(set(found)) > 1:
        raise ConfigError(
            "the ranks would compute different bits: "
            + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found))
        )
