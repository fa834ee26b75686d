"""Protobuf to and from the sampler's domain."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from tinsmith import names
from tinsmith.tensors import encode_tensor, encode_tokens
from tinsmith.v1 import sampler_pb2, scheduler_pb2, trajectories_pb2
from tinsmith_engine import PromptLogprobs, SampledSequence, SampleRequest
from tinsmith_engine.base.types import IntArray
from tinsmith_engine.contract.codec import decode_array, decode_input
from tinsmith_engine.sampling.request.sample_request import (
    UNLIMITED_TOKENS,
    OutputFormat,
    check_ranges,
)
from tinsmith_runtime.errors import InvalidFieldError, ShapeMismatchError
from tinsmith_runtime.rpc.requests import given_fields
from tinsmith_runtime.text.penalties import Shaping
from tinsmith_sampler.engines.engine_driver import Load
from tinsmith_sampler.requests.sessions import Target
from tinsmith_sampler.requests.token_stream import Delivery, PromptReport
from tinsmith_sampler.service import Prompt, Sampled

DOMAIN = "sampler.tinsmith"

_STOP_REASONS = {
    None: trajectories_pb2.SampledSequence.STOP_REASON_UNSPECIFIED,
    "stop": trajectories_pb2.SampledSequence.STOP_REASON_STOP,
    "length": trajectories_pb2.SampledSequence.STOP_REASON_LENGTH,
}
_MAX_TARGETS = 128
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


_WEIGHT_UPDATES = frozenset(sampler_pb2.WeightUpdates.values())


def decode_target(message: scheduler_pb2.SamplingSession) -> Target:
    """Return what a sampling session samples from."""
    # The name comes from the scheduler, after the caller's right to it was checked.
    project = names.SamplingSessionName.parse(message.name).project
    return Target(
        message.base_model,
        message.checkpoint,
        message.run,
        message.trainer_address,
        project,
        tuple(message.stop_token_ids),
    )


def decode_prompt(request: sampler_pb2.SampleRequest, *, key_id: str = "") -> Prompt:
    """Return a request for completions.

    Raises:
        InvalidFieldError: If a field is out of range.
        NotFiniteInputError: If a number is NaN or infinite.
        EmptyBatchError: If the prompt has no token.
    """
    params: dict[str, Any] = given_fields(request.params)
    stop = params.pop("stop_tokens", None)
    if params.get("top_k", 0) < -1:
        raise InvalidFieldError("params.top_k", "must be at least -1")
    if params.get("max_tokens", 1) < 1:
        raise InvalidFieldError("params.max_tokens", "must be at least 1")
    for name in ("num_samples", "min_version", "max_staleness"):
        if getattr(request, name) < 0:
            raise InvalidFieldError(name, "must not be negative")
    if request.weight_updates not in _WEIGHT_UPDATES:
        raise InvalidFieldError(
            "weight_updates",
            f"must be one of {sorted(_WEIGHT_UPDATES)}, got {request.weight_updates}",
        )
    form = _decode_format(params.pop("output_format", None))
    penalties = {name: params.pop(name) for name in _PENALTIES if name in params}
    tokens_T, images = decode_input(request.prompt, field="prompt")
    params = {"max_tokens": UNLIMITED_TOKENS, "seed": secrets.randbits(63)} | params
    decoded = SampleRequest(
        prompt_tokens=tokens_T.tolist(),
        images=images,
        num_samples=request.num_samples or 1,
        stop_tokens=() if stop is None else list(stop.token_ids),
        stop_strings=list(request.params.stop_strings),
        output_format=form,
        shaping=Shaping(logit_bias=dict(request.params.logit_bias), **penalties),
        prompt_logprobs=request.prompt_logprobs,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        prompt_logprobs_last_n=given_fields(request).get("prompt_logprobs_last_n"),
        target_prompt_tokens=_decode_targets(request),
        num_prompt_alternatives=request.num_prompt_alternatives,
        topk_sample_logprobs=request.topk_sample_logprobs,
        follows_run=request.weight_updates == sampler_pb2.WEIGHT_UPDATES_IN_FLIGHT,
        **params,
    )
    check_ranges(decoded, params="params.")
    return Prompt(
        session=request.sampling_session,
        request=decoded,
        uses_model_stop_tokens=stop is None or stop.includes_those_of_model,
        min_version=request.min_version,
        max_staleness=request.max_staleness,
        key_id=key_id,
    )


def decode_stream(
    request: sampler_pb2.StreamSampleRequest, *, key_id: str = ""
) -> tuple[Prompt, list[int]]:
    """Return a request for a stream, and how many tokens of each sample its sender has.

    Raises:
        InvalidFieldError: If a field is out of range; those of `request` are named as in `Sample`.
        NotFiniteInputError: If a number is NaN or infinite.
        EmptyBatchError: If the prompt has no token.
    """
    if request.request.sampling_session not in ("", request.sampling_session):
        raise InvalidFieldError(
            "request.sampling_session", "must be empty or equal to sampling_session"
        )
    if any(count < 0 for count in request.received_tokens):
        raise InvalidFieldError("received_tokens", "must not hold a negative count")
    prompt = decode_prompt(request.request, key_id=key_id)
    prompt = dataclasses.replace(prompt, session=request.sampling_session)
    return prompt, list(request.received_tokens)


def encode_sampled(request: SampleRequest, sampled: Sampled) -> sampler_pb2.SampleResponse:
    """Return the message of completions."""
    first = sampled.sequences[0]
    report = PromptReport(first.prompt, first.num_cached_prompt_tokens, sampled.version)
    response = _encode_report(request, report, sampled.seed)
    response.sequences.extend(_encode_sequence(request, one) for one in sampled.sequences)
    return response


def encode_load(load: Load) -> scheduler_pb2.SamplerLoad:
    """Return the message of what a sampler has to do."""
    return scheduler_pb2.SamplerLoad(
        num_requests=load.num_requests,
        num_sequences=load.num_sequences,
        num_tokens=load.num_tokens,
    )


def encode_delivery(
    request: SampleRequest, delivery: Delivery, seed: int
) -> list[sampler_pb2.StreamSampleResponse]:
    """Return the messages of what a stream delivers at once."""
    messages = [
        sampler_pb2.StreamSampleResponse(
            sample_index=piece.sample_index,
            token_index=piece.token_index,
            piece=_encode_sequence(
                request, piece.sequence(has_topk=request.topk_sample_logprobs > 0)
            ),
        )
        for piece in delivery.pieces
    ]
    if delivery.prompt is not None:
        messages[0].prompt.CopyFrom(_encode_report(request, delivery.prompt, seed))
    return messages


def _encode_report(
    request: SampleRequest, report: PromptReport, seed: int
) -> sampler_pb2.SampleResponse:
    """Return the message of what is known of a prompt, without sequences."""
    response = sampler_pb2.SampleResponse(
        seed=seed, num_cached_prompt_tokens=report.num_cached_tokens, version=report.version
    )
    scores = report.scores
    if scores is None:
        return response
    if request.prompt_logprobs:
        response.prompt_logprobs.CopyFrom(encode_tensor(prompt_logprobs(scores)))
    if request.topk_prompt_logprobs:
        response.topk_prompt_logprobs.CopyFrom(
            _encode_topk(scores.topk, request.topk_prompt_logprobs)
        )
    if scores.targets is not None:
        response.target_prompt_logprobs.CopyFrom(encode_tensor(scores.targets))
    if scores.alternatives is not None:
        response.prompt_alternatives.tokens.CopyFrom(encode_tensor(scores.alternatives.tokens))
        response.prompt_alternatives.logprobs.CopyFrom(encode_tensor(scores.alternatives.logprobs))
    return response


def prompt_logprobs(scores: PromptLogprobs) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the log-probability of each prompt token, float32 [T], NaN where there is none."""
    values = [math.nan if value is None else value for value in scores.logprobs]
    return np.asarray(values, dtype=np.float32)


def _decode_format(message: trajectories_pb2.OutputFormat | None) -> OutputFormat | None:
    kind = None if message is None else message.WhichOneof("form")
    if message is None or kind is None:
        return None
    return OutputFormat(kind, getattr(message, kind))


def _decode_targets(request: sampler_pb2.SampleRequest) -> IntArray | None:
    """Return the tokens to score in place of those of the prompt, int64 [T - 1, K]."""
    field = "target_prompt_tokens"
    if not request.HasField("target_prompt_tokens"):
        return None
    tokens: IntArray = decode_array(
        request.target_prompt_tokens, field, np.int64, allows_several=True
    )
    if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= _MAX_TARGETS:
        raise ShapeMismatchError(
            field,
            f"must have shape [T - 1, K], K from 1 to {_MAX_TARGETS}, got {list(tokens.shape)}",
        )
    return tokens


def _encode_sequence(
    request: SampleRequest, sequence: SampledSequence
) -> trajectories_pb2.SampledSequence:
    message = trajectories_pb2.SampledSequence(
        tokens=encode_tokens(sequence.tokens),
        logprobs=encode_tensor(np.asarray(sequence.logprobs, dtype=np.float32)),
        versions=encode_tensor(np.asarray(sequence.versions, dtype=np.int64)),
        stop_reason=_STOP_REASONS[sequence.finish_reason],
    )
    if sequence.topk is not None:
        message.topk_logprobs.CopyFrom(_encode_topk(sequence.topk, request.topk_sample_logprobs))
    return message


def _encode_topk(
    rows: Sequence[Sequence[tuple[int, float]] | None], k: int
) -> trajectories_pb2.TopkLogprobs:
    token_ids = np.full((len(rows), k), -1, dtype=np.int32)
    logprobs = np.full((len(rows), k), np.nan, dtype=np.float32)
    for position, row in enumerate(rows):
        for rank, (token, logprob) in enumerate(row or []):
            token_ids[position, rank] = token
            logprobs[position, rank] = logprob
    return trajectories_pb2.TopkLogprobs(
        token_ids=encode_tensor(token_ids), logprobs=encode_tensor(logprobs)
    )
