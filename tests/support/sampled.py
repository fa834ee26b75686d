"""Weights that differ from the base model's, and samples compared by their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.unit.engine.conftest import VOCAB, make_batch, randomise_b

from tinsmith_engine import (
    AdamParams,
    AdapterConfig,
    Engine,
    FullConfig,
    SampledSequence,
    WeightVersion,
)

LONG = tuple(int(token) for token in np.random.default_rng(3).integers(0, VOCAB, 200))


def random_version(engine: Engine, run: str, config: AdapterConfig, seed: int = 1) -> WeightVersion:
    """A version with weights that matter."""
    if not engine.has_run(run):
        engine.create_run(run, config)
    if isinstance(config, FullConfig):
        engine.forward_backward(run, make_batch(seed=seed), "cross_entropy", {})
        engine.optim_step(run, AdamParams(learning_rate=0.02))
    else:
        randomise_b(engine, run, seed)
    return engine.export(run)


def bits(sequences: list[SampledSequence]) -> list[Any]:
    """Everything that a request is told, but for what was known before."""
    found = []
    for sequence in sequences:
        prompt = sequence.prompt
        found.append(
            (
                sequence.tokens,
                sequence.logprobs.tobytes(),
                sequence.versions,
                sequence.topk,
                prompt
                and (
                    prompt.logprobs,
                    prompt.topk,
                    prompt.targets is not None and prompt.targets.tobytes(),
                    prompt.alternatives
                    and (
                        prompt.alternatives.tokens.tobytes(),
                        prompt.alternatives.logprobs.tobytes(),
                    ),
                ),
            )
        )
    return found
