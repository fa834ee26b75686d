"""The embedded sampler against Hugging Face generate, the trainer's forward, and itself alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.conftest import LORA, VOCAB, make_batch, peft_model, randomise_b, save_tiny

from tinsmith_engine import (
    AdamParams,
    AdapterConfig,
    Datum,
    Engine,
    FullConfig,
    LoraConfig,
    SampledSequence,
    Sampler,
    SampleRequest,
    WeightVersion,
)
from tinsmith_runtime.errors import (
    InvalidFieldError,
    SequenceTooLongError,
    TokenOutOfVocabularyError,
    VersionNotLoadedError,
)

PROMPT = (5, 17, 3, 80, 41, 8, 2)


def run_all(sampler: Sampler, *requests: SampleRequest) -> list[list[SampledSequence]]:
    """Sample requests together; the sequences of each, by sample index."""
    ids = [sampler.add(request) for request in requests]
    found: dict[int, list[SampledSequence]] = {request_id: [] for request_id in ids}
    while sampler.has_work:
        for sequence in sampler.step():
            found[sequence.request_id].append(sequence)
    return [sorted(found[i], key=lambda sequence: sequence.sample_index) for i in ids]


def request(**changes: Any) -> SampleRequest:
    fields: dict[str, Any] = {"prompt_tokens": PROMPT, "max_tokens": 12}
    return SampleRequest(**fields | changes)


def trained_run(engine: Engine, run: str, config: AdapterConfig, seed: int = 0) -> None:
    engine.create_run(run, config)
    engine.forward_backward(run, make_batch(seed=seed), "cross_entropy", {})
    engine.optim_step(run, AdamParams(learning_rate=0.02))


def forward_logprobs(
    engine: Engine, run: str | None, prompt: Sequence[int], completion: Sequence[int]
) -> np.ndarray:
    tokens = np.array([*prompt, *completion])
    zeros = np.zeros(len(tokens) - 1, np.float32)
    datum = Datum(tokens[:-1], tokens[1:], {"weights": zeros})
    logprobs = engine.forward(run, [datum], "cross_entropy", {}).logprobs[0]
    return logprobs[len(prompt) - 1 :]


def same(left: SampledSequence, right: SampledSequence) -> bool:
    return left.tokens == right.tokens and np.array_equal(left.logprobs, right.logprobs)


def test_greedy_equals_hugging_face_generate(
    engine: Engine, qwen3_dir: Path, tmp_path: Path
) -> None:
    trained_run(engine, "run", LORA)
    randomise_b(engine, "run")
    model = peft_model(qwen3_dir, engine, "run", tmp_path / "adapter")
    found = run_all(
        Sampler(engine),
        request(weights=engine.export("run"), temperature=0.0, max_tokens=80),
    )[0][0]
    reference = model.generate(
        input_ids=torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=80,
        do_sample=False,
    )
    assert found.tokens == reference[0, len(PROMPT) :].tolist()
    assert found.finish_reason == "length"


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (None, "qwen3"),
        (LORA, "qwen3"),
        (FullConfig(), "qwen3"),
        (LoraConfig(rank=3, seed=2, train_unembedding=True), "llama"),
        (LORA, "gpt_neox"),
    ],
)
def test_logprobs_equal_the_trainers_forward(
    tmp_path: Path, config: AdapterConfig | None, family: str
) -> None:
    engine = Engine.load(save_tiny(tmp_path, family))
    weights = None
    if config is not None:
        trained_run(engine, "run", config)
        weights = engine.export("run")
    sampled = run_all(
        Sampler(engine),
        # Temperature, top-k and top-p choose tokens; they do not change reported numbers.
        request(weights=weights, num_samples=3, temperature=0.7, top_k=40, top_p=0.95, seed=4),
    )[0]
    for sequence in sampled:
        wanted = forward_logprobs(engine, weights.run if weights else None, PROMPT, sequence.tokens)
        np.testing.assert_allclose(sequence.logprobs, wanted, atol=1e-5)
        assert sequence.versions == [0 if config is None else 1] * 12


def test_neighbours_change_no_bit(engine: Engine) -> None:
    versions: list[WeightVersion | None] = [None]
    configs: list[AdapterConfig] = [LORA, LORA, LoraConfig(rank=16, seed=1), FullConfig()]
    for index, config in enumerate(configs):
        trained_run(engine, f"run{index}", config, seed=index)
        versions.append(engine.export(f"run{index}"))
    random = np.random.default_rng(0)
    requests = [
        request(
            prompt_tokens=random.integers(0, VOCAB, random.integers(1, 90)).tolist(),
            weights=versions[index % len(versions)],
            num_samples=1 + index % 3,
            max_tokens=int(random.integers(5, 40)),
            temperature=index % 4 / 2,
            top_k=(-1, 20)[index % 2],
            seed=index,
        )
        for index in range(15)
    ]
    together = run_all(Sampler(engine), *requests)
    crowded = run_all(Sampler(engine, max_sequences=5), *requests)
    for index, one in enumerate(requests):
        alone = run_all(Sampler(engine), one)[0]
        assert len(alone) == one.num_samples
        for mixed in (together[index], crowded[index]):
            assert all(same(a, b) for a, b in zip(alone, mixed, strict=True)), index


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_neighbours_change_no_bit_at_small_ranks(engine: Engine, rank: int) -> None:
    # Products over so few columns once rounded by their place in a batch.
    versions = []
    for index in range(3):
        engine.create_run(f"run{index}", LoraConfig(rank=rank, seed=2))
        randomise_b(engine, f"run{index}", index)
        versions.append(engine.export(f"run{index}"))
    random = np.random.default_rng(1)
    requests = [
        request(
            prompt_tokens=random.integers(0, VOCAB, length).tolist(),
            weights=versions[index % 3],
            seed=index,
        )
        for index, length in enumerate((100, 20, 30, 150, 160, 117, 5, 7, 8, 99, 40, 43))
    ]
    together = run_all(Sampler(engine), *requests)
    for index, one in enumerate(requests):
        assert same(together[index][0], run_all(Sampler(engine), one)[0][0]), index


def test_samples_of_a_prompt_differ_and_seeds_repeat(engine: Engine) -> None:
    first, again, other = run_all(
        Sampler(engine),
        request(num_samples=4, seed=1),
        request(num_samples=2, seed=1),
        request(num_samples=2, seed=2),
    )
    assert len({tuple(sequence.tokens) for sequence in first}) == 4
    assert [s.tokens for s in again] == [s.tokens for s in first[:2]]
    assert [s.tokens for s in other] != [s.tokens for s in again]


def test_more_samples_than_rows(engine: Engine) -> None:
    few, many = (
        run_all(Sampler(engine, max_sequences=rows), request(num_samples=7))[0] for rows in (3, 16)
    )
    assert all(same(a, b) for a, b in zip(few, many, strict=True))


def test_stop_token_is_returned_and_ends_the_sequence(engine: Engine) -> None:
    free = run_all(Sampler(engine), request(temperature=0.0))[0][0]
    stop = free.tokens[4]
    stopped = run_all(Sampler(engine), request(temperature=0.0, stop_tokens=(stop,)))[0][0]
    end = free.tokens.index(stop) + 1
    assert stopped.tokens == free.tokens[:end]
    assert stopped.finish_reason == "stop"
    assert len(stopped.logprobs) == len(stopped.versions) == end


def test_stop_string_may_span_tokens(engine: Engine) -> None:
    def decode_text(tokens: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)

    free = run_all(Sampler(engine), request(temperature=0.0))[0][0]
    text = f"{free.tokens[3]}><{free.tokens[4]}>"
    stopped = run_all(
        Sampler(engine),
        request(temperature=0.0, stop_strings=("none", text), decode_text=decode_text),
    )[0][0]
    assert stopped.finish_reason == "stop"
    assert text in decode_text(stopped.tokens)
    assert text not in decode_text(stopped.tokens[:-1])


def test_a_full_context_ends_a_sequence(qwen3_dir: Path) -> None:
    engine = Engine.load(qwen3_dir, max_sequence_tokens=20)
    found = run_all(Sampler(engine), request(max_tokens=1000))[0][0]
    assert (len(found.tokens), found.finish_reason) == (20 - len(PROMPT), "length")
    full = run_all(Sampler(engine), request(prompt_tokens=[1] * 20))[0][0]
    assert (full.tokens, full.finish_reason) == ([], "length")
    with pytest.raises(SequenceTooLongError):
        Sampler(engine).add(request(prompt_tokens=[1] * 21))


def next_token_probabilities(engine: Engine, temperature: float) -> np.ndarray:
    logprobs = [forward_logprobs(engine, None, PROMPT, [token])[0] for token in range(VOCAB)]
    powers = np.exp(np.asarray(logprobs, dtype=np.float64) / temperature)
    return np.asarray(powers / powers.sum())


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (5, 1.0), (-1, 0.6), (8, 0.5)], ids=str)
def test_sampled_tokens_follow_the_cut_distribution(
    engine: Engine, top_k: int, top_p: float
) -> None:
    probabilities = next_token_probabilities(engine, 1.5)
    order = np.argsort(-probabilities)
    if top_k > 0:
        probabilities[order[top_k:]] = 0.0
        probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= top_p]] = 0.0
    probabilities /= probabilities.sum()

    num_samples = 4000
    found = run_all(
        Sampler(engine, max_sequences=500),
        request(num_samples=num_samples, max_tokens=1, temperature=1.5, top_k=top_k, top_p=top_p),
    )[0]
    counts = np.bincount([sequence.tokens[0] for sequence in found], minlength=VOCAB)
    assert not counts[probabilities == 0].any()
    # Total variation of n draws over s tokens is about sqrt(s / (2 pi n)); twice that is rare.
    support = int((probabilities > 0).sum())
    distance = 0.5 * np.abs(counts / num_samples - probabilities).sum()
    assert distance < 2 * np.sqrt(support / (2 * np.pi * num_samples))


def test_prompt_logprobs_and_topk_equal_hugging_face(engine: Engine, qwen3_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(qwen3_dir, dtype=torch.float32)
    logits = model.eval()(torch.tensor([PROMPT])).logits[0].detach()
    log_softmax = torch.log_softmax(logits, -1)
    found = run_all(
        Sampler(engine), request(max_tokens=0, prompt_logprobs=True, topk_prompt_logprobs=3)
    )[0][0]
    assert (found.tokens, found.finish_reason) == ([], "length")
    assert found.prompt is not None
    assert found.prompt.logprobs[0] is None
    assert found.prompt.topk[0] is None
    assert len(found.prompt.logprobs) == len(found.prompt.topk) == len(PROMPT)
    for position in range(1, len(PROMPT)):
        row = log_softmax[position - 1]
        wanted = pytest.approx(row[PROMPT[position]].item(), abs=1e-5)
        assert found.prompt.logprobs[position] == wanted
        topk = found.prompt.topk[position]
        assert topk is not None
        values, ids = row.topk(3)
        assert [token for token, _ in topk] == ids.tolist()
        np.testing.assert_allclose([value for _, value in topk], values.numpy(), atol=1e-5)


def test_a_version_is_untouched_by_later_steps_and_freed(engine: Engine) -> None:
    trained_run(engine, "run", LORA)
    old = engine.export("run")
    assert engine.export("run") == old
    sampler = Sampler(engine)
    before = run_all(Sampler(engine), request(weights=old, seed=3))[0][0]
    request_id = sampler.add(request(weights=old, seed=3))
    sampler.step()
    engine.forward_backward("run", make_batch(seed=5), "cross_entropy", {})
    engine.optim_step("run", AdamParams(learning_rate=0.02))
    new = engine.export("run")
    assert (old.version, new.version) == (1, 2)
    assert engine.versions.held() == [old, new]
    assert len(sampler.progress(request_id)[0].tokens) == 2
    while sampler.has_work:
        finished = sampler.step()
    assert same(finished[0], before)
    assert engine.versions.held() == [new]
    with pytest.raises(VersionNotLoadedError):
        sampler.add(request(weights=old))
    engine.drop_run("run")
    assert engine.versions.held() == []


@pytest.mark.parametrize("config", [LORA, FullConfig()], ids=["lora", "full"])
def test_weights_from_files_sample_like_the_run(engine: Engine, config: AdapterConfig) -> None:
    trained_run(engine, "run", config)
    tensors, _ = engine.adapter_tensors("run")
    loaded = engine.load_weights("checkpoint", tensors, config, version=7)
    live, stored = run_all(
        Sampler(engine), request(weights=engine.export("run")), request(weights=loaded)
    )
    assert same(live[0], stored[0])
    assert stored[0].versions == [7] * 12
    engine.unload_weights("checkpoint")
    assert loaded not in engine.versions.held()


def test_cancel_frees_rows_and_versions(engine: Engine) -> None:
    trained_run(engine, "run", LORA)
    sampler = Sampler(engine, max_sequences=2)
    weights = engine.export("run")
    first = sampler.add(request(weights=weights, num_samples=5, max_tokens=100))
    second = sampler.add(request())
    sampler.step()
    sampler.cancel(first)
    sampler.cancel(first)
    finished = []
    while sampler.has_work:
        finished += sampler.step()
    assert [sequence.request_id for sequence in finished] == [second]
    engine.drop_run("run")
    assert engine.versions.held() == []


def test_bad_requests_are_refused(engine: Engine) -> None:
    sampler = Sampler(engine)
    with pytest.raises(TokenOutOfVocabularyError):
        sampler.add(request(prompt_tokens=[VOCAB]))
    for changes in (
        {"num_samples": 0},
        {"max_tokens": -1},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"topk_prompt_logprobs": VOCAB + 1},
        {"stop_strings": ("x",)},
    ):
        with pytest.raises(InvalidFieldError):
            sampler.add(request(**changes))
    assert not sampler.has_work


def test_bfloat16_samples_near_its_own_forward(qwen3_dir: Path) -> None:
    engine = Engine.load(qwen3_dir, dtype="bfloat16")
    trained_run(engine, "run", LORA)
    found = run_all(Sampler(engine), request(weights=engine.export("run"), num_samples=2))[0]
    for sequence in found:
        wanted = forward_logprobs(engine, "run", PROMPT, sequence.tokens)
        # Shapes differ between decoding and scoring, and bfloat16 rounds to 3 digits.
        np.testing.assert_allclose(sequence.logprobs, wanted, atol=0.1)
