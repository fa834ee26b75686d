"""Episodes as values, and from protobuf messages. Nothing here talks to a server."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith import tensors
from tinsmith.images import ImageRules
from tinsmith.names import EpisodeName
from tinsmith.rpc.input_codec import decode_model_input
from tinsmith.types import Datum, EncodedTextChunk, FloatArray, ImageChunk, ModelInput
from tinsmith.v1 import episode_pb2

TYPES: dict[str, episode_pb2.Episode.Type.ValueType] = {
    "train": episode_pb2.Episode.TYPE_TRAIN,
    "eval": episode_pb2.Episode.TYPE_EVAL,
}
STATES: dict[str, episode_pb2.Episode.State.ValueType] = {
    "queued": episode_pb2.Episode.STATE_QUEUED,
    "claimed": episode_pb2.Episode.STATE_CLAIMED,
    "submitted": episode_pb2.Episode.STATE_SUBMITTED,
    "dead": episode_pb2.Episode.STATE_DEAD,
    "cancelled": episode_pb2.Episode.STATE_CANCELLED,
}
_TYPE_WORDS = {number: word for word, number in TYPES.items()}
_STATE_WORDS = {number: word for word, number in STATES.items()}
_OPEN_WORDS = ("queued", "claimed")


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """An episode to register."""

    task: Any = None
    """What the agent needs to know; anything that JSON can hold, 256 KiB at most."""
    task_id: str = ""
    """Names the task, for grouping."""
    episode_type: str = "train"
    """`train` or `eval`."""


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """What an episode was worth."""

    reward: float
    step_rewards: list[float] = field(default_factory=list)
    """One for each model call, or none."""
    is_success: bool | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTrajectory:
    """A sequence that the model read and wrote in an episode, exactly; arrays have shape [T]."""

    prompt: ModelInput
    tokens: NDArray[np.int64]
    """Everything after the prompt: what was sampled, and what the agent added."""
    mask: FloatArray
    """1 where a token was sampled."""
    logprobs: FloatArray
    """Natural-log, of sampled tokens; 0 for the others."""
    versions: NDArray[np.int64]
    """Of sampled tokens; 0 for the others."""
    call_indices: tuple[int, ...]
    call_ends: tuple[int, ...]
    """Where, in `tokens`, what each call sampled ends."""

    @property
    def num_sampled_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.mask.sum())

    def counted_prompt(self, images: ImageRules | None = None) -> ModelInput:
        """Return the prompt; of each image it says how many tokens it takes.

        Args:
            images: As of `to_datum`.

        Raises:
            ValueError: If the prompt holds an image, and no rules are given.
        """
        return ModelInput(tuple(_counted(chunk, images) for chunk in self.prompt.chunks))

    def to_datum(self, advantage: float, *, images: ImageRules | None = None) -> Datum:
        """Return the training sequence for a policy-gradient loss.

        Args:
            advantage: Of every sampled token.
            images: How the model turns images into tokens, as `Client.list_models` tells it; needed
                if the prompt holds any.

        Raises:
            ValueError: If the prompt holds an image, and no rules are given.
        """
        chunks = self.counted_prompt(images).chunks
        read = [token for chunk in chunks for token in placeholders(chunk, images)]
        # Position i predicts token i + 1; the first token of the prompt is not predicted.
        context = np.zeros(len(read) - 1)
        return Datum(
            ModelInput((*chunks, EncodedTextChunk(self.tokens[:-1].tolist()))),
            {
                "target_tokens": np.concatenate((read[1:], self.tokens)),
                "logprobs": np.concatenate((context, self.logprobs)),
                "advantages": np.concatenate((context, self.mask * np.float32(advantage))),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One play of a task by a remote agent."""

    name: str
    state: str
    """`queued`, `claimed`, `submitted`, `dead` or `cancelled`."""
    queue: str
    episode_type: str
    task_id: str
    task: Any
    sampling_session: str
    model: str
    num_attempts: int
    max_attempts: int
    client_id: str
    lease_expire_time: datetime.datetime | None
    outcome: EpisodeOutcome | None
    failures: list[str]
    """Why attempts came to nothing, oldest first."""
    num_model_calls: int
    trajectories: list[RecordedTrajectory]
    revision: int
    create_time: datetime.datetime | None
    end_time: datetime.datetime | None
    waiting_for: str

    @property
    def episode_uuid(self) -> str:
        """The last part of the name."""
        return EpisodeName.parse(self.name).episode

    @property
    def is_open(self) -> bool:
        """Whether it may still be played."""
        return self.state in _OPEN_WORDS


def encode_spec(
    spec: EpisodeSpec, *, queue: str, sampling_session: str, model: str, max_attempts: int
) -> episode_pb2.Episode:
    """Return the message of an episode to register.

    Raises:
        ValueError: If the type is unknown, or JSON cannot hold the task.
    """
    return episode_pb2.Episode(
        queue=queue,
        type=encode_type(spec.episode_type),
        task_id=spec.task_id,
        task_json=encode_json(spec.task),
        sampling_session=sampling_session,
        model=model,
        max_attempts=max_attempts,
    )


def encode_type(word: str) -> episode_pb2.Episode.Type.ValueType:
    """Return the number of an episode type.

    Raises:
        ValueError: If it is unknown.
    """
    if word not in TYPES:
        raise ValueError(f"episode_type must be one of {', '.join(TYPES)}, got {word!r}")
    return TYPES[word]


def encode_json(value: Any) -> str:
    """Return JSON, nothing for None.

    Raises:
        ValueError: If it holds NaN or infinity.
        TypeError: If it holds what JSON cannot hold.
    """
    return "" if value is None else json.dumps(value, allow_nan=False)


def encode_outcome(
    reward: float | Sequence[float] | None,
    *,
    is_success: bool | None,
    metadata: Mapping[str, Any],
    log_metrics: Mapping[str, float],
) -> episode_pb2.EpisodeOutcome:
    """Return the message of an outcome.

    Args:
        reward: Of the episode, or of each of its model calls.
        is_success: Whether the task was solved.
        metadata: Anything that JSON can hold.
        log_metrics: Numbers to be logged.

    Raises:
        ValueError: If there is no reward.
    """
    if reward is None:
        raise ValueError("an outcome needs a reward; abort an episode that has none")
    message = episode_pb2.EpisodeOutcome(
        metrics={name: float(value) for name, value in log_metrics.items()},
        metadata_json=encode_json(dict(metadata) or None),
    )
    if isinstance(reward, Sequence):
        message.step_rewards.extend(float(value) for value in reward)
    else:
        message.reward = float(reward)
    if is_success is not None:
        message.is_success = is_success
    return message


def decode_episode(message: episode_pb2.Episode) -> Episode:
    """Return an episode."""
    return Episode(
        name=message.name,
        state=_STATE_WORDS[message.state],
        queue=message.queue,
        episode_type=_TYPE_WORDS[message.type],
        task_id=message.task_id,
        task=_decode_json(message.task_json),
        sampling_session=message.sampling_session,
        model=message.model,
        num_attempts=message.num_attempts,
        max_attempts=message.max_attempts,
        client_id=message.client_id,
        lease_expire_time=_decode_time(message, "lease_expire_time"),
        outcome=_decode_outcome(message.outcome) if message.HasField("outcome") else None,
        failures=list(message.failures),
        num_model_calls=message.num_model_calls,
        trajectories=[_decode_trajectory(each) for each in message.trajectories],
        revision=message.revision,
        create_time=_decode_time(message, "create_time"),
        end_time=_decode_time(message, "end_time"),
        waiting_for=message.waiting_for,
    )


def _decode_outcome(message: episode_pb2.EpisodeOutcome) -> EpisodeOutcome:
    return EpisodeOutcome(
        reward=message.reward,
        step_rewards=list(message.step_rewards),
        is_success=message.is_success if message.HasField("is_success") else None,
        metrics=dict(message.metrics),
        metadata=_decode_json(message.metadata_json),
    )


def _decode_trajectory(message: episode_pb2.RecordedTrajectory) -> RecordedTrajectory:
    return RecordedTrajectory(
        prompt=decode_model_input(message.prompt),
        tokens=tensors.decode_tensor(message.tokens).astype(np.int64),
        mask=tensors.decode_tensor(message.mask).astype(np.float32),
        logprobs=tensors.decode_tensor(message.logprobs).astype(np.float32),
        versions=tensors.decode_tensor(message.versions).astype(np.int64),
        call_indices=tuple(message.call_indices),
        call_ends=tuple(message.call_ends),
    )


def placeholders(chunk: EncodedTextChunk | ImageChunk, rules: ImageRules | None) -> Sequence[int]:
    """Return the tokens of a piece of a counted prompt; those of an image stand for it."""
    if isinstance(chunk, EncodedTextChunk):
        return chunk.tokens
    assert rules is not None, "an image is counted by rules"
    return [rules.token_id] * chunk.length


def _counted(
    chunk: EncodedTextChunk | ImageChunk, rules: ImageRules | None
) -> EncodedTextChunk | ImageChunk:
    """Return a piece of a prompt whose number of tokens is known."""
    if isinstance(chunk, EncodedTextChunk):
        return chunk
    if rules is None:
        raise ValueError("the prompt holds an image; give the `images` rules of its model")
    return replace(chunk, expected_tokens=rules.num_tokens(chunk.data, chunk.format))


def _decode_json(text: str) -> Any:
    return json.loads(text) if text else None


def _decode_time(message: episode_pb2.Episode, field: str) -> datetime.datetime | None:
    if not message.HasField(field):  # type: ignore[arg-type]
        return None
    time: datetime.datetime = getattr(message, field).ToDatetime(tzinfo=datetime.UTC)
    return time
