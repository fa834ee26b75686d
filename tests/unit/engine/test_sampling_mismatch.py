"""Log-probabilities of sampled tokens are the trainer's own: the same bits, not close numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.sampled import random_version
from tests.unit.engine.conftest import LORA, VOCAB, save_tiny
from tests.unit.engine.test_sampling import forward_logprobs, request, run_all

from tinsmith_engine import AdapterConfig, Engine, FullConfig, Sampler

CONFIGS: tuple[AdapterConfig | None, ...] = (None, LORA, FullConfig())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_every_bit_is_the_trainers(tmp_path: Path, family: str, dtype: str) -> None:
    engine = Engine.load(save_tiny(tmp_path, family, max_position_embeddings=512), dtype=dtype)
    assert engine.info.exactness == "exact", "this machine does not keep the bits of rows"
    versions = [
        None if config is None else random_version(engine, f"run-{index}", config)
        for index, config in enumerate(CONFIGS)
    ]
    random = np.random.default_rng(5)
    # Short attention, long attention, and completions that grow from one into the other.
    requests = [
        request(
            prompt_tokens=random.integers(0, VOCAB, length).tolist(),
            max_tokens=num_tokens,
            num_samples=num_samples,
            weights=weights,
            seed=length,
        )
        for length, num_tokens, num_samples in ((1, 30, 5), (50, 30, 2), (100, 60, 1), (290, 30, 3))
        for weights in versions
    ]
    found = run_all(Sampler(engine), *requests)
    for one, sampled in zip(requests, found, strict=True):
        run = None if one.weights is None else one.weights.run
        for sequence in sampled:
            wanted = forward_logprobs(engine, run, list(one.prompt_tokens), sequence.tokens)
            assert np.array_equal(sequence.logprobs, np.asarray(wanted, dtype=np.float32))


def test_threads_change_no_bit(tmp_path: Path) -> None:
    engine = Engine.load(save_tiny(tmp_path, "qwen3"))
    assert engine.info.exactness == "exact", "this machine does not keep the bits of rows"
    prompt = np.random.default_rng(6).integers(0, VOCAB, 140).tolist()
    one = request(prompt_tokens=prompt, max_tokens=60, num_samples=3)
    num_threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append([s.logprobs.tobytes() for s in run_all(Sampler(engine), one)[0]])
    finally:
        torch.set_num_threads(num_threads)
    assert found[0] == found[1] == found[2]
