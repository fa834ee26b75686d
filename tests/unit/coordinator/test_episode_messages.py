"""Requests about episodes are held to their ranges and defaults; answers tell all of an episode."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tinsmith.rpc.durations import encode_duration
from tinsmith.v1 import episode_pb2
from tinsmith_coordinator.rpc import codec
from tinsmith_coordinator.store.records import (
    Episode,
    EpisodeOutcome,
    EpisodeState,
    EpisodeType,
    Lease,
    NoEpisode,
)
from tinsmith_runtime.errors import InvalidFieldError, NotFiniteInputError

Message = episode_pb2.Episode
HANDLE = "projects/p/samplingSessions/s"


def new_episode(**fields: Any) -> Any:
    request = episode_pb2.CreateEpisodesRequest(episodes=[Message(**fields)])
    (found,) = codec.decode_new_episodes(request, "p")
    return found


def claim(**fields: Any) -> Any:
    return codec.decode_claim(episode_pb2.ClaimEpisodeRequest(**{"client_id": "c", **fields}), "p")


def outcome(**fields: Any) -> EpisodeOutcome:
    message = episode_pb2.EpisodeOutcome(**fields)
    return codec.decode_outcome(episode_pb2.SubmitEpisodeRequest(outcome=message))


def test_defaults_of_an_episode_are_filled_in() -> None:
    plain = new_episode()
    assert (plain.queue, plain.type, plain.max_attempts) == ("default", EpisodeType.TRAIN, 4)
    assert new_episode(max_attempts=1).max_attempts == 1
    given = new_episode(
        queue="q",
        type=Message.TYPE_EVAL,
        max_attempts=100,
        task_id="t",
        task_json='{"a": 1}',
        sampling_session=HANDLE,
        model="m",
    )
    assert (given.queue, given.type, given.max_attempts) == ("q", EpisodeType.EVAL, 100)
    assert (given.task_id, given.task_json) == ("t", '{"a": 1}')
    assert (given.sampling_session, given.model) == (HANDLE, "m")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_attempts": 101}, "max_attempts"),
        ({"max_attempts": -1}, "max_attempts"),
        ({"sampling_session": HANDLE.replace("/p/", "/q/")}, "sampling_session"),
        ({"sampling_session": "nonsense"}, "sampling_session"),
        ({"queue": "no queue"}, "queue"),
        ({"type": 7}, "type"),
        ({"task_json": "{"}, "task_json"),
        ({"task_json": "NaN"}, "task_json"),
        ({"task_json": "[" * 100_000}, "task_json"),
        ({"task_json": f'"{"a" * (256 * 2**10 - 1)}"'}, "task_json"),
        ({"task_id": "a" * 1025}, "task_id"),
    ],
)
def test_an_episode_out_of_range_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as refusal:
        new_episode(**fields)
    assert refusal.value.metadata["field"] == f"episodes[0].{field}"


def test_json_has_a_largest_size_and_any_number() -> None:
    for text in (f'"{"a" * (256 * 2**10 - 2)}"', "9" * 10_000, ""):
        assert new_episode(task_json=text).task_json == text


def test_a_request_registers_one_to_a_thousand() -> None:
    for number in (0, 1001):
        request = episode_pb2.CreateEpisodesRequest(episodes=[Message()] * number)
        with pytest.raises(InvalidFieldError):
            codec.decode_new_episodes(request, "p")
    request = episode_pb2.CreateEpisodesRequest(episodes=[Message()] * 1000)
    assert len(codec.decode_new_episodes(request, "p")) == 1000


def test_defaults_of_a_claim_are_filled_in() -> None:
    plain = claim()
    assert (plain.key.project, plain.key.queue, plain.client_id) == ("p", "default", "c")
    assert (plain.lease_duration_s, plain.timeout_s, plain.max_held) == (60, 0, 0)
    given = claim(
        lease_duration=encode_duration(1), timeout=encode_duration(7), max_held=3, queue="q"
    )
    assert (given.lease_duration_s, given.timeout_s, given.max_held) == (1, 7, 3)
    assert given.key.queue == "q"
    assert claim(lease_duration=encode_duration(86_400)).lease_duration_s == 86_400
    # A wait ends before proxies end it.
    assert claim(timeout=encode_duration(60)).timeout_s == 20


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"client_id": ""}, "client_id"),
        ({"lease_duration": encode_duration(0.5)}, "lease_duration"),
        ({"lease_duration": encode_duration(86_401)}, "lease_duration"),
        ({"timeout": encode_duration(-0.5)}, "timeout"),
        ({"max_held": -1}, "max_held"),
    ],
)
def test_a_claim_out_of_range_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as refusal:
        claim(**fields)
    assert refusal.value.metadata["field"] == field


def test_an_outcome_is_a_reward_or_the_sum_of_its_steps() -> None:
    assert outcome(reward=0.0).reward == 0
    assert outcome(step_rewards=[0.5, 0.25]).reward == 0.75
    both = outcome(reward=9.0, step_rewards=[0.5], metrics={"a": 1.0}, metadata_json="{}")
    assert (both.reward, both.step_rewards) == (9, (0.5,))
    assert (both.metrics, both.metadata_json, both.is_success) == ({"a": 1}, "{}", None)
    assert outcome(reward=1.0, is_success=False).is_success is False
    most = outcome(step_rewards=[1.0] * 10_000, metrics={str(n): 1.0 for n in range(256)})
    assert (most.reward, len(most.metrics)) == (10_000, 256)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "outcome"),
        ({"metrics": {"a": 1.0}}, "outcome"),
        ({"step_rewards": [0.0] * 10_001}, "outcome.step_rewards"),
        ({"reward": 1.0, "metrics": {str(n): 1.0 for n in range(257)}}, "outcome.metrics"),
        ({"reward": 1.0, "metrics": {"a" * 1025: 1.0}}, "outcome.metrics"),
        ({"reward": math.nan}, "outcome.reward"),
        ({"step_rewards": [math.inf]}, "outcome.step_rewards"),
        ({"step_rewards": [1.7e308, 1.7e308]}, "outcome.step_rewards"),
        ({"reward": 1.0, "metrics": {"a": math.nan}}, "outcome.metrics"),
        ({"reward": 1.0, "metadata_json": "{"}, "outcome.metadata_json"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_outcome_out_of_range_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises((InvalidFieldError, NotFiniteInputError)) as refusal:
        outcome(**fields)
    assert refusal.value.metadata["field"] == field


def test_episodes_to_cancel_are_of_the_project() -> None:
    name = "projects/p/episodes/e"

    def cancelled(*names: str) -> list[str]:
        request = episode_pb2.CancelEpisodesRequest(names=names)
        return [str(each) for each in codec.decode_cancelled(request, "p")]

    assert (cancelled(), cancelled(name)) == ([], [name])
    assert len(cancelled(*[name] * 1000)) == 1000
    for names, field in (
        ([name] * 1001, "names"),
        ([name, "projects/q/episodes/e"], "names[1]"),
        (["nonsense"], "names[0]"),
    ):
        with pytest.raises(InvalidFieldError) as refusal:
            cancelled(*names)
        assert refusal.value.metadata["field"] == field


def test_a_watch_and_a_list_are_held_to_what_there_is() -> None:
    assert codec.decode_revision(0) == 0
    assert codec.decode_states([Message.STATE_DEAD]) == [EpisodeState.DEAD]
    with pytest.raises(InvalidFieldError):
        codec.decode_revision(-1)
    with pytest.raises(InvalidFieldError):
        codec.decode_states([Message.STATE_DEAD, Message.STATE_UNSPECIFIED])


EPISODE = Episode(
    serial=1,
    project="p",
    episode_id="e",
    queue="q",
    type=EpisodeType.EVAL,
    state=EpisodeState.CLAIMED,
    task_id="t",
    task_json="{}",
    sampling_session=HANDLE,
    model="m",
    num_attempts=2,
    max_attempts=4,
    client_id="agent-1",
    lease_expire_s=0.0,
    lease_duration_s=60.0,
    outcome=EpisodeOutcome(
        reward=0.5, step_rewards=(0.25,), is_success=False, metrics={"a": 1.0}, metadata_json="{}"
    ),
    failures=("lost",),
    num_model_calls=3,
    trajectory_bytes=9,
    revision=7,
    create_time_s=5.0,
    end_time_s=0.0,
)


def test_an_episode_is_told_whole() -> None:
    told = codec.encode_episode(EPISODE)
    assert (told.name, told.queue, told.type) == ("projects/p/episodes/e", "q", Message.TYPE_EVAL)
    assert (told.state, told.task_id, told.task_json) == (Message.STATE_CLAIMED, "t", "{}")
    assert (told.sampling_session, told.model, told.client_id) == (HANDLE, "m", "agent-1")
    assert (told.num_attempts, told.max_attempts, told.num_model_calls) == (2, 4, 3)
    assert (list(told.failures), told.revision, told.create_time.seconds) == (["lost"], 7, 5)
    # A time of 0 is one, and so is a lack of success.
    assert told.HasField("lease_expire_time")
    assert told.HasField("end_time")
    assert told.outcome.HasField("is_success")
    assert (told.outcome.reward, list(told.outcome.step_rewards)) == (0.5, [0.25])
    assert (told.outcome.metrics, told.outcome.metadata_json) == ({"a": 1}, "{}")
    told = codec.encode_episode(
        replace(EPISODE, lease_expire_s=None, end_time_s=None, outcome=None)
    )
    for field in ("lease_expire_time", "end_time", "outcome"):
        assert not told.HasField(field)
    open_outcome = replace(EPISODE.outcome or EpisodeOutcome(reward=0.0), is_success=None)
    told = codec.encode_episode(replace(EPISODE, outcome=open_outcome))
    assert not told.outcome.HasField("is_success")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (EpisodeState.QUEUED, "an agent that claims from queue q"),
        (EpisodeState.CLAIMED, "agent-1, which plays it"),
        (EpisodeState.SUBMITTED, ""),
        (EpisodeState.DEAD, ""),
        (EpisodeState.CANCELLED, ""),
    ],
)
def test_an_episode_says_what_it_waits_for(state: EpisodeState, words: str) -> None:
    assert codec.encode_episode(replace(EPISODE, state=state)).waiting_for == words


def test_a_claim_is_answered_with_a_lease_or_when_to_ask_again() -> None:
    lease = codec.encode_claimed(Lease(EPISODE, "token", "key"), timeout_s=0.0)
    assert (lease.episode.name, lease.lease_token, lease.api_key) == (
        "projects/p/episodes/e",
        "token",
        "key",
    )
    # A caller that waited may ask again at once.
    for timeout_s, retry_s in ((0.0, 1), (5.0, 0)):
        nothing = codec.encode_claimed(NoEpisode("an episode"), timeout_s=timeout_s)
        assert not nothing.HasField("episode")
        assert (nothing.waiting_for, nothing.retry_after.seconds) == ("an episode", retry_s)


@pytest.mark.parametrize("decode", [codec.decode_token, codec.decode_key])
def test_a_secret_is_required(decode: Any) -> None:
    with pytest.raises(InvalidFieldError, match="is required"):
        decode("")
