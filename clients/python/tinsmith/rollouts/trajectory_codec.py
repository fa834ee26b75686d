"""Trajectories as messages and back, bit for bit: what a server played reads as a local play."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from google.protobuf import json_format

from tinsmith.environments.observation_codec import decode_stop, encode_stop
from tinsmith.rollouts.trajectory import (
    PlacedImage,
    TerminationReason,
    TokenSample,
    Trajectory,
    Turn,
)
from tinsmith.rpc.input_codec import decode_image, encode_image
from tinsmith.tensors import decode_tensor, encode_tensor, encode_tokens
from tinsmith.v1 import rollout_pb2, trajectories_pb2

# An episode that was cancelled leaves no trajectory behind, and has no number.
_REASONS = {
    TerminationReason.DONE: rollout_pb2.Trajectory.TERMINATION_REASON_DONE,
    TerminationReason.MAX_TURNS: rollout_pb2.Trajectory.TERMINATION_REASON_MAX_TURNS,
    TerminationReason.MAX_TOKENS: rollout_pb2.Trajectory.TERMINATION_REASON_MAX_TOKENS,
    TerminationReason.CONTEXT_FULL: rollout_pb2.Trajectory.TERMINATION_REASON_CONTEXT_FULL,
    TerminationReason.PARSE_ERROR: rollout_pb2.Trajectory.TERMINATION_REASON_PARSE_ERROR,
    TerminationReason.ENVIRONMENT_FAILED: (
        rollout_pb2.Trajectory.TERMINATION_REASON_ENVIRONMENT_FAILED
    ),
}
_DECODED_REASONS: dict[Any, TerminationReason] = {
    number: reason for reason, number in _REASONS.items()
}
_STOPS = {
    "stop": trajectories_pb2.SampledSequence.STOP_REASON_STOP,
    "length": trajectories_pb2.SampledSequence.STOP_REASON_LENGTH,
}
_DECODED_STOPS: dict[Any, str] = {number: word for word, number in _STOPS.items()}


def encode_trajectory(trajectory: Trajectory) -> rollout_pb2.Trajectory:
    """Return the message of an episode.

    Raises:
        ValueError: If it was cancelled.
    """
    if trajectory.reason not in _REASONS:
        raise ValueError(f"an episode that ended as {trajectory.reason.value} has no message")
    message = rollout_pb2.Trajectory(
        reason=_REASONS[trajectory.reason],
        failure=trajectory.failure,
        samples=[_encode_sample(sample) for sample in trajectory.samples],
    )
    for each in trajectory.messages:
        message.messages.add().update(dict(each))
    for turn in trajectory.turns:
        encoded = message.turns.add(
            num_tokens=turn.num_tokens,
            stop_reason=_STOPS[turn.stop_reason],
            reward=turn.reward,
            **encode_stop(turn.stop),
        )
        encoded.info.update(dict(turn.info))
    return message


def decode_trajectory(message: rollout_pb2.Trajectory, *, key: str = "") -> Trajectory:
    """Return the episode of a message.

    Args:
        message: The episode.
        key: Tells its random draws from those of others.

    Raises:
        ValueError: If a tensor is malformed, or a word is of a newer release.
    """
    if message.reason not in _DECODED_REASONS:
        raise ValueError(f"the reason {message.reason} of an end is of a newer release")
    return Trajectory(
        samples=tuple(_decode_sample(sample) for sample in message.samples),
        turns=tuple(
            Turn(
                turn.num_tokens,
                _DECODED_STOPS.get(turn.stop_reason, ""),
                turn.reward,
                json_format.MessageToDict(turn.info),
                decode_stop(turn),
            )
            for turn in message.turns
        ),
        reason=_DECODED_REASONS[message.reason],
        failure=message.failure,
        messages=tuple(json_format.MessageToDict(each) for each in message.messages),
        key=key,
    )


def _encode_sample(sample: TokenSample) -> rollout_pb2.TrajectorySample:
    return rollout_pb2.TrajectorySample(
        tokens=encode_tokens(sample.tokens),
        logprobs=encode_tensor(sample.logprobs),
        versions=encode_tensor(sample.versions),
        turn_indices=encode_tokens(sample.turn_indices),
        images=[
            rollout_pb2.PlacedImage(position=placed.position, image=_encode_placed(placed))
            for placed in sample.images
        ],
    )


def _encode_placed(placed: PlacedImage) -> trajectories_pb2.ImageChunk:
    return encode_image(dataclasses.replace(placed.image, expected_tokens=placed.num_tokens))


def _decode_sample(message: rollout_pb2.TrajectorySample) -> TokenSample:
    turn_indices = decode_tensor(message.turn_indices).astype(np.int64)
    return TokenSample(
        tokens=decode_tensor(message.tokens).astype(np.int64),
        loss_mask=turn_indices >= 0,
        logprobs=decode_tensor(message.logprobs).astype(np.float32),
        versions=decode_tensor(message.versions).astype(np.int64),
        turn_indices=turn_indices,
        images=tuple(
            PlacedImage(each.position, each.image.expected_tokens, decode_image(each.image))
            for each in message.images
        ),
    )
