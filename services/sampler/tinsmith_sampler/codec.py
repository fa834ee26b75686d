"""Protobuf to and from the sampler's domain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinsmith import names
from tinsmith.tensors import encode_tensor, encode_tokens
from tinsmith.v1 import sampler_pb2, scheduler_pb2, trajectories_pb2
from tinsmith_engine import PromptLogprobs, SampledSequence
from tinsmith_engine.codec import decode_input, given_fields
from tinsmith_runtime.errors import InvalidFieldError, NotFiniteInputError
from tinsmith_sampler.service import Prompt, Sampled
from tinsmith_sampler.sessions import Target

DOMAIN = "sampler.tinsmith"

_STOP_REASONS = {
    "stop": trajectories_pb2.SampledSequence.STOP_REASON_STOP,
    "length": trajectories_pb2.SampledSequence.STOP_REASON_LENGTH,
}
_MAX_STOP_STRINGS = 64


def decode_session_name(value: str) -> names.SamplingSessionName:
    """Return the sampling session that a request names.

    Raises:
        InvalidFieldError: If it is not the name of one.
    """
    try:
        return names.SamplingSessionName.parse(value)
    except names.InvalidNameError as error:
        raise InvalidFieldError(
            "sampling_session", f"must be {error.pattern}, got {value[:128]!r}"
        ) from error


def decode_target(message: scheduler_pb2.SamplingSession) -> Target:
    """Return what a sampling session samples from."""
    # The name comes from the scheduler, after the caller's right to it was checked.
    project = names.SamplingSessionName.parse(message.name).project
    return Target(
        message.base_model, message.checkpoint, message.run, message.trainer_address, project
    )


def decode_prompt(request: sampler_pb2.SampleRequest) -> Prompt:
    """Return a request for completions.

    Raises:
        InvalidFieldError: If a field is out of range.
        NotFiniteInputError: If a number is NaN or infinite.
        EmptyBatchError: If the prompt has no token.
    """
    params: dict[str, Any] = given_fields(request.params)
    stop = params.pop("stop_tokens", None)
    for name in ("temperature", "top_p"):
        if name in params and not math.isfinite(params[name]):
            raise NotFiniteInputError(f"params.{name}", f"must be finite, got {params[name]}")
    if params.get("temperature", 1.0) < 0:
        raise InvalidFieldError("params.temperature", "must be at least 0")
    if not 0 < params.get("top_p", 1.0) <= 1:
        raise InvalidFieldError("params.top_p", "must be above 0 and at most 1")
    if params.get("top_k", 0) < -1:
        raise InvalidFieldError("params.top_k", "must be at least -1")
    if params.get("max_tokens", 1) < 1:
        raise InvalidFieldError("params.max_tokens", "must be at least 1")
    if len(request.params.stop_strings) > _MAX_STOP_STRINGS:
        raise InvalidFieldError("params.stop_strings", f"must be at most {_MAX_STOP_STRINGS}")
    if "" in request.params.stop_strings:
        raise InvalidFieldError("params.stop_strings", "must not hold an empty string")
    for name in ("num_samples", "topk_prompt_logprobs", "min_version"):
        if getattr(request, name) < 0:
            raise InvalidFieldError(name, "must not be negative")
    tokens_T, images = decode_input(request.prompt, field="prompt")
    return Prompt(
        session=request.sampling_session,
        tokens=tokens_T.tolist(),
        images=images,
        num_samples=request.num_samples or 1,
        stop_tokens=None if stop is None else list(stop.token_ids),
        stop_strings=list(request.params.stop_strings),
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        min_version=request.min_version,
        **params,
    )


def encode_sampled(prompt: Prompt, sampled: Sampled) -> sampler_pb2.SampleResponse:
    """Return the message of completions."""
    response = sampler_pb2.SampleResponse(
        sequences=[_encode_sequence(sequence) for sequence in sampled.sequences],
        seed=sampled.seed,
    )
    scores = sampled.sequences[0].prompt
    if scores is not None and prompt.prompt_logprobs:
        response.prompt_logprobs.CopyFrom(encode_tensor(prompt_logprobs(scores)))
    if scores is not None and prompt.topk_prompt_logprobs:
        response.topk_prompt_logprobs.CopyFrom(_encode_topk(scores, prompt.topk_prompt_logprobs))
    return response


def prompt_logprobs(scores: PromptLogprobs) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the log-probability of each prompt token, float32 [T], NaN where there is none."""
    values = [math.nan if value is None else value for value in scores.logprobs]
    return np.asarray(values, dtype=np.float32)


def _encode_sequence(sequence: SampledSequence) -> trajectories_pb2.SampledSequence:
    return trajectories_pb2.SampledSequence(
        tokens=encode_tokens(sequence.tokens),
        logprobs=encode_tensor(np.asarray(sequence.logprobs, dtype=np.float32)),
        versions=encode_tensor(np.asarray(sequence.versions, dtype=np.int64)),
        stop_reason=_STOP_REASONS[sequence.finish_reason or "length"],
    )


def _encode_topk(scores: PromptLogprobs, k: int) -> trajectories_pb2.TopkLogprobs:
    token_ids = np.full((len(scores.topk), k), -1, dtype=np.int32)
    logprobs = np.full((len(scores.topk), k), np.nan, dtype=np.float32)
    for position, row in enumerate(scores.topk):
        for rank, (token, logprob) in enumerate(row or []):
            token_ids[position, rank] = token
            logprobs[position, rank] = logprob
    return trajectories_pb2.TopkLogprobs(
        token_ids=encode_tensor(token_ids), logprobs=encode_tensor(logprobs)
    )
