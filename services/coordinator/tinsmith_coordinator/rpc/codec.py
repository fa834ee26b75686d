"""Protobuf to domain values and back, and the validation of requests.

Nothing here quotes a value that a client sent at full length: an error travels in HTTP/2 headers,
which are short.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from tinsmith.names import (
    EpisodeName,
    SamplingSessionName,
    is_valid_id,
)
from tinsmith.rpc.durations import decode_duration, encode_duration
from tinsmith.v1 import episode_pb2
from tinsmith_coordinator.episodes.lease_tokens import EpisodeKey, LeaseToken
from tinsmith_coordinator.store.records import (
    Claim,
    Episode,
    EpisodeOutcome,
    EpisodeState,
    EpisodeType,
    Lease,
    NewEpisode,
    NoEpisode,
    QueueKey,
)
from tinsmith_runtime.errors import InvalidFieldError, NotFiniteInputError
from tinsmith_runtime.rpc.requests import check_text, encode_time, parse_name

DOMAIN = "coordinator.tinsmith"
DEFAULT_QUEUE = "default"

_MAX_JSON_BYTES = 256 * 2**10
_MAX_NEW_EPISODES = 1000
_MAX_CANCELLED = 1000
_MAX_STEP_REWARDS = 10_000
_MAX_METRICS = 256
_DEFAULT_ATTEMPTS = 4
_MAX_ATTEMPTS = 100
_DEFAULT_LEASE_S = 60.0
_MIN_LEASE_S = 1.0
_MAX_LEASE_S = 86_400.0
_MAX_WAIT_S = 20.0
_RETRY_AFTER_S = 1.0

_STATES = {each: episode_pb2.Episode.State.Value(f"STATE_{each.name}") for each in EpisodeState}
_TYPES = {each: episode_pb2.Episode.Type.Value(f"TYPE_{each.name}") for each in EpisodeType}
_DECODED_STATES = {number: state for state, number in _STATES.items()}
_DECODED_TYPES = {number: kind for kind, number in _TYPES.items()}


def decode_new_episodes(
    request: episode_pb2.CreateEpisodesRequest, project: str
) -> list[NewEpisode]:
    """Return the episodes that are to be registered, defaults filled in."""
    if not 1 <= len(request.episodes) <= _MAX_NEW_EPISODES:
        raise InvalidFieldError("episodes", f"must be 1 to {_MAX_NEW_EPISODES}")
    return [
        _decode_new_episode(message, project, f"episodes[{index}]")
        for index, message in enumerate(request.episodes)
    ]


def decode_claim(request: episode_pb2.ClaimEpisodeRequest, project: str) -> Claim:
    """Return what is claimed, defaults filled in."""
    if not request.client_id:
        raise InvalidFieldError("client_id", "is required")
    lease_s = _DEFAULT_LEASE_S
    if request.HasField("lease_duration"):
        lease_s = decode_duration(request.lease_duration)
        if not _MIN_LEASE_S <= lease_s <= _MAX_LEASE_S:
            raise InvalidFieldError(
                "lease_duration", f"must be {_MIN_LEASE_S:g} s to {_MAX_LEASE_S:g} s"
            )
    timeout_s = decode_duration(request.timeout)
    if timeout_s < 0:
        raise InvalidFieldError("timeout", "must not be negative")
    if request.max_held < 0:
        raise InvalidFieldError("max_held", "must not be negative")
    return Claim(
        key=QueueKey(project, decode_queue(request.queue), _decode_type(request.type, "type")),
        client_id=check_text(request.client_id, "client_id"),
        lease_duration_s=lease_s,
        timeout_s=min(timeout_s, _MAX_WAIT_S),
        max_held=request.max_held,
    )


def decode_queue(value: str, field: str = "queue") -> str:
    """Return the name of a queue, the default one if it is empty."""
    if not value:
        return DEFAULT_QUEUE
    if not is_valid_id(value):
        raise InvalidFieldError(field, "must be 1 to 63 of letters, digits, '-', '_' and '.'")
    return value


def decode_token(value: str) -> LeaseToken:
    """Return the token of a lease."""
    if not value:
        raise InvalidFieldError("lease_token", "is required")
    return LeaseToken.parse(value)


def decode_key(value: str) -> EpisodeKey:
    """Return the key of an episode."""
    if not value:
        raise InvalidFieldError("api_key", "is required")
    return EpisodeKey.parse(value)


def decode_outcome(request: episode_pb2.SubmitEpisodeRequest) -> EpisodeOutcome:
    """Return what an episode was worth."""
    message = request.outcome
    has_reward = message.HasField("reward")
    if not has_reward and not message.step_rewards:
        raise InvalidFieldError("outcome", "must hold a reward, or step_rewards")
    if len(message.step_rewards) > _MAX_STEP_REWARDS:
        raise InvalidFieldError("outcome.step_rewards", f"must be at most {_MAX_STEP_REWARDS}")
    if len(message.metrics) > _MAX_METRICS:
        raise InvalidFieldError("outcome.metrics", f"must be at most {_MAX_METRICS}")
    for name in message.metrics:
        check_text(name, "outcome.metrics")
    for field, values in (
        ("reward", [message.reward]),
        ("step_rewards", message.step_rewards),
        ("metrics", message.metrics.values()),
    ):
        if not all(map(math.isfinite, values)):
            raise NotFiniteInputError(f"outcome.{field}", "must be finite")
    try:
        reward = message.reward if has_reward else math.fsum(message.step_rewards)
    except OverflowError as error:
        raise NotFiniteInputError("outcome.step_rewards", "must have a finite sum") from error
    return EpisodeOutcome(
        reward=reward,
        step_rewards=tuple(message.step_rewards),
        is_success=message.is_success if message.HasField("is_success") else None,
        metrics=dict(message.metrics),
        metadata_json=check_json(message.metadata_json, "outcome.metadata_json"),
    )


def decode_cancelled(
    request: episode_pb2.CancelEpisodesRequest, project: str
) -> Sequence[EpisodeName]:
    """Return the episodes to cancel; none for a whole queue."""
    if len(request.names) > _MAX_CANCELLED:
        raise InvalidFieldError("names", f"must be at most {_MAX_CANCELLED}")
    names = []
    for index, value in enumerate(request.names):
        name = parse_name(EpisodeName, value, f"names[{index}]")
        if name.project != project:
            raise InvalidFieldError(f"names[{index}]", "is not in the project of parent")
        names.append(name)
    return names


def decode_states(values: Sequence[Any]) -> list[EpisodeState]:
    """Return the states that a list is restricted to."""
    states = []
    for value in values:
        if value not in _DECODED_STATES:
            raise InvalidFieldError("states", "must be states of an episode")
        states.append(_DECODED_STATES[value])
    return states


def decode_revision(value: int) -> int:
    """Return the revision that a watch goes on after."""
    if value < 0:
        raise InvalidFieldError("after_revision", "must not be negative")
    return value


def encode_episode(episode: Episode) -> episode_pb2.Episode:
    """Return the message of an episode, without its trajectories."""
    message = episode_pb2.Episode(
        name=str(episode.name),
        state=_STATES[episode.state],
        queue=episode.queue,
        type=_TYPES[episode.type],
        task_id=episode.task_id,
        task_json=episode.task_json,
        sampling_session=episode.sampling_session,
        model=episode.model,
        num_attempts=episode.num_attempts,
        max_attempts=episode.max_attempts,
        client_id=episode.client_id,
        failures=episode.failures,
        num_model_calls=episode.num_model_calls,
        revision=episode.revision,
        create_time=encode_time(episode.create_time_s),
        waiting_for=_waiting_for(episode),
    )
    if episode.lease_expire_s is not None:
        message.lease_expire_time.CopyFrom(encode_time(episode.lease_expire_s))
    if episode.end_time_s is not None:
        message.end_time.CopyFrom(encode_time(episode.end_time_s))
    if episode.outcome is not None:
        message.outcome.CopyFrom(_encode_outcome(episode.outcome))
    return message


def encode_claimed(
    answer: Lease | NoEpisode, *, timeout_s: float
) -> episode_pb2.ClaimEpisodeResponse:
    """Return the answer to a claim.

    Args:
        answer: What there is.
        timeout_s: How long the caller was willing to wait; a caller that waited may ask again at
            once.
    """
    if isinstance(answer, Lease):
        return episode_pb2.ClaimEpisodeResponse(
            episode=encode_episode(answer.episode),
            lease_token=answer.token,
            api_key=answer.api_key,
        )
    retry_after = encode_duration(0.0 if timeout_s else _RETRY_AFTER_S)
    return episode_pb2.ClaimEpisodeResponse(waiting_for=answer.waiting_for, retry_after=retry_after)


def check_json(value: str, field: str) -> str:
    """Return a text that is empty or JSON, of a bounded size."""
    if len(value.encode()) > _MAX_JSON_BYTES:
        raise InvalidFieldError(field, f"must be at most {_MAX_JSON_BYTES} bytes")
    if not value:
        return value
    try:
        json.loads(value, parse_constant=_refuse_constant, parse_int=str)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(field, "must be JSON") from error
    return value


def _decode_new_episode(message: episode_pb2.Episode, project: str, path: str) -> NewEpisode:
    if message.max_attempts and not 1 <= message.max_attempts <= _MAX_ATTEMPTS:
        raise InvalidFieldError(f"{path}.max_attempts", f"must be 1 to {_MAX_ATTEMPTS}")
    if message.sampling_session:
        session = parse_name(
            SamplingSessionName, message.sampling_session, f"{path}.sampling_session"
        )
        if session.project != project:
            raise InvalidFieldError(f"{path}.sampling_session", "is not in the project of parent")
    return NewEpisode(
        queue=decode_queue(message.queue, f"{path}.queue"),
        type=_decode_type(message.type, f"{path}.type"),
        task_id=check_text(message.task_id, f"{path}.task_id"),
        task_json=check_json(message.task_json, f"{path}.task_json"),
        sampling_session=message.sampling_session,
        model=check_text(message.model, f"{path}.model"),
        max_attempts=message.max_attempts or _DEFAULT_ATTEMPTS,
    )


def _decode_type(value: Any, field: str) -> EpisodeType:
    if value == episode_pb2.Episode.TYPE_UNSPECIFIED:
        return EpisodeType.TRAIN
    if value not in _DECODED_TYPES:
        raise InvalidFieldError(field, "must be TYPE_TRAIN or TYPE_EVAL")
    return _DECODED_TYPES[value]


def _encode_outcome(outcome: EpisodeOutcome) -> episode_pb2.EpisodeOutcome:
    message = episode_pb2.EpisodeOutcome(
        reward=outcome.reward,
        step_rewards=outcome.step_rewards,
        metrics=dict(outcome.metrics),
        metadata_json=outcome.metadata_json,
    )
    if outcome.is_success is not None:
        message.is_success = outcome.is_success
    return message


def _waiting_for(episode: Episode) -> str:
    if episode.state is EpisodeState.QUEUED:
        return f"an agent that claims from queue {episode.queue}"
    if episode.state is EpisodeState.CLAIMED:
        return f"{episode.client_id}, which plays it"
    return ""


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
