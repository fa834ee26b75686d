"""Protobuf to and from what answers are made of."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tinsmith.tensors import decode_tensor, encode_tensor, encode_tokens
from tinsmith.text.tool_forms import CallNotation, ToolRules, structural_tag
from tinsmith.v1 import sampler_pb2, trajectories_pb2
from tinsmith_gateway.openai.bodies import SamplingBody
from tinsmith_gateway.openai.rendering import Prompt
from tinsmith_runtime.errors import InvalidFieldError

StopReason = Literal["", "stop", "length"]
Top = list[tuple[int, float]]

_STOP_REASONS: dict[trajectories_pb2.SampledSequence.StopReason.ValueType, StopReason] = {
    trajectories_pb2.SampledSequence.STOP_REASON_UNSPECIFIED: "",
    trajectories_pb2.SampledSequence.STOP_REASON_STOP: "stop",
    trajectories_pb2.SampledSequence.STOP_REASON_LENGTH: "length",
}
_WIRE_REASONS = {reason: wire for wire, reason in _STOP_REASONS.items()}
_NUMBERS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
# The low bits of a UUID are random but for the two above these.
_DRAWN_SEEDS = 2**62
_NUM_SEEDS = 2**64


@dataclass(slots=True)
class Sampled:
    """A sample, or a piece of one.

    Attributes:
        tokens: As they were sampled, stop token included.
        logprobs: Of the tokens, natural, under the unmodified distribution.
        versions: Of the weights that each token was drawn from.
        top: The most probable tokens at each token, if they were asked for.
        stop_reason: Why it ended; empty while it goes on.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)
    stop_reason: StopReason = ""

    def extend(self, piece: Sampled) -> None:
        """Add the piece that follows."""
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        self.top += piece.top
        self.stop_reason = piece.stop_reason


def decode_sequence(message: trajectories_pb2.SampledSequence) -> Sampled:
    """Return a sample, or a piece of one."""
    tokens = [int(token) for token in decode_tensor(message.tokens)]
    return Sampled(
        tokens=tokens,
        logprobs=[float(value) for value in decode_tensor(message.logprobs)],
        versions=[int(value) for value in decode_tensor(message.versions)],
        top=decode_top(message.topk_logprobs) if message.HasField("topk_logprobs") else [],
        stop_reason=_STOP_REASONS[message.stop_reason],
    )


def encode_sequence(sampled: Sampled) -> trajectories_pb2.SampledSequence:
    """Return the message of a whole sample."""
    return trajectories_pb2.SampledSequence(
        tokens=encode_tokens(sampled.tokens),
        logprobs=encode_tensor(np.asarray(sampled.logprobs, dtype=np.float32)),
        versions=encode_tensor(np.asarray(sampled.versions, dtype=np.int64)),
        stop_reason=_WIRE_REASONS[sampled.stop_reason],
    )


def decode_top(message: trajectories_pb2.TopkLogprobs) -> list[Top]:
    """Return the most probable tokens at each position; none where nothing was scored."""
    rows = zip(decode_tensor(message.token_ids), decode_tensor(message.logprobs), strict=True)
    return [
        [
            (int(token), float(logprob))
            for token, logprob in zip(tokens, logprobs, strict=True)
            if token >= 0
        ]
        for tokens, logprobs in rows
    ]


def encode_params(
    body: SamplingBody,
    *,
    max_tokens: int | None,
    seed: int,
    output_format: trajectories_pb2.OutputFormat | None,
) -> trajectories_pb2.SamplingParams:
    """Return how tokens are drawn; what a request leaves out has OpenAI's and our default."""
    params = trajectories_pb2.SamplingParams(seed=seed, stop_strings=body.stops)
    if max_tokens is not None:
        params.max_tokens = max_tokens
    for name in _NUMBERS:
        value = getattr(body, name)
        if value is not None:
            setattr(params, name, value)
    params.logit_bias.update(body.logit_bias or {})
    if output_format is not None:
        params.output_format.CopyFrom(output_format)
    if body.min_tokens:
        params.min_tokens = body.min_tokens
    if body.ignore_eos or body.stop_token_ids:
        params.stop_tokens.token_ids.extend(body.stop_token_ids or ())
        params.stop_tokens.includes_those_of_model = not body.ignore_eos
    return params


def encode_tool_form(
    notation: CallNotation, rules: ToolRules, answer: trajectories_pb2.OutputFormat | None
) -> trajectories_pb2.OutputFormat | None:
    """Return the form of an answer that may call tools.

    Args:
        notation: How the model writes calls.
        rules: What calls keep.
        answer: The form of an answer that calls nothing; None for any text.
    """
    if rules.is_free and answer is None:
        return None
    tag = structural_tag(notation, rules, _format_of(answer))
    return trajectories_pb2.OutputFormat(structural_tag=json.dumps(tag))


def _format_of(form: trajectories_pb2.OutputFormat | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.HasField("regex"):
        return {"type": "regex", "pattern": form.regex}
    try:
        return {"type": "json_schema", "json_schema": json.loads(form.json_schema)}
    except ValueError as error:
        raise InvalidFieldError("response_format", f"is no JSON schema: {error}") from error


def encode_request(
    prompt: Prompt,
    params: trajectories_pb2.SamplingParams,
    *,
    num_samples: int,
    num_top: int,
    is_live: bool,
) -> sampler_pb2.SampleRequest:
    """Return a request for completions, of no sampling session yet."""
    updates = sampler_pb2.WEIGHT_UPDATES_IN_FLIGHT if is_live else sampler_pb2.WEIGHT_UPDATES_PINNED
    return sampler_pb2.SampleRequest(
        prompt=prompt.model_input,
        num_samples=num_samples,
        params=params,
        topk_sample_logprobs=num_top,
        weight_updates=updates,
    )


def seed_of(body: SamplingBody, call_id: uuid.UUID) -> int:
    """Return the seed of a call: as it was sent, modulo 2^64, else one of the call's own id."""
    if body.seed is None:
        return call_id.int % _DRAWN_SEEDS
    return body.seed % _NUM_SEEDS


def total_tokens(samples: Sequence[Sampled]) -> int:
    """Return how many tokens were sampled."""
    return sum(len(sampled.tokens) for sampled in samples)
