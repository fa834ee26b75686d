"""Sequences of many adapters in one decode batch: each has the bits of the trainer's forward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.sampled import random_version
from tests.unit.engine.conftest import VOCAB, save_tiny
from tests.unit.engine.test_sampling import forward_logprobs, request, run_all

from tinsmith_engine import Engine, LoraConfig, Sampler

RANKS = {
    "float32": (32, 32, 8, 16, 4, 32, 8, 1, 6, 12, 4),
    "bfloat16": (32, 8, 32, 16, 12, 4, 1, 4),
}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "read in place": ("qwen3", {"hidden_size": 128, "intermediate_size": 192}),
    # A vocabulary of no multiple of 16: nothing is read in place.
    "in tiles": ("qwen3", {"hidden_size": 256, "intermediate_size": 192, "vocab_size": VOCAB + 1}),
    "experts": ("qwen3_moe", {"hidden_size": 128, "moe_intermediate_size": 96}),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", RANKS)
@pytest.mark.parametrize("trains_unembedding", [False, True], ids=["layers", "all"])
def test_ranks_beside_each_other_have_the_trainers_bits(
    tmp_path: Path, model: str, dtype: str, *, trains_unembedding: bool
) -> None:
    family, sizes = MODELS[model]
    engine = Engine.load(save_tiny(tmp_path, family, **sizes), dtype=dtype)
    assert engine.info.exactness == "exact", "this machine does not keep the bits of rows"
    versions = [
        random_version(
            engine,
            f"run-{index}",
            LoraConfig(rank=rank, seed=index, train_unembedding=trains_unembedding),
        )
        for index, rank in enumerate(RANKS[dtype])
    ]
    random = np.random.default_rng(3)
    requests = [
        request(
            prompt_tokens=random.integers(0, VOCAB, 5 + index).tolist(),
            max_tokens=6 + index,
            num_samples=1 + index % 3,
            weights=weights,
            seed=index,
        )
        for index, weights in enumerate([*versions, None, versions[0], versions[2]])
    ]
    found = run_all(Sampler(engine), *requests)
    for one, sampled in zip(requests, found, strict=True):
        run = None if one.weights is None else one.weights.run
        for sequence in sampled:
            wanted = forward_logprobs(engine, run, list(one.prompt_tokens), sequence.tokens)
            assert np.array_equal(sequence.logprobs, np.asarray(wanted, dtype=np.float32))
