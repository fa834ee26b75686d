"""Penalties and biases, from OpenAI's clients and the native contract to the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest
from tests.fakes.openai_harness import BASE_MODEL, EXACT, OpenAiRig, scripted

import tinsmith

PROMPT = [5, 6, 7, 8]


def complete(client: openai.OpenAI, **options: Any) -> Any:
    extra = {**EXACT, "ignore_eos": True, **options.pop("extra_body", {})}
    return client.completions.create(
        model=BASE_MODEL,
        prompt=PROMPT,
        max_tokens=24,
        seed=3,
        logprobs=0,
        extra_body=extra,
        **options,
    ).choices[0]


def test_penalties_reach_the_sampler(client: openai.OpenAI, rig: OpenAiRig) -> None:
    given = {"frequency_penalty": 0.5, "presence_penalty": -1.5, "logit_bias": {"5": 1.5}}
    extra = {"min_p": 0.25, "repetition_penalty": 1.25}
    scripted(client, **given, extra_body=extra)
    params = rig.sampler.requests[-1].params
    assert (params.frequency_penalty, params.presence_penalty) == (0.5, -1.5)
    assert (params.min_p, params.repetition_penalty) == (0.25, 1.25)
    assert dict(params.logit_bias) == {5: 1.5}


def test_a_bias_forces_and_forbids_tokens(client: openai.OpenAI) -> None:
    forced = complete(client, logit_bias={"9": 100}, temperature=0)
    assert forced.token_ids == [9] * 24
    free = complete(client, temperature=0)
    likeliest = free.token_ids[0]
    forbidden = complete(client, logit_bias={str(likeliest): -100}, temperature=0)
    assert likeliest not in forbidden.token_ids


def test_penalties_keep_tokens_from_coming_again(client: openai.OpenAI) -> None:
    bias = {str(token): 90.0 for token in range(40, 60)}
    free = complete(client, logit_bias=bias, temperature=0)
    assert len(set(free.token_ids)) < 20
    held = complete(client, logit_bias=bias, temperature=0, presence_penalty=2)
    more = complete(client, logit_bias=bias, temperature=0, frequency_penalty=2)
    strong = complete(
        client, logit_bias=bias, temperature=0, extra_body={"repetition_penalty": 100}
    )
    assert len(set(held.token_ids)) > len(set(free.token_ids))
    assert len(set(more.token_ids)) > len(set(free.token_ids))
    assert strong.token_ids != free.token_ids


def test_a_small_min_p_is_greedy_at_its_end(client: openai.OpenAI) -> None:
    likeliest = complete(client, temperature=0).token_ids
    assert complete(client, temperature=2, extra_body={"min_p": 1}).token_ids == likeliest


def test_a_bias_of_a_token_that_is_not_there_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="vocabulary") as refused:
        complete(client, logit_bias={"1000000": 1})
    assert refused.value.param == "logit_bias"


def test_log_probabilities_are_those_of_the_model(rig: OpenAiRig) -> None:
    params = tinsmith.SamplingParams(
        max_tokens=16,
        temperature=1.3,
        seed=11,
        stop=[],
        frequency_penalty=1.5,
        repetition_penalty=1.4,
        logit_bias={9: 4.0, 11: 4.0},
        min_p=0.01,
    )
    with tinsmith.Client(rig.pods.address, api_key=rig.key) as native:
        sampler = native.create_sampler(base_model=BASE_MODEL)
        first = sampler.sample(PROMPT, num_samples=2, sampling_params=params).result()
        again = sampler.sample(PROMPT, num_samples=2, sampling_params=params).result()
        for one, two in zip(first.sequences, again.sequences, strict=True):
            assert list(one.tokens) == list(two.tokens)
            scores = sampler.compute_logprobs([*PROMPT, *one.tokens]).result()
            np.testing.assert_allclose(scores[len(PROMPT) :], one.logprobs, rtol=1e-4, atol=1e-4)
