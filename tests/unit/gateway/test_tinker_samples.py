"""Requests for samples and their results between the Tinker wire and the contract."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from tests.fakes.pictures import picture

from tinsmith.tensors import decode_tensor, encode_tensor, encode_tokens
from tinsmith.v1 import sampler_pb2, trajectories_pb2
from tinsmith_gateway.tinker import wire_pb2
from tinsmith_gateway.tinker.wire import bodies, sample_codec, tensor_codec
from tinsmith_runtime.errors import InvalidFieldError, ShapeMismatchError

Sequence = trajectories_pb2.SampledSequence


def asked(**fields: Any) -> sampler_pb2.SampleRequest:
    """Return the native request of a body."""
    params = {"max_tokens": 2, **fields.pop("sampling_params", {})}
    body = {
        "sampling_session_id": "s",
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_params": params,
        **fields,
    }
    return sample_codec.decode_sample(bodies.Sample.model_validate(body), "session")


def test_what_is_asked_for_is_passed_on() -> None:
    request = asked(
        num_samples=3,
        prompt_logprobs=True,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=5,
        prompt_alt_tokens_k=6,
        prompt_logprobs_last_n=7,
        sampling_params={"temperature": 0.5, "top_p": 0.25, "top_k": 8, "seed": -1},
    )
    assert request.sampling_session == "session"
    assert decode_tensor(request.prompt.chunks[0].tokens).tolist() == [5, 6]
    assert (request.num_samples, request.prompt_logprobs) == (3, True)
    assert (request.topk_prompt_logprobs, request.topk_sample_logprobs) == (4, 5)
    assert (request.num_prompt_alternatives, request.prompt_logprobs_last_n) == (6, 7)
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (2, 0.5, 0.25, 8)
    assert params.seed == 2**64 - 1


def test_what_is_not_asked_for_is_left_out() -> None:
    request = asked()
    assert (request.num_samples, request.prompt_logprobs) == (1, False)
    assert not request.HasField("prompt_logprobs_last_n")
    assert not request.HasField("target_prompt_tokens")
    assert not request.params.HasField("seed")
    assert not request.params.HasField("stop_tokens")
    assert (request.params.temperature, request.params.top_p, request.params.top_k) == (1, 1, -1)


@pytest.mark.parametrize(
    ("stop", "strings", "tokens"),
    [
        pytest.param("end", ["end"], None, id="one-text"),
        pytest.param(["a", "b"], ["a", "b"], None, id="texts"),
        pytest.param([0, 2**31 - 1], [], [0, 2**31 - 1], id="tokens"),
        pytest.param([], [], [], id="nothing-ends-it"),
        pytest.param(None, [], None, id="the-model-decides"),
    ],
)
def test_a_stop_is_of_texts_or_of_tokens(
    stop: Any, strings: list[str], tokens: list[int] | None
) -> None:
    params = asked(sampling_params={"stop": stop}).params
    assert list(params.stop_strings) == strings
    assert params.HasField("stop_tokens") is (tokens is not None)
    assert list(params.stop_tokens.token_ids) == (tokens or [])
    assert not params.stop_tokens.includes_those_of_model


@pytest.mark.parametrize("stop", [[-1], [2**31]])
def test_a_stop_of_no_token_is_refused(stop: list[int]) -> None:
    with pytest.raises(InvalidFieldError) as refusal:
        asked(sampling_params={"stop": stop})
    assert refusal.value.metadata["field"] == "sampling_params.stop"


def test_pictures_are_passed_on_and_what_is_none_is_refused() -> None:
    data = picture(8, 8).data
    chunk = {"type": "image", "format": "png", "data": base64.b64encode(data).decode()}
    text = {"tokens": [1]}
    request = asked(prompt={"chunks": [text, {**chunk, "expected_tokens": 4}]})
    assert request.prompt.chunks[1].image.data == data
    for wrong, field in (
        ({**chunk, "data": "%"}, "prompt.chunks[1].data"),
        ({"type": "dmel"}, "prompt.chunks[1]"),
    ):
        with pytest.raises(InvalidFieldError) as refusal:
            asked(prompt={"chunks": [text, wrong]})
        assert refusal.value.metadata["field"] == field


def test_tokens_to_score_are_passed_on() -> None:
    tensor = {"data": [1, 2, 3, 4], "dtype": "int64", "shape": [2, 2]}
    request = asked(target_prompt_logprobs=tensor)
    assert decode_tensor(request.target_prompt_tokens).tolist() == [[1, 2], [3, 4]]
    # A number that is whole is one, however it is written.
    request = asked(target_prompt_logprobs={**tensor, "data": [1.0, 2.0, 3.0, -1.0]})
    assert decode_tensor(request.target_prompt_tokens).tolist() == [[1, 2], [3, -1]]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"dtype": "float32"}, id="of-floats"),
        pytest.param({"shape": None}, id="no-shape"),
        pytest.param({"data": [1.0, 2.0, 3.0, 0.5]}, id="half-a-token"),
        pytest.param({"data": [1, 2, 3, 2**63]}, id="too-large"),
        pytest.param({"shape": [3, 2]}, id="another-shape"),
    ],
)
def test_tokens_to_score_that_are_none_are_refused(change: dict[str, Any]) -> None:
    tensor = {"data": [1, 2, 3, 4], "dtype": "int64", "shape": [2, 2]}
    with pytest.raises(ShapeMismatchError) as refusal:
        asked(target_prompt_logprobs={**tensor, **change})
    assert refusal.value.metadata["field"] == "target_prompt_logprobs"


def floats(data: bytes) -> list[float]:
    found: list[float] = np.frombuffer(data, "<f4").tolist()
    return found


def numbers(data: bytes) -> list[int]:
    found: list[int] = np.frombuffer(data, "<i4").tolist()
    return found


def test_a_result_is_told_with_all_that_was_asked_for() -> None:
    topk = trajectories_pb2.TopkLogprobs(
        token_ids=encode_tensor(np.array([[1, 2], [0, -1], [-1, -1]])),
        logprobs=encode_tensor(np.array([[-0.5, -1], [-0.25, 0], [0, 0]], np.float32)),
    )
    native = sampler_pb2.SampleResponse(
        num_cached_prompt_tokens=9,
        prompt_logprobs=encode_tensor(np.array([-1.5, -2], np.float32)),
        topk_prompt_logprobs=topk,
    )
    for reason in (Sequence.STOP_REASON_STOP, Sequence.STOP_REASON_LENGTH):
        native.sequences.add(
            tokens=encode_tokens([7, 8]),
            logprobs=encode_tensor(np.array([-1, -0.5], np.float32)),
            stop_reason=reason,
        )
    native.sequences[1].topk_logprobs.CopyFrom(topk)
    native.prompt_alternatives.tokens.CopyFrom(encode_tensor(np.array([[4]])))
    native.prompt_alternatives.logprobs.CopyFrom(encode_tensor(np.array([[-3.5]], np.float32)))
    told = sample_codec.encode_sampled(native, None)
    assert told.prompt_cache_hit_tokens == 9
    assert floats(told.prompt_logprobs) == [-1.5, -2]
    stopped, cut = told.sequences
    assert (numbers(stopped.tokens), floats(stopped.logprobs)) == ([7, 8], [-1, -0.5])
    assert stopped.stop_reason == wire_pb2.STOP_REASON_STOP
    assert cut.stop_reason == wire_pb2.STOP_REASON_LENGTH
    assert not stopped.HasField("topk_sampled_logprobs")
    # Places that list nothing have what the SDK leaves out.
    for listed in (told.topk_prompt_logprobs, cut.topk_sampled_logprobs):
        assert (listed.length, listed.k) == (3, 2)
        assert numbers(listed.token_ids) == [1, 2, 0, 0, 0, 0]
        assert floats(listed.logprobs) == [-0.5, -1, -0.25, -99999, -99999, -99999]
    drawn = told.prompt_alt_tokens
    assert tensor_codec.decode_tensor(drawn.tokens, "x").tolist() == [[4]]
    assert tensor_codec.decode_tensor(drawn.logprobs, "x").tolist() == [[-3.5]]
    nothing = sample_codec.encode_sampled(sampler_pb2.SampleResponse(), None)
    assert nothing == wire_pb2.SampleResponse(prompt_cache_hit_tokens=0)


@pytest.mark.parametrize("is_listed", [False, True])
def test_scores_of_targets_have_the_layout_of_the_targets(is_listed: bool) -> None:
    listed = {"sparse_crow_indices": [0, 1, 1], "sparse_col_indices": [1]} if is_listed else {}
    data = [3] if is_listed else [1, 3, 1, 1]
    targets = bodies.TensorData(data=data, dtype="int64", shape=[2, 2], **listed)
    scores = encode_tensor(np.array([[0, -0.5], [0, 0]], np.float32))
    native = sampler_pb2.SampleResponse(target_prompt_logprobs=scores)
    told = sample_codec.encode_sampled(native, targets).target_prompt_logprobs
    assert told.HasField("sparse_csr") is is_listed
    assert tensor_codec.decode_tensor(told, "x").tolist() == [[0, -0.5], [0, 0]]
    assert not sample_codec.encode_sampled(native, None).HasField("target_prompt_logprobs")
