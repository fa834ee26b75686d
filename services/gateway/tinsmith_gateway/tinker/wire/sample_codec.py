"""Requests for samples and their results: the Tinker wire to the native contract and back."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.tensors import decode_tensor, encode_tensor, encode_tokens
from tinsmith.v1 import sampler_pb2, trajectories_pb2
from tinsmith_gateway.tinker import wire_pb2
from tinsmith_gateway.tinker.wire import bodies, tensor_codec
from tinsmith_gateway.tinker.wire.training_codec import image_chunk
from tinsmith_runtime.errors import InvalidFieldError, ShapeMismatchError
from tinsmith_runtime.text.stop_strings import check_stop_strings

_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
_STOP_REASONS = {
    trajectories_pb2.SampledSequence.STOP_REASON_STOP: wire_pb2.STOP_REASON_STOP,
    trajectories_pb2.SampledSequence.STOP_REASON_LENGTH: wire_pb2.STOP_REASON_LENGTH,
}
_UNLISTED = -1


def decode_sample(body: bodies.Sample, sampling_session: str) -> sampler_pb2.SampleRequest:
    """Return the native request.

    Raises:
        InvalidFieldError: If a field cannot be put into native words.
    """
    request = sampler_pb2.SampleRequest(
        sampling_session=sampling_session,
        prompt=trajectories_pb2.ModelInput(
            chunks=[
                _decode_chunk(chunk, f"prompt.chunks[{index}]")
                for index, chunk in enumerate(body.prompt.chunks)
            ]
        ),
        num_samples=body.num_samples,
        params=_decode_params(body.sampling_params),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        num_prompt_alternatives=body.prompt_alt_tokens_k,
    )
    if body.prompt_logprobs_last_n is not None:
        request.prompt_logprobs_last_n = body.prompt_logprobs_last_n
    if body.target_prompt_logprobs is not None:
        targets = decode_targets(body.target_prompt_logprobs)
        request.target_prompt_tokens.CopyFrom(encode_tensor(targets))
    return request


def _decode_params(params: bodies.SamplingParams) -> trajectories_pb2.SamplingParams:
    message = trajectories_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        # Any integer is a seed; natively it has 64 bits and no sign.
        seed=None if params.seed is None else params.seed % 2**64,
    )
    stop = params.stop
    if isinstance(stop, str):
        message.stop_strings.append(stop)
    elif stop is not None and stop and all(isinstance(one, str) for one in stop):
        message.stop_strings.extend(str(one) for one in stop)
    elif stop is not None:
        # An empty list stops at nothing, the end-of-turn tokens included.
        if any(isinstance(one, str) or not 0 <= one < 2**31 for one in stop):
            raise InvalidFieldError("sampling_params.stop", "must hold token ids, or strings alone")
        message.stop_tokens.token_ids.extend(int(one) for one in stop)
    check_stop_strings(message.stop_strings, "sampling_params.stop")
    return message


def _decode_chunk(chunk: Any, field: str) -> trajectories_pb2.Chunk:
    match chunk:
        case bodies.TextChunk():
            return trajectories_pb2.Chunk(tokens=encode_tokens(chunk.tokens))
        case bodies.ImageChunk():
            try:
                data = base64.b64decode(chunk.data, validate=True)
            except (binascii.Error, ValueError) as error:
                raise InvalidFieldError(f"{field}.data", "is not base64") from error
            return image_chunk(data, chunk.format, chunk.expected_tokens, field)
    raise InvalidFieldError(
        field, f"is of type {chunk.type!r}; text and images given by their bytes are taken"
    )


def decode_targets(tensor: bodies.TensorData) -> NDArray[np.int64]:
    """Return the tokens to score, int64 [T - 1, K]; -1 for none.

    Raises:
        ShapeMismatchError: If the tensor is no such thing.
    """
    field = "target_prompt_logprobs"
    if tensor.dtype != "int64" or tensor.shape is None:
        raise ShapeMismatchError(field, "must be an int64 tensor with a shape")
    if any(isinstance(value, float) and not value.is_integer() for value in tensor.data):
        raise ShapeMismatchError(field, "holds what is no token id")
    try:
        values = np.asarray([int(value) for value in tensor.data], dtype=np.int64)
    except OverflowError as error:
        raise ShapeMismatchError(field, "holds what is no token id") from error
    if tensor.sparse_crow_indices is None:
        return tensor_codec.shaped(values, tuple(tensor.shape), field).astype(np.int64)
    # Shifted, because what is not listed is to be -1 and not 0.
    dense = tensor_codec.from_csr(
        values - _UNLISTED,
        np.asarray(tensor.sparse_crow_indices, dtype=np.int64),
        np.asarray(tensor.sparse_col_indices or [], dtype=np.int64),
        tuple(tensor.shape),
        field,
    )
    return dense.astype(np.int64) + _UNLISTED


def encode_sampled(
    response: sampler_pb2.SampleResponse, targets: bodies.TensorData | None
) -> wire_pb2.SampleResponse:
    """Return the result of a request.

    Args:
        response: What was sampled.
        targets: The tokens that were to be scored, whose layout the scores have.
    """
    message = wire_pb2.SampleResponse(
        sequences=[_encode_sequence(sequence) for sequence in response.sequences],
        prompt_cache_hit_tokens=response.num_cached_prompt_tokens,
    )
    if response.HasField("prompt_logprobs"):
        message.prompt_logprobs = _float_bytes(decode_tensor(response.prompt_logprobs))
    if response.HasField("topk_prompt_logprobs"):
        message.topk_prompt_logprobs.CopyFrom(_encode_topk(response.topk_prompt_logprobs))
    if response.HasField("target_prompt_logprobs") and targets is not None:
        scores = decode_tensor(response.target_prompt_logprobs).astype(np.float32)
        message.target_prompt_logprobs.CopyFrom(_encode_targets(scores, targets))
    if response.HasField("prompt_alternatives"):
        drawn = response.prompt_alternatives
        message.prompt_alt_tokens.tokens.CopyFrom(
            tensor_codec.encode_dense(decode_tensor(drawn.tokens))
        )
        message.prompt_alt_tokens.logprobs.CopyFrom(
            tensor_codec.encode_dense(decode_tensor(drawn.logprobs))
        )
    return message


def _encode_targets(scores: NDArray[np.float32], targets: bodies.TensorData) -> wire_pb2.Tensor:
    if targets.sparse_crow_indices is None:
        return tensor_codec.encode_dense(scores)
    return tensor_codec.encode_csr(
        scores,
        np.asarray(targets.sparse_crow_indices, dtype=np.int64),
        np.asarray(targets.sparse_col_indices or [], dtype=np.int64),
    )


def _encode_sequence(sequence: trajectories_pb2.SampledSequence) -> wire_pb2.SampledSequence:
    message = wire_pb2.SampledSequence(
        stop_reason=_STOP_REASONS[sequence.stop_reason],
        tokens=decode_tensor(sequence.tokens).astype("<i4").tobytes(),
        logprobs=_float_bytes(decode_tensor(sequence.logprobs)),
    )
    if sequence.HasField("topk_logprobs"):
        message.topk_sampled_logprobs.CopyFrom(_encode_topk(sequence.topk_logprobs))
    return message


def _encode_topk(topk: trajectories_pb2.TopkLogprobs) -> wire_pb2.TopkLogprobs:
    token_ids = decode_tensor(topk.token_ids).astype("<i4")
    logprobs = decode_tensor(topk.logprobs).astype("<f4")
    is_empty = token_ids < 0
    token_ids[is_empty], logprobs[is_empty] = _NO_TOKEN, _NO_LOGPROB
    return wire_pb2.TopkLogprobs(
        token_ids=token_ids.tobytes(),
        logprobs=logprobs.tobytes(),
        k=token_ids.shape[1],
        length=token_ids.shape[0],
    )


def _float_bytes(array: NDArray[np.generic]) -> bytes:
    return array.astype("<f4").tobytes()
