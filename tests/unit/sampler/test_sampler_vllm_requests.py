"""A request over vLLM: where its completions end, what they cost, and what of them is told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tinsmith_engine import SampledSequence, SampleRequest
from tinsmith_sampler.engines.engine_protocol import Ticket
from tinsmith_sampler.vllm.messages import Update
from tinsmith_sampler.vllm.vllm_requests import VllmRequest


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def request_of(limit: int = 9, **fields: Any) -> VllmRequest:
    given = {"prompt_tokens": [1, 2, 3], "max_tokens": limit, "decode_text": letters, **fields}
    return VllmRequest(Ticket(SampleRequest(**given), None), 4, limit, None, "salt")


def update(tokens: Sequence[int], number: int = 1, **fields: Any) -> Update:
    values: dict[str, Any] = {
        "logprobs": [-0.5] * len(tokens),
        "likeliest": [[(token, -0.5), (9, -1.0), (8, -2.0)] for token in tokens],
        "finish_reason": None,
        "num_cached_tokens": 0,
        **fields,
    }
    return Update(sample=number, tokens=list(tokens), **values)


def end_of(request: VllmRequest, tokens: Sequence[int], **fields: Any) -> SampledSequence | None:
    """Return the first completion once these tokens came, one in a step; None if it goes on."""
    request.first(itertools.count(1))
    for token in tokens:
        request.take(update([token], **fields))
    finished = request.ticket.finished
    return finished[0] if finished else None


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        pytest.param({"limit": 3}, [0, 1, 2, 3], "length", id="its-limit"),
        pytest.param({"stop_tokens": [1]}, [0, 1, 2], "stop", id="a-token"),
        pytest.param({"stop_strings": ["bc"]}, [0, 1, 2, 3], "stop", id="a-text"),
        pytest.param(
            {"stop_strings": ["b"], "min_tokens": 2}, [0, 1, 2, 1, 3], "stop", id="a-later-text"
        ),
        pytest.param(
            {"stop_strings": ["bc"], "min_tokens": 2},
            [0, 1, 2, 1, 2, 3],
            "stop",
            id="no-text-that-began-before",
        ),
        pytest.param({"limit": 2, "stop_tokens": [1]}, [0, 1], "stop", id="a-token-at-the-limit"),
    ],
)
def test_a_completion_ends_where_it_has_to(
    fields: dict[str, Any], tokens: list[int], reason: str
) -> None:
    ended = end_of(request_of(**fields), tokens)
    assert ended is not None
    whole = tokens[:-1] if reason == "length" or len(tokens) > 2 else tokens
    assert (ended.tokens, ended.finish_reason) == (whole, reason)
    assert ended.versions == [4] * len(whole)


def test_a_completion_goes_on_until_it_ends() -> None:
    request = request_of(stop_strings=["z"], min_tokens=3)
    assert end_of(request, [0, 1, 2]) is None
    assert (request.is_finished, request.unfinished, request.num_sampled_tokens) == (False, [1], 3)


def test_what_ends_here_is_ended_in_vllm_too_unless_it_has() -> None:
    for finish_reason, told in ((None, 1), ("length", None)):
        request = request_of(limit=2)
        request.first(itertools.count(1))
        assert request.take(update([0])) is None
        assert request.take(update([1, 2], finish_reason=finish_reason)) == told
        assert (request.is_finished, request.unfinished) == (True, [])
        # What comes late changes nothing.
        assert request.take(update([5])) is None
        assert request.ticket.finished[0].tokens == [0, 1]


@pytest.mark.parametrize(
    ("finish_reason", "reason"), [("length", "length"), ("stop", "error"), ("abort", "error")]
)
def test_an_end_that_vllm_alone_knows_of_is_an_error_but_for_its_limit(
    finish_reason: str, reason: str
) -> None:
    request = request_of()
    request.first(itertools.count(1))
    request.take(update([0], finish_reason=finish_reason))
    (ended,) = request.ticket.finished
    assert (ended.tokens, ended.finish_reason) == ([0], reason)


def test_a_token_without_a_finite_score_is_an_error_and_is_not_told() -> None:
    request = request_of()
    request.first(itertools.count(1))
    assert request.take(update([0, 1], logprobs=[-0.5, float("nan")])) == 1
    (ended,) = request.ticket.finished
    assert (ended.tokens, ended.finish_reason) == ([0], "error")


def test_likeliest_tokens_are_told_if_they_are_asked_for() -> None:
    ended = end_of(request_of(limit=2, topk_sample_logprobs=2), [0, 1])
    assert ended is not None
    assert ended.topk == [[(0, -0.5), (9, -1.0)], [(1, -0.5), (9, -1.0)]]
    np.testing.assert_array_equal(ended.logprobs, np.float32([-0.5, -0.5]))
    plain = end_of(request_of(limit=1), [0])
    assert plain is not None
    assert (plain.topk, plain.prompt) == (None, None)


SCORES: Any = {
    "prompt_logprobs": [None, -1.0, -2.0],
    "prompt_likeliest": [None, [(5, -0.25), (2, -1.0)], [(3, -2.0), (4, -3.0)]],
    "num_cached_tokens": 2,
}


@pytest.mark.parametrize(
    ("fields", "logprobs", "topk"),
    [
        ({"prompt_logprobs": True}, [None, -1.0, -2.0], []),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1}, [None, None, -2.0], []),
        ({"topk_prompt_logprobs": 1}, [], [None, [(5, -0.25)], [(3, -2.0)]]),
        (
            {
                "prompt_logprobs": True,
                "topk_prompt_logprobs": 2,
                "prompt_logprobs_last_n": 1,
            },
            [None, None, -2.0],
            [None, None, [(3, -2.0), (4, -3.0)]],
        ),
    ],
)
def test_a_prompt_is_scored_as_far_as_it_is_asked_for(
    fields: dict[str, Any], logprobs: list[float | None], topk: list[Any]
) -> None:
    ended = end_of(request_of(limit=1, **fields), [0], **SCORES)
    assert ended is not None
    assert ended.prompt is not None
    assert (ended.prompt.logprobs, ended.prompt.topk) == (logprobs, topk)
    assert ended.num_cached_prompt_tokens == 2


def test_a_request_for_scores_alone_gets_no_token() -> None:
    request = request_of(limit=0, prompt_logprobs=True)
    command = request.first(itertools.count(1))
    # vLLM makes a token at least.
    assert (command.max_tokens, command.min_tokens) == (1, 0)
    assert request.take(update([0], **SCORES)) == 1
    (ended,) = request.ticket.finished
    assert (ended.tokens, ended.finish_reason) == ([], "length")
    assert ended.prompt is not None


def test_a_command_says_what_was_asked_for() -> None:
    request = request_of(
        limit=5,
        min_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        stop_tokens=[6],
        topk_sample_logprobs=2,
        topk_prompt_logprobs=1,
        num_samples=3,
        seed=11,
    )
    numbers = itertools.count(1)
    first = request.first(numbers)
    assert (first.prompt, first.max_tokens, first.min_tokens) == ([1, 2, 3], 5, 5)
    assert (first.temperature, first.top_k, first.top_p) == (0.5, 3, 0.25)
    assert (first.stop_tokens, first.num_likeliest, first.cache_salt) == ([6], 2, "salt")
    # The others find the prompt read, and do not score it again.
    assert request.others(numbers) == []
    request.take(update([0], **SCORES))
    others = request.others(numbers)
    assert [each.sample for each in others] == [2, 3]
    assert (first.num_prompt_likeliest, {each.num_prompt_likeliest for each in others}) == (
        1,
        {None},
    )
    assert len({each.seed for each in (first, *others)}) == 3
    assert request.others(numbers) == []
    assert (request.num_cached_tokens, request.numbers) == (2, {1: 0, 2: 1, 3: 2})
    again = request_of(limit=5, num_samples=3, seed=11).first(itertools.count(1))
    assert again.seed == first.seed
