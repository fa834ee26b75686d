"""The cache of keys and values: a bound in bytes at any prompt length, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.sampled import bits, random_version
from tests.unit.engine.conftest import LORA, VOCAB, save_tiny
from tests.unit.engine.test_sampling import request, run_all

from tinsmith_engine import Engine, Sampler, SampleRequest
from tinsmith_engine.sampling.cache.block_pool import BLOCK_TOKENS, BlockPool
from tinsmith_runtime.errors import ConfigError, SequenceTooLongError

# Of `save_tiny("qwen3")`: keys and values of 2 layers, 2 heads of 16 numbers, 4 bytes each.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS


def prompts(count: int, num_tokens: int, **changes: Any) -> list[SampleRequest]:
    random = np.random.default_rng(num_tokens)
    return [
        request(prompt_tokens=random.integers(0, VOCAB, num_tokens).tolist(), seed=seed, **changes)
        for seed in range(count)
    ]


def test_many_long_prompts_stay_within_the_bytes(engine: Engine) -> None:
    budget = 20 * BLOCK_BYTES
    sampler = Sampler(engine, cache_bytes=budget)
    requests = [*prompts(12, 230, max_tokens=20), *prompts(12, 40, max_tokens=8)]
    found = run_all(sampler, *requests)
    assert sampler.cache_bytes <= budget
    alone = [run_all(Sampler(engine), one)[0] for one in requests]
    assert [bits(one) for one in found] == [bits(one) for one in alone]


def test_a_request_that_never_fits_is_told_the_limit(engine: Engine) -> None:
    sampler = Sampler(engine, cache_bytes=2 * BLOCK_BYTES + 1)
    assert sampler.cache_bytes == 2 * BLOCK_BYTES
    assert sampler.max_sequence_tokens == 129
    (longest,) = prompts(1, 100, max_tokens=29)
    assert len(run_all(sampler, longest)[0][0].tokens) == 29
    for refused in (*prompts(1, 100, max_tokens=30), *prompts(1, 130, max_tokens=1)):
        with pytest.raises(SequenceTooLongError, match="129 tokens") as caught:
            sampler.add(refused)
        assert caught.value.metadata["limit"] == "129"
    assert not sampler.has_work


def test_a_cache_without_room_for_anything_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="cache_bytes"):
        Sampler(engine, cache_bytes=BLOCK_BYTES - 1)


@pytest.mark.parametrize("num_tokens", [64, 128, 63, 65])
def test_samples_of_a_prompt_that_fills_its_blocks(engine: Engine, num_tokens: int) -> None:
    (several,) = prompts(1, num_tokens, num_samples=3, max_tokens=70)
    found = run_all(Sampler(engine), several)[0]
    # With room for copies of the prompt, and without.
    small = Sampler(engine, cache_bytes=(num_tokens // 64 + 9) * BLOCK_BYTES)
    assert bits(run_all(small, several)[0]) == bits(found)
    assert len({tuple(one.tokens) for one in found}) == 3


@pytest.mark.parametrize("num_blocks", [4, 5, 7, 9])
def test_what_gives_way_goes_on_with_the_same_bits(
    tmp_path: Path, engine: Engine, num_blocks: int
) -> None:
    weights = random_version(engine, "run", LORA)
    requests = [
        *prompts(3, 30, max_tokens=70, weights=weights, topk_sample_logprobs=2),
        *prompts(2, 60, max_tokens=80, num_samples=3, temperature=0.7),
    ]
    crowded = run_all(Sampler(engine, cache_bytes=num_blocks * BLOCK_BYTES), *requests)
    alone = [run_all(Sampler(engine), one)[0] for one in requests]
    assert [bits(one) for one in crowded] == [bits(one) for one in alone]


def test_cancelled_sequences_give_all_blocks_back(engine: Engine) -> None:
    sampler = Sampler(engine, cache_bytes=4 * BLOCK_BYTES)
    ids = [sampler.add(one) for one in prompts(4, 30, max_tokens=200)]
    for _ in range(100):
        sampler.step()
    for request_id in ids:
        sampler.cancel(request_id)
    assert not sampler.has_work
    # All four blocks are needed for this one.
    (longest,) = prompts(1, 200, max_tokens=50)
    assert run_all(sampler, longest)[0][0].finish_reason == "length"


def test_a_full_context_fits_a_fallback_that_caches_nothing(tmp_path: Path) -> None:
    engine = Engine.load(save_tiny(tmp_path, "gpt_neox"))
    sampler = Sampler(engine, cache_bytes=1)
    assert sampler.cache_bytes == 0
    assert len(run_all(sampler, *prompts(1, 250, max_tokens=100))[0][0].tokens) == 6


def test_blocks_are_given_in_runs_and_planned_ones_last() -> None:
    pool = BlockPool(8)
    first = pool.take_run(2, 2)
    assert first == ([0, 1], [2, 3])
    assert pool.take_run(5, 0) is None
    assert pool.take_run(3, 0) == ([4, 5, 6], [])
    assert pool.num_free == 3
    # A planned block goes to its owner, and to others once nothing else is free.
    assert pool.take(1, [2]) == [2]
    assert pool.take(2) == [7, 3]
    assert pool.num_free == 0
    pool.share([0, 1])
    pool.release([0, 1])
    assert pool.num_free == 0
    pool.release([0, 1])
    pool.unplan([2, 3])
    assert pool.take_run(2, 0) == ([0, 1], [])
