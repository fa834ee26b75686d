"""Prompts that are cut, read together and found again give the bits of a prompt read alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.sampled import bits, random_version
from tests.unit.engine.conftest import LORA, VOCAB, save_tiny
from tests.unit.engine.test_sampling import forward_logprobs, request, run_all
from tests.unit.engine.test_sampling_cache import BLOCK_BYTES

from tinsmith_engine import (
    AdapterConfig,
    Engine,
    FullConfig,
    LoraConfig,
    SampledSequence,
    Sampler,
    SampleRequest,
)
from tinsmith_engine.sampling.schedule.step_plan import PieceBudget

CONFIGS: tuple[AdapterConfig | None, ...] = (None, LORA, FullConfig())


def tokens(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return found


def exact_engine(folder: Path, family: str = "qwen3", dtype: str = "float32") -> Engine:
    engine = Engine.load(save_tiny(folder, family, max_position_embeddings=1024), dtype=dtype)
    assert engine.info.exactness == "exact", "this machine does not keep the bits of rows"
    return engine


def check_trainers_bits(engine: Engine, one: SampleRequest, found: list[SampledSequence]) -> None:
    run = None if one.weights is None else one.weights.run
    for sequence in found:
        wanted = forward_logprobs(engine, run, list(one.prompt_tokens), sequence.tokens)
        assert np.array_equal(sequence.logprobs, np.asarray(wanted, dtype=np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_cut_and_joined_prompts_have_the_trainers_bits(
    tmp_path: Path, family: str, dtype: str
) -> None:
    engine = exact_engine(tmp_path, family, dtype)
    # Here a version of all weights of a mixture of experts would show nothing else.
    versions = [
        None if config is None else random_version(engine, f"run-{index}", config)
        for index, config in enumerate(CONFIGS)
        if not (isinstance(config, FullConfig) and family == "qwen3_moe")
    ]
    requests = [
        request(
            prompt_tokens=tokens(length, length),
            weights=weights,
            max_tokens=10,
            num_samples=2,
            seed=length,
            prompt_logprobs=length % 2 == 0,
        )
        for length in (1, 17, 63, 64, 65, 130, 511, 640, 700)
        for weights in versions
    ]
    alone = [bits(run_all(Sampler(engine), one)[0]) for one in requests]
    # In pieces of parts of a block, of two blocks, and in pieces beside sequences.
    for max_tokens in (48, 128, 4096):
        sampler = Sampler(engine, max_prefill_tokens=max_tokens)
        beside = request(prompt_tokens=tokens(5), max_tokens=60)
        _, *found = run_all(sampler, beside, *requests)
        assert [bits(one) for one in found] == alone
    for one, sampled in zip(requests, found, strict=True):
        check_trainers_bits(engine, one, sampled)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_change_no_bit_of_a_cut_prompt(tmp_path: Path, count: int) -> None:
    engine = exact_engine(tmp_path)
    one = request(prompt_tokens=tokens(400), max_tokens=5)
    wanted = bits(run_all(Sampler(engine), one)[0])
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        for max_tokens in (16, 64):
            sampler = Sampler(engine, max_prefill_tokens=max_tokens)
            assert bits(run_all(sampler, one)[0]) == wanted
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_turns_of_a_conversation_read_what_is_new(tmp_path: Path, dtype: str) -> None:
    engine = exact_engine(tmp_path, dtype=dtype)
    weights = random_version(engine, "run", LORA)
    sampler = Sampler(engine)
    prompt: list[int] = []
    for turn in range(5):
        num_before = len(prompt)
        prompt = [*prompt, *tokens(60, turn)]
        one = request(
            prompt_tokens=prompt, weights=weights, max_tokens=70, num_samples=2, seed=turn
        )
        found = run_all(sampler, one)[0]
        assert bits(found) == bits(run_all(Sampler(engine), one)[0])
        check_trainers_bits(engine, one, found)
        # All but the last token of the turn before were cached, in whole blocks.
        num_known = max(num_before - 1, 0) // 64 * 64
        assert {sequence.num_cached_prompt_tokens for sequence in found} == {num_known}
        prompt += found[turn % 2].tokens


def test_a_beginning_is_known_to_its_version_adapter_and_scope_alone(tmp_path: Path) -> None:
    engine = exact_engine(tmp_path)
    first, other = (random_version(engine, run, LORA, seed) for run, seed in (("a", 1), ("b", 2)))
    # The same run and version number again, with other weights.
    engine.versions.acquire(first)
    newer = random_version(engine, "a", LORA, seed=3)
    sampler = Sampler(engine)
    long = tokens(200)
    ((begun,),) = run_all(
        sampler, request(prompt_tokens=long, weights=first, max_tokens=100, cache_scope="x")
    )
    more = [*long, *begun.tokens, *tokens(9, 1)]
    for weights, scope in ((other, "x"), (newer, "x"), (None, "x"), (first, "y"), (first, "x")):
        one = request(prompt_tokens=more, weights=weights, cache_scope=scope, max_tokens=9)
        (found,) = run_all(sampler, one)[0]
        assert found.num_cached_prompt_tokens == (256 if (weights, scope) == (first, "x") else 0)
        assert bits([found]) == bits(run_all(Sampler(engine), one)[0])


def test_what_was_cached_across_an_update_is_not_known(tmp_path: Path) -> None:
    engine = exact_engine(tmp_path)
    old = random_version(engine, "run", LORA)
    engine.versions.acquire(old)
    new = random_version(engine, "run", LORA, seed=8)
    engine.versions.acquire(new)
    sampler = Sampler(engine, max_prefill_tokens=64)
    followed = request(
        prompt_tokens=tokens(300), weights=old, follows_run=True, max_tokens=80, seed=1
    )
    request_id = sampler.add(followed)
    # Some pieces of the prompt are read with each of the versions.
    sampler.step()
    sampler.step()
    assert sampler.update(request_id, new)
    (mixed,) = (one for _ in range(200) for one in (sampler.step() if sampler.has_work else ()))
    assert set(mixed.versions) == {new.version}
    for weights in (old, new):
        for prompt in (tokens(300), [*tokens(300), *mixed.tokens]):
            one = request(prompt_tokens=prompt, weights=weights, max_tokens=5)
            (found,) = run_all(sampler, one)[0]
            assert bits([found]) == bits(run_all(Sampler(engine), one)[0])


@pytest.mark.parametrize(("num_blocks", "num_turns"), [(8, 4), (8, 12), (12, 12), (30, 12)])
def test_eviction_changes_no_bit_and_blocks_stay_bounded(
    tmp_path: Path, num_blocks: int, num_turns: int
) -> None:
    engine = exact_engine(tmp_path)
    random = np.random.default_rng(num_blocks)
    stems = [tokens(260, seed) for seed in range(3)]
    sampler = Sampler(engine, cache_bytes=num_blocks * BLOCK_BYTES)
    assert sampler.cache_bytes <= num_blocks * BLOCK_BYTES
    for turn in range(num_turns):
        requests = [
            request(
                prompt_tokens=[
                    *stems[int(random.integers(3))][: int(random.integers(1, 260))],
                    *tokens(int(random.integers(1, 60)), turn),
                ],
                max_tokens=int(random.integers(1, 90)),
                num_samples=int(random.integers(1, 3)),
                seed=turn,
            )
            for _ in range(3)
        ]
        for one, found in zip(requests, run_all(sampler, *requests), strict=True):
            assert bits(found) == bits(run_all(Sampler(engine), one)[0])
    # All blocks are to be had again, known beginnings or not.
    longest = num_blocks * 64 + 1
    whole = request(prompt_tokens=tokens(longest - 3, 99), max_tokens=3)
    if longest <= engine.info.max_context_tokens:
        assert run_all(sampler, whole)[0][0].finish_reason == "length"


def test_a_long_prompt_holds_up_nothing_behind_it(tmp_path: Path) -> None:
    engine = exact_engine(tmp_path)
    sampler = Sampler(engine, max_prefill_tokens=64)
    long_id = sampler.add(request(prompt_tokens=tokens(900), max_tokens=1))
    short = request(prompt_tokens=tokens(20, 1), max_tokens=4)
    short_id = sampler.add(short)
    ended = [one.request_id for _ in range(200) for one in sampler.step()]
    assert ended == [short_id, long_id]


def test_a_flood_of_short_prompts_does_not_hold_up_a_long_one(tmp_path: Path) -> None:
    engine = exact_engine(tmp_path)
    sampler = Sampler(engine, max_prefill_tokens=64)
    long_id = sampler.add(request(prompt_tokens=tokens(900), max_tokens=1))
    for step in range(100):
        sampler.add(request(prompt_tokens=tokens(60, step), max_tokens=1, seed=step))
        if any(one.request_id == long_id for one in sampler.step()):
            break
    else:
        raise AssertionError("the long prompt was never read")


def test_a_prompt_that_is_cancelled_while_it_is_read_gives_its_blocks_back(tmp_path: Path) -> None:
    engine = exact_engine(tmp_path)
    broken = random_version(engine, "broken", LORA)
    engine.versions.tensors(broken).theta_P.fill_(float("nan"))
    sampler = Sampler(engine, max_prefill_tokens=64, cache_bytes=10 * BLOCK_BYTES)
    for _ in range(3):
        request_id = sampler.add(request(prompt_tokens=tokens(600), weights=broken, max_tokens=20))
        sampler.step()
        assert sampler.num_active == 1
        sampler.cancel(request_id)
        assert not sampler.has_work
    # What it wrote is not finite, and harms nothing.
    one = request(prompt_tokens=tokens(600, 1), max_tokens=20)
    assert bits(run_all(sampler, one)[0]) == bits(run_all(Sampler(engine), one)[0])


def test_scores_of_the_last_rows_have_the_bits_of_all(tmp_path: Path) -> None:
    engine = exact_engine(tmp_path, "llama")
    weights = random_version(engine, "run", LoraConfig(rank=3, seed=2, train_unembedding=True))
    one = request(prompt_tokens=tokens(131), weights=weights, max_tokens=0, prompt_logprobs=True)
    (whole,) = run_all(Sampler(engine), one)[0]
    # The last piece has two rows that are scored.
    (cut,) = run_all(Sampler(engine, max_prefill_tokens=64), one)[0]
    assert cut.prompt is not None
    assert whole.prompt is not None
    assert cut.prompt.logprobs == whole.prompt.logprobs


def test_prompts_get_about_the_time_of_the_sequences() -> None:
    budget = PieceBudget(4096)
    assert budget.of_step(0) == 4096

    def settle(seconds_of_token: float, num_prompts: int) -> float:
        for _ in range(30):
            num_tokens = budget.of_step(16)
            read_s = seconds_of_token * num_tokens
            budget.note(num_tokens, read_s, 0.01, num_prompts=num_prompts, num_rows=16)
        return seconds_of_token * budget.of_step(16)

    assert 0.002 <= settle(1e-5, 1) <= 0.01
    # Deep in a long prompt a token takes longer.
    assert settle(1e-4, 1) <= 0.01
    # More prompts than sequences get more time.
    assert 0.02 <= settle(1e-5, 160) <= 0.1


def test_a_piece_is_not_halved_where_that_takes_as_long() -> None:
    budget = PieceBudget(4096)

    def settle(step_s: float, seconds_of_token: float) -> int:
        for _ in range(30):
            num_tokens = budget.of_step(16)
            read_s = step_s + seconds_of_token * num_tokens
            budget.note(num_tokens, read_s, 0.01, num_prompts=1, num_rows=16)
        return budget.of_piece(16)

    # Each token costs what it costs: as few as there may be.
    assert settle(0.0, 1e-2) == 16
    # A piece takes 0.02 s whatever is in it.
    assert settle(0.002, 1e-5) > 64
    assert settle(0.02, 1e-6) >= 64
    # And once tokens cost something again, there are fewer.
    assert settle(0.002, 1e-5) > 64
    assert settle(0.0, 1e-2) == 16
