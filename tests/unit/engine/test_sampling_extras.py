"""What else a sampler tells, what it reuses, and weights that change under a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.sampled import LONG, bits, random_version
from tests.unit.engine.conftest import LORA, VOCAB, save_tiny
from tests.unit.engine.test_sampling import PROMPT, forward_logprobs, request, run_all, same

from tinsmith_engine import (
    AdapterConfig,
    Engine,
    FullConfig,
    LoraConfig,
    PromptLogprobs,
    SampledSequence,
    Sampler,
)
from tinsmith_engine.sampling.cache.prefix_cache import PromptKey
from tinsmith_engine.sampling.decode.decode_step import CachedDecoding
from tinsmith_engine.sampling.decode.token_selection import alternative_uniforms, uniform
from tinsmith_runtime.errors import (
    EmptyBatchError,
    InvalidFieldError,
    NotFiniteInputError,
    ShapeMismatchError,
    TokenOutOfVocabularyError,
)

ADAPTED_HEAD = LoraConfig(rank=3, seed=2, train_unembedding=True)


def scores(sampler: Sampler, **changes: Any) -> PromptLogprobs:
    prompt = run_all(sampler, request(**changes))[0][0].prompt
    assert prompt is not None
    return prompt


# Scores of the prompt.


@pytest.mark.parametrize(
    ("config", "family"), [(None, "qwen3"), (ADAPTED_HEAD, "llama"), (None, "gpt_neox")]
)
def test_targets_are_scored_as_prompt_tokens_are(
    tmp_path: Path, config: AdapterConfig | None, family: str
) -> None:
    engine = Engine.load(save_tiny(tmp_path, family))
    weights = None if config is None else random_version(engine, "run", config)
    # Each position's own next token, one of any kind, and none.
    targets = np.stack([LONG[1:], np.arange(199) % VOCAB, np.full(199, -1)], axis=1)
    found = scores(
        Sampler(engine),
        weights=weights,
        prompt_tokens=LONG,
        max_tokens=0,
        prompt_logprobs=True,
        target_prompt_tokens=targets,
    )
    assert found.targets is not None
    assert found.targets.dtype == np.float32
    assert found.targets.shape == (199, 3)
    assert found.targets[:, 0].tolist() == found.logprobs[1:]
    assert not found.targets[:, 2].any()
    for position in (1, 40, 199):
        (wanted,) = forward_logprobs(
            engine,
            weights.run if weights else None,
            LONG[:position],
            [int(targets[position - 1, 1])],
        )
        assert found.targets[position - 1, 1] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("last_n", [1, 2, 70, 198, 199])
def test_the_last_scores_are_those_of_the_whole_prompt(tmp_path: Path, last_n: int) -> None:
    engine = Engine.load(save_tiny(tmp_path, "llama"))
    weights = random_version(engine, "run", ADAPTED_HEAD)
    options: dict[str, Any] = {
        "weights": weights,
        "prompt_tokens": LONG,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 3,
    }
    whole = scores(Sampler(engine), **options)
    found = scores(Sampler(engine), **options, prompt_logprobs_last_n=last_n)
    first = len(LONG) - last_n
    assert found.logprobs == [None] * first + whole.logprobs[first:]
    assert found.topk == [None] * first + whole.topk[first:]


def test_what_is_not_scored_is_not_computed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    head_rows = CachedDecoding._head_rows

    def counted(self: Any, weights: Any, head: Any, hidden: Any, start: int, stop: int) -> Any:
        rows.append(stop - start)
        return head_rows(self, weights, head, hidden, start, stop)

    monkeypatch.setattr(CachedDecoding, "_head_rows", counted)
    monkeypatch.setattr(
        "tinsmith_engine.sampling.decode.decode_step.chunk_rows", lambda vocab_size: 128
    )
    scores(
        Sampler(engine),
        prompt_tokens=LONG,
        max_tokens=0,
        prompt_logprobs=True,
        prompt_logprobs_last_n=5,
    )
    # The last chunk of 128, positions 128 to 198; the row after it has a product of its own.
    assert rows == [71]


def test_scores_change_no_token(tmp_path: Path) -> None:
    engine = Engine.load(save_tiny(tmp_path, "llama"))
    weights = random_version(engine, "run", ADAPTED_HEAD)
    plain, scored = (
        run_all(Sampler(engine), request(weights=weights, num_samples=2, seed=5, **changes))[0]
        for changes in (
            {},
            {
                "prompt_logprobs": True,
                "topk_prompt_logprobs": 4,
                "num_prompt_alternatives": 3,
                "topk_sample_logprobs": 2,
            },
        )
    )
    assert all(same(a, b) for a, b in zip(plain, scored, strict=True))


# Alternatives.


def test_alternatives_follow_the_distribution_at_the_temperature(engine: Engine) -> None:
    count, temperature = 4000, 1.7
    found = scores(
        Sampler(engine),
        max_tokens=0,
        temperature=temperature,
        num_prompt_alternatives=count,
        # These are for the completion.
        top_k=2,
        top_p=0.3,
    ).alternatives
    assert found is not None
    assert found.tokens.shape == found.logprobs.shape == (len(PROMPT) - 1, count)
    for row, position in enumerate(range(1, len(PROMPT))):
        logprobs = np.array(
            [
                forward_logprobs(engine, None, PROMPT[:position], [token])[0]
                for token in range(VOCAB)
            ]
        )
        np.testing.assert_allclose(found.logprobs[row], logprobs[found.tokens[row]], atol=1e-5)
        wanted = np.exp(logprobs.astype(np.float64) / temperature)
        wanted /= wanted.sum()
        counts = np.bincount(found.tokens[row], minlength=VOCAB)
        # As in `test_sampling`: total variation of n draws over s tokens.
        distance = 0.5 * np.abs(counts / count - wanted).sum()
        assert distance < 2 * np.sqrt(VOCAB / (2 * np.pi * count))


def test_alternatives_are_of_the_seed_and_greedy_at_temperature_0(engine: Engine) -> None:
    sampler = Sampler(engine)

    def drawn(**changes: Any) -> list[list[int]]:
        found = scores(sampler, num_prompt_alternatives=4, **changes).alternatives
        assert found is not None
        return [[int(token) for token in row] for row in found.tokens]

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    # The first ones stay when more are asked for.
    more = scores(sampler, num_prompt_alternatives=9, seed=1).alternatives
    assert more is not None
    assert more.tokens[:, :4].tolist() == drawn(seed=1)
    greedy = drawn(temperature=0.0)
    top = scores(sampler, topk_prompt_logprobs=1).topk
    assert greedy == [[row[0][0]] * 4 for row in top[1:] if row is not None]


def test_alternatives_share_no_number_with_samples() -> None:
    drawn = alternative_uniforms(7, range(50), 8)
    assert np.all((drawn >= 0) & (drawn < 1))
    assert len(set(drawn.flat)) == drawn.size
    samples = {uniform(7, sample, token) for sample in range(64) for token in range(64)}
    assert not samples & set(drawn.flat)
    np.testing.assert_array_equal(alternative_uniforms(7, range(20, 50), 3), drawn[20:, :3])


# Likeliest tokens of a completion.


def test_topk_of_sampled_tokens(engine: Engine) -> None:
    weights = random_version(engine, "run", LORA)
    found = run_all(
        Sampler(engine), request(weights=weights, temperature=0.7, topk_sample_logprobs=VOCAB)
    )[0][0]
    assert found.topk is not None
    assert len(found.topk) == len(found.tokens)
    for place, row in enumerate(found.topk):
        values = [value for _, value in row]
        assert sorted(token for token, _ in row) == list(range(VOCAB))
        assert values == sorted(values, reverse=True)
        assert dict(row)[found.tokens[place]] == found.logprobs[place]
        token, value = row[0]
        (wanted,) = forward_logprobs(engine, "run", [*PROMPT, *found.tokens[:place]], [token])
        assert value == pytest.approx(wanted, abs=1e-5)
    few = run_all(
        Sampler(engine), request(weights=weights, temperature=0.7, topk_sample_logprobs=2)
    )
    assert few[0][0].topk == [row[:2] for row in found.topk]
    assert run_all(Sampler(engine), request())[0][0].topk is None


# Neighbours.


def test_neighbours_change_no_bit_of_what_is_told(tmp_path: Path) -> None:
    engine = Engine.load(save_tiny(tmp_path, "llama"), max_resident_runs=8)
    versions = [None, *(random_version(engine, f"run{i}", ADAPTED_HEAD, i) for i in range(3))]
    versions.append(random_version(engine, "full", FullConfig()))
    random = np.random.default_rng(1)
    requests = []
    for index in range(15):
        prompt = random.integers(0, VOCAB, int(random.integers(3, 170))).tolist()
        targets = random.integers(-1, VOCAB, (len(prompt) - 1, 1 + index % 3))
        requests.append(
            request(
                prompt_tokens=prompt,
                weights=versions[index % len(versions)],
                num_samples=1 + index % 3,
                max_tokens=int(random.integers(3, 20)),
                temperature=index % 4 / 2,
                seed=index,
                prompt_logprobs=index % 2 == 0,
                prompt_logprobs_last_n=2 if index % 4 == 0 else None,
                topk_prompt_logprobs=index % 4,
                target_prompt_tokens=targets if index % 3 == 0 else None,
                num_prompt_alternatives=(0, 5, 2)[index % 3],
                topk_sample_logprobs=(0, 3, 7, 20)[index % 4],
            )
        )
    together = run_all(Sampler(engine), *requests, *requests)
    crowded = run_all(Sampler(engine, max_sequences=4), *requests, *requests)
    for index, one in enumerate(requests):
        alone = bits(run_all(Sampler(engine), one)[0])
        for mixed in (together, crowded):
            assert bits(mixed[index]) == alone, index
            assert bits(mixed[index + len(requests)]) == alone, index


# Prompts that are known.


def cached(sequences: list[SampledSequence]) -> set[int]:
    return {sequence.num_cached_prompt_tokens for sequence in sequences}


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
def test_a_known_prompt_is_not_read_again_and_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    engine = Engine.load(save_tiny(tmp_path, family))
    weights = random_version(engine, "run", LORA)
    one = request(weights=weights, prompt_tokens=LONG, num_samples=3, seed=2)
    other = request(weights=weights, prompt_tokens=LONG, num_samples=2, seed=9)
    alone = [bits(run_all(Sampler(engine), each)[0]) for each in (one, other)]
    sampler = Sampler(engine, max_sequences=8)
    # While the first still decodes, and after both have ended.
    first, live = run_all(sampler, one, other)
    later = [run_all(sampler, each)[0] for each in (other, one)]
    assert [bits(found) for found in (first, live, *later)] == [*alone, alone[1], alone[0]]
    assert cached(first) == {0}
    assert cached(live) == cached(later[0]) == cached(later[1]) == {len(LONG)}


def test_a_prompt_is_known_to_its_version_and_scope_alone(engine: Engine) -> None:
    sampler = Sampler(engine)
    old = random_version(engine, "run", LORA, seed=1)
    assert cached(run_all(sampler, request(weights=old, cache_scope="a"))[0]) == {0}
    assert cached(run_all(sampler, request(weights=old, cache_scope="a"))[0]) == {len(PROMPT)}
    assert cached(run_all(sampler, request(weights=old, cache_scope="b"))[0]) == {0}
    assert cached(run_all(sampler, request(cache_scope="a"))[0]) == {0}
    # The same run and version number with other weights.
    new = random_version(engine, "run", LORA, seed=2)
    assert (new.run, new.version) == (old.run, old.version)
    found = run_all(sampler, request(weights=new, cache_scope="a"))[0]
    assert cached(found) == {0}
    assert bits(found) == bits(run_all(Sampler(engine), request(weights=new))[0])
    # A prefix is not a prompt.
    longer = request(weights=new, prompt_tokens=[*PROMPT, 4], cache_scope="a")
    assert cached(run_all(sampler, longer)[0]) == {0}


def test_prompts_that_are_known_never_change_what_is_sampled(engine: Engine) -> None:
    random = np.random.default_rng(4)
    versions = [None, random_version(engine, "run", LORA)]
    prompts = [random.integers(0, VOCAB, int(random.integers(1, 100))).tolist() for _ in range(6)]
    requests = [
        request(
            prompt_tokens=prompts[int(random.integers(6))],
            weights=versions[int(random.integers(2))],
            num_samples=int(random.integers(1, 4)),
            max_tokens=int(random.integers(1, 30)),
            prompt_logprobs=bool(random.random() < 0.2),
            seed=index,
        )
        for index in range(40)
    ]
    # Few slots: prompts are overwritten, live ones copied, some forgotten.
    sampler = Sampler(engine, max_sequences=4)
    num_cached = 0
    for start in range(0, 40, 5):
        for one, found in zip(
            requests[start : start + 5], run_all(sampler, *requests[start : start + 5]), strict=True
        ):
            num_cached += found[0].num_cached_prompt_tokens > 0
            assert bits(found) == bits(run_all(Sampler(engine), one)[0])
    assert num_cached >= 5


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_known_prompt_keeps_one_row_of_logits(tmp_path: Path, family: str) -> None:
    """Not the rows that it was computed with: all of the prompt's, on a fallback."""
    engine = Engine.load(save_tiny(tmp_path, family))
    sampler = Sampler(engine)
    run_all(sampler, request(prompt_tokens=LONG, max_tokens=2))
    known = sampler._cache.prompts.find(PromptKey("", None, LONG))
    assert known is not None
    assert known.last_logits.untyped_storage().nbytes() == engine.info.vocab_size * 4


def test_prompts_with_scores_are_read(engine: Engine) -> None:
    sampler = Sampler(engine)
    run_all(sampler, request())
    found = run_all(sampler, request(prompt_logprobs=True))[0]
    assert cached(found) == {0}
    assert bits(found) == bits(run_all(Sampler(engine), request(prompt_logprobs=True))[0])
    # It is read once for all groups of its samples.
    many = request(prompt_tokens=PROMPT[:4], prompt_logprobs=True, num_samples=7)
    few_rows = run_all(Sampler(engine, max_sequences=3), many)[0]
    assert bits(few_rows) == bits(run_all(Sampler(engine), many)[0])


def test_a_failed_prompt_gives_its_slots_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler(engine, max_sequences=2)
    wanted = bits(run_all(sampler, request(num_samples=2))[0])

    def broken(*_: Any, **__: Any) -> Any:
        raise MemoryError

    request_id = sampler.add(request(prompt_tokens=LONG, num_samples=2))
    with monkeypatch.context() as patched:
        patched.setattr(CachedDecoding, "prefill", broken)
        with pytest.raises(MemoryError):
            sampler.step()
    sampler.cancel(request_id)
    assert bits(run_all(sampler, request(num_samples=2))[0]) == wanted


# Bad requests.


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"prompt_tokens": []}, EmptyBatchError, "prompt_tokens"),
        ({"temperature": float("nan")}, NotFiniteInputError, "temperature"),
        ({"temperature": float("inf")}, NotFiniteInputError, "temperature"),
        ({"temperature": -0.5}, InvalidFieldError, "temperature"),
        ({"top_p": float("nan")}, NotFiniteInputError, "top_p"),
        ({"top_p": 0.0}, InvalidFieldError, "top_p"),
        ({"top_p": 1.5}, InvalidFieldError, "top_p"),
        ({"num_samples": 0}, InvalidFieldError, "num_samples"),
        ({"stop_strings": ["a", ""], "decode_text": str}, InvalidFieldError, "empty"),
        ({"topk_prompt_logprobs": -1}, InvalidFieldError, "topk_prompt_logprobs"),
        ({"topk_sample_logprobs": -1}, InvalidFieldError, "topk_sample_logprobs"),
        ({"topk_sample_logprobs": VOCAB + 1}, InvalidFieldError, "topk_sample_logprobs"),
        ({"num_prompt_alternatives": -1}, InvalidFieldError, "num_prompt_alternatives"),
        ({"prompt_logprobs_last_n": 1}, InvalidFieldError, "prompt_logprobs_last_n"),
        (
            {"prompt_logprobs": True, "prompt_logprobs_last_n": 0},
            InvalidFieldError,
            "prompt_logprobs_last_n",
        ),
        (
            {"prompt_logprobs": True, "prompt_logprobs_last_n": len(PROMPT)},
            InvalidFieldError,
            "prompt_logprobs_last_n",
        ),
        (
            {"target_prompt_tokens": np.zeros((len(PROMPT), 1), np.int64)},
            ShapeMismatchError,
            "target_prompt_tokens",
        ),
        ({"target_prompt_tokens": np.zeros(3, np.int64)}, ShapeMismatchError, "target_prompt"),
        (
            {"target_prompt_tokens": np.full((len(PROMPT) - 1, 1), VOCAB)},
            TokenOutOfVocabularyError,
            "target_prompt_tokens",
        ),
        (
            {"target_prompt_tokens": np.full((len(PROMPT) - 1, 1), -2)},
            TokenOutOfVocabularyError,
            "target_prompt_tokens",
        ),
    ],
)
def test_bad_extras_are_refused(
    unchanged_engine: Engine, changes: dict[str, Any], error: type[Exception], field: str
) -> None:
    sampler = Sampler(unchanged_engine)
    with pytest.raises(error, match=field):
        sampler.add(request(**changes))
    assert not sampler.has_work
