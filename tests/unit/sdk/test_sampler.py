"""What a sampler of the SDK asks for, and streams that go on where they broke off."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
from google.rpc import code_pb2
from tests.fakes.sdk_fake_server import FakeServer, make_status, unavailable
from tests.support.wait import until

import tinsmith
from tinsmith.v1 import sampler_pb2

PARAMS = tinsmith.SamplingParams(max_tokens=4, seed=11)
DONE = [0, 1, 2, 3]


@pytest.fixture
def sampler(client: tinsmith.Client) -> tinsmith.Sampler:
    return client.create_sampler(base_model="tiny")


def test_what_is_asked_for_is_sent_and_returned(
    server: FakeServer, sampler: tinsmith.Sampler
) -> None:
    result = sampler.sample(
        [1, 2, 3],
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=2,
        target_prompt_logprobs=[[5, -1], [6, 7]],
        prompt_alt_tokens_k=3,
        topk_sample_logprobs=2,
        weight_updates="in_flight",
    ).result(timeout=10)
    request = server.state.last["Sample"]
    assert (request.prompt_logprobs_last_n, request.topk_sample_logprobs) == (2, 2)
    assert request.weight_updates == sampler_pb2.WEIGHT_UPDATES_IN_FLIGHT
    assert result.target_prompt_logprobs is not None
    assert result.target_prompt_logprobs.tolist() == [[-1, 0], [-1, -1]]
    assert result.prompt_alt_tokens is not None
    assert result.prompt_alt_tokens.tokens.tolist() == [[7] * 3] * 2
    assert result.prompt_alt_tokens.logprobs.dtype == np.float32
    assert result.prompt_logprobs is None
    sampler.sample([1]).result(timeout=10)
    plain = server.state.last["Sample"]
    assert plain.weight_updates == sampler_pb2.WEIGHT_UPDATES_PINNED
    assert not plain.HasField("prompt_logprobs_last_n")
    assert not plain.HasField("target_prompt_tokens")


def test_a_stream_in_plain_code(sampler: tinsmith.Sampler) -> None:
    stream = sampler.stream([1, 2], sampling_params=PARAMS, num_samples=2, topk_sample_logprobs=1)
    assert stream.result is None
    pieces = list(stream)
    assert [(piece.sample_index, piece.token_index) for piece in pieces] == [
        (index, token) for token in range(4) for index in range(2)
    ]
    assert [piece.stop_reason for piece in pieces[-3:]] == ["", "length", "length"]
    assert stream.result is not None
    assert stream.result.seed == 11
    assert stream.result.version == 4
    for sequence in stream.result.sequences:
        assert (sequence.tokens, sequence.stop_reason) == (DONE, "length")
        assert sequence.versions == [4] * 4
        assert sequence.topk_logprobs == [[(token, -0.5)] for token in DONE]
    assert list(stream) == []


def test_a_stream_in_an_event_loop(sampler: tinsmith.Sampler) -> None:
    async def read() -> list[int]:
        async with sampler.stream([1, 2], sampling_params=PARAMS) as stream:
            return [token async for piece in stream for token in piece.tokens]

    assert asyncio.run(read()) == DONE


def test_a_stream_that_broke_off_goes_on_where_it_was(
    server: FakeServer, sampler: tinsmith.Sampler
) -> None:
    server.update(cut_streams=3)
    stream = sampler.stream([1, 2], sampling_params=PARAMS, num_samples=2)
    tokens: list[list[int]] = [[], []]
    for piece in stream:
        assert piece.token_index == len(tokens[piece.sample_index])
        tokens[piece.sample_index] += piece.tokens
    assert tokens == [DONE, DONE]
    requests = [request for kind, request in server.state.requests if kind == "stream"]
    assert [list(request.received_tokens) for request in requests] == [
        [0, 0],
        [1, 0],
        [1, 1],
        [2, 1],
    ]
    assert {request.request.params.seed for request in requests} == {11}


def test_a_stream_keeps_the_seed_that_it_drew(
    server: FakeServer, sampler: tinsmith.Sampler
) -> None:
    server.state.fail_calls["StreamSample"] = [unavailable()]
    server.update(cut_streams=1)
    stream = sampler.stream([1], sampling_params=tinsmith.SamplingParams(max_tokens=2))
    assert [token for piece in stream for token in piece.tokens] == [0, 1]
    requests = [request for kind, request in server.state.requests if kind == "stream"]
    (seed,) = {request.request.params.seed for request in requests}
    assert stream.result is not None
    assert stream.result.seed == seed != 0


def test_a_refused_stream_raises(server: FakeServer, sampler: tinsmith.Sampler) -> None:
    status = make_status(code_pb2.INVALID_ARGUMENT, "INVALID_FIELD", "no")
    server.state.fail_calls["StreamSample"] = [status]
    with pytest.raises(tinsmith.InvalidArgumentError):
        next(sampler.stream([1], sampling_params=PARAMS))


@pytest.mark.parametrize("how", ["with", "close", "forget"])
def test_a_stream_that_is_left_is_cancelled(
    server: FakeServer, sampler: tinsmith.Sampler, how: str
) -> None:
    server.update(hold_streams=True)
    if how == "with":
        with sampler.stream([1], sampling_params=PARAMS) as stream:
            assert next(stream).tokens == [0]
    else:
        stream = sampler.stream([1], sampling_params=PARAMS)
        assert next(stream).tokens == [0]
        if how == "close":
            stream.close()
            stream.close()
    if how == "forget":
        del stream
        gc.collect()
    else:
        assert list(stream) == []
    until(lambda: server.state.cancelled_streams >= 1)


def test_a_read_that_was_given_up_loses_nothing(
    server: FakeServer, sampler: tinsmith.Sampler
) -> None:
    server.update(hold_streams=True)

    async def read() -> list[int]:
        stream = sampler.stream([1], sampling_params=PARAMS)
        first = await anext(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        await asyncio.to_thread(until, lambda: server.state.cancelled_streams >= 1)
        server.update(hold_streams=False)
        return first.tokens + [token async for piece in stream for token in piece.tokens]

    assert asyncio.run(read()) == DONE


@pytest.mark.parametrize("prompt", ["hello", ""])
def test_a_prompt_that_is_text_is_refused_with_what_to_do(
    client: tinsmith.Client, prompt: Any
) -> None:
    sampler = client.create_sampler(base_model="tiny")
    for send in (sampler.sample, sampler.stream, sampler.compute_logprobs):
        with pytest.raises(tinsmith.InvalidArgumentError, match=r"prompt is text.*get_tokenizer"):
            send(prompt)
