"""Requests for rollouts are held to their ranges and defaults; answers tell all of a batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tinsmith.rollouts import GroupConfig, GroupReport, Play
from tinsmith.rpc.durations import encode_duration
from tinsmith.v1 import rollout_pb2
from tinsmith_coordinator.rpc import rollout_codec
from tinsmith_coordinator.store.rollout_records import (
    Batch,
    BatchState,
    BatchUpdate,
    EndedPlay,
    NewBatch,
)
from tinsmith_runtime.errors import (
    AbortedError,
    EnvironmentNotFoundError,
    InvalidFieldError,
    SamplingSessionNotFoundError,
)

Groups, Limits = rollout_pb2.RolloutGroupConfig, rollout_pb2.RolloutLimits
Request = rollout_pb2.GenerateRolloutsRequest
HANDLE, ENVIRONMENT = "projects/p/samplingSessions/s", "projects/p/environments/e"


def request_of(num_tasks: int = 2, **fields: Any) -> Request:
    request = Request(**{"sampling_session": HANDLE, "environment": ENVIRONMENT, **fields})
    for seed in range(num_tasks):
        request.tasks.add(seed=seed)
    return request


def batch_of(num_tasks: int = 2, **fields: Any) -> NewBatch:
    return rollout_codec.decode_new_batch(request_of(num_tasks, **fields), "p", seed=5)


def test_defaults_of_a_batch_are_filled_in() -> None:
    plain = batch_of()
    assert (plain.sampling_session, plain.environment) == (HANDLE, ENVIRONMENT)
    assert (plain.num_tasks, plain.groups, plain.timeout_s) == (2, GroupConfig(), 3600)
    assert plain.num_tokens == 2 * 8 * 4096
    # Kept as it came but for a seed, so that it is played the same again.
    kept = Request.FromString(plain.content)
    assert (kept.params.seed, len(kept.tasks)) == (5, 2)
    seeded = request_of()
    seeded.params.seed = 0
    decoded = rollout_codec.decode_new_batch(seeded, "p", seed=5)
    assert Request.FromString(decoded.content).params.seed == 0
    largest = batch_of(4096, timeout=encode_duration(86_400), max_staleness=2**62)
    assert (largest.num_tasks, largest.timeout_s) == (4096, 86_400)
    assert batch_of(timeout=encode_duration(1)).timeout_s == 1


def test_groups_are_as_they_are_asked_for() -> None:
    given = {
        "group_size": 1024,
        "max_concurrency": 1024,
        "max_replacements": 16,
        "min_group_size": 1024,
        "num_groups": 2,
        "over_sampling_factor": 16.0,
    }
    batch = batch_of(groups=Groups(**given), limits=Limits(max_tokens=3))
    assert batch.groups == GroupConfig(**given)  # type: ignore[arg-type]
    assert batch.num_tokens == 2 * 1024 * 16 * 3
    # None is not the default where a group is played without replacements.
    none = batch_of(groups=Groups(max_replacements=0, group_size=1)).groups
    assert (none.max_replacements, none.group_size, none.min_group_size) == (0, 1, 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"groups": Groups(group_size=1025)}, "groups.group_size"),
        ({"groups": Groups(group_size=-1)}, "groups.group_size"),
        ({"groups": Groups(max_concurrency=1025)}, "groups.max_concurrency"),
        ({"groups": Groups(max_replacements=17)}, "groups.max_replacements"),
        ({"groups": Groups(max_replacements=-1)}, "groups.max_replacements"),
        ({"groups": Groups(group_size=2, min_group_size=3)}, "groups.min_group_size"),
        ({"groups": Groups(num_groups=3)}, "groups.num_groups"),
        ({"groups": Groups(over_sampling_factor=0.5)}, "groups.over_sampling_factor"),
        ({"groups": Groups(over_sampling_factor=16.5)}, "groups.over_sampling_factor"),
        ({"groups": Groups(over_sampling_factor=float("nan"))}, "groups.over_sampling_factor"),
        ({"limits": Limits(max_turns=-1)}, "limits.max_turns"),
        ({"limits": Limits(max_context_tokens=2**24 + 1)}, "limits.max_context_tokens"),
        ({"limits": Limits(history_rewrite=9)}, "limits.history_rewrite"),  # type: ignore[arg-type]
        ({"timeout": encode_duration(0.5)}, "timeout"),
        ({"timeout": encode_duration(86_401)}, "timeout"),
        ({"min_version": -1}, "min_version"),
        ({"max_staleness": -1}, "max_staleness"),
        ({"batch_key": "a" * 1025}, "batch_key"),
        ({"num_tasks": 0}, "tasks"),
        ({"num_tasks": 4097}, "tasks"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_batch_out_of_range_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as refusal:
        batch_of(**fields)
    assert refusal.value.metadata["field"] == field


def test_a_batch_of_strange_things_is_refused() -> None:
    with pytest.raises(SamplingSessionNotFoundError):
        batch_of(sampling_session=HANDLE.replace("/p/", "/q/"))
    with pytest.raises(EnvironmentNotFoundError):
        batch_of(environment=ENVIRONMENT.replace("/p/", "/q/"))
    request = request_of()
    request.params.output_format.structural_tag = "{}"
    with pytest.raises(InvalidFieldError, match="a JSON schema or a regex"):
        rollout_codec.decode_new_batch(request, "p", seed=5)
    request = request_of()
    request.tasks[1].config.update({"text": "a" * 64 * 2**10})
    with pytest.raises(InvalidFieldError) as refusal:
        rollout_codec.decode_new_batch(request, "p", seed=5)
    assert refusal.value.metadata["field"] == "tasks[1].config"


def test_limits_and_tasks_are_read_back() -> None:
    limits = Limits(
        max_turns=1,
        max_tokens=2,
        max_tokens_per_turn=3,
        max_context_tokens=2**24,
        history_rewrite=Limits.HISTORY_REWRITE_APPEND,
    )
    request = request_of(limits=limits)
    request.tasks[1].config.update({"a": [1.5, "b"]})
    config = rollout_codec.decode_config(request)
    assert (config.max_turns, config.max_tokens, config.max_tokens_per_turn) == (1, 2, 3)
    assert (config.max_context_tokens, config.append_only, config.split_turns) == (
        2**24,
        True,
        False,
    )
    request.limits.history_rewrite = Limits.HISTORY_REWRITE_SPLIT_TURNS
    split = rollout_codec.decode_config(request)
    assert (split.append_only, split.split_turns) == (False, True)
    tasks = rollout_codec.decode_tasks(request)
    assert [(task.seed, task.config) for task in tasks] == [(0, {}), (1, {"a": [1.5, "b"]})]


BATCH = Batch(
    serial=1,
    project="p",
    batch_id="b",
    key_id="k",
    num_tasks=2,
    groups=GroupConfig(),
    state=BatchState.PLAYING,
    report=GroupReport(
        num_requested=9, num_lost=2, failures=Counter(lost=2), last_failure="x" * 2000
    ),
    taken={0: (0, 1), 1: (2,)},
    failure=None,
    num_bytes=5,
    revision=7,
    deadline_s=20.0,
    create_time_s=10.0,
    end_time_s=None,
)


def metadata_of(operation: Any) -> rollout_pb2.GenerateRolloutsMetadata:
    metadata = rollout_pb2.GenerateRolloutsMetadata()
    assert operation.metadata.Unpack(metadata)
    return metadata


def test_a_batch_is_an_operation_that_ends_as_it_did() -> None:
    playing = rollout_codec.encode_operation(BATCH, "a free place")
    assert (playing.name, playing.done) == (
        "projects/p/rolloutBatches/b/operations/generate",
        False,
    )
    assert playing.WhichOneof("result") is None
    told = metadata_of(playing)
    assert (told.rollout_batch, told.waiting_for) == ("projects/p/rolloutBatches/b", "a free place")
    assert (told.revision, told.create_time.seconds, told.deadline.seconds) == (7, 10, 20)
    assert not told.HasField("end_time")
    assert (told.report.num_requested, told.report.num_lost) == (9, 2)
    assert told.report.failures == {"lost": 2}
    # What an environment wrote is cut.
    assert told.report.last_failure == "x" * 1024

    done = rollout_codec.encode_operation(
        replace(BATCH, state=BatchState.COMPLETED, end_time_s=0.0), ""
    )
    response = rollout_pb2.GenerateRolloutsResponse()
    assert done.done
    assert done.response.Unpack(response)
    assert [(each.task_index, list(each.member_indices)) for each in response.groups] == [
        (0, [0, 1]),
        (1, [2]),
    ]
    assert response.report.num_requested == 9
    assert metadata_of(done).HasField("end_time")

    failed = replace(BATCH, state=BatchState.FAILED, failure=AbortedError("given up"))
    operation = rollout_codec.encode_operation(failed, "")
    assert (operation.done, operation.error.message) == (True, "given up")


def test_a_watch_is_told_of_the_end_with_the_last_episode() -> None:
    done = replace(BATCH, state=BatchState.COMPLETED)
    ended = (EndedPlay(play=Play(1, 2, 3), revision=6),)
    before = rollout_codec.encode_update(BatchUpdate(done, ended, 6), "")
    assert (before.revision, before.operation.done) == (6, False)
    assert before.operation.WhichOneof("result") is None
    (episode,) = before.episodes
    assert (episode.task_index, episode.member_index, episode.attempt) == (1, 2, 3)
    assert (episode.state, episode.revision) == (rollout_pb2.RolloutEpisode.STATE_FINISHED, 6)
    last = rollout_codec.encode_update(BatchUpdate(done, (), 7), "")
    assert (last.operation.done, last.operation.WhichOneof("result")) == (True, "response")


def test_a_play_that_failed_says_why_and_what_there_was() -> None:
    content = rollout_pb2.RolloutEpisode().trajectory
    content.turns.add(reward=0.5)
    play = EndedPlay(
        play=Play(0, 0),
        reason="lost",
        problem="the worker is gone",
        content=content.SerializeToString(),
    )
    told = rollout_codec.encode_ended(play)
    assert told.state == rollout_pb2.RolloutEpisode.STATE_FAILED
    assert (told.failure_reason, told.failure) == ("lost", "the worker is gone")
    assert told.trajectory.turns[0].reward == 0.5
