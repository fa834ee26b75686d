"""Batches of rollouts as messages and back: what is asked for, and what became of it."""

from __future__ import annotations

import secrets
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith.rollouts.group_plan import GroupConfig, Play
from tinsmith.rollouts.groups import (
    GroupReport,
    GroupResult,
    UnusedPlay,
    list_dropped,
    make_group,
)
from tinsmith.rollouts.machine import RolloutConfig
from tinsmith.rollouts.trajectory import Trajectory
from tinsmith.rollouts.trajectory_codec import decode_trajectory
from tinsmith.rpc.codec import encode_sampling_params
from tinsmith.rpc.durations import encode_duration
from tinsmith.types import SamplingParams
from tinsmith.v1 import rollout_pb2

_COUNTS = (
    "num_requested",
    "num_begun",
    "num_completed",
    "num_replaced",
    "num_lost",
    "num_cancelled",
    "num_dropped_groups",
    "num_dropped_episodes",
)


@dataclass(frozen=True, slots=True)
class EnvironmentTask:
    """Something to play on the server: one group of episodes."""

    seed: int = 0
    """Makes the episodes repeatable."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Overrides default settings of the environment."""


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """One play of an episode that ended on the server."""

    task: EnvironmentTask
    task_index: int
    member_index: int
    attempt: int
    trajectory: Trajectory | None
    """What was played; None if the play failed for infrastructure."""
    failure_reason: str = ""
    """One word; empty unless it failed."""
    failure: str = ""
    unfinished: Trajectory | None = None
    """What was played until the play failed; None where nothing is known of it."""


def encode_request(
    *,
    parent: str,
    sampling_session: str,
    environment: str,
    tasks: Sequence[EnvironmentTask],
    config: RolloutConfig,
    params: SamplingParams,
    groups: GroupConfig,
    batch_key: str,
    min_version: int,
    max_staleness: int,
    timeout_s: float,
) -> rollout_pb2.GenerateRolloutsRequest:
    """Return the request of a batch; a seed is drawn where none was given."""
    request = rollout_pb2.GenerateRolloutsRequest(
        parent=parent,
        request_id=str(uuid.uuid4()),
        sampling_session=sampling_session,
        environment=environment,
        params=encode_sampling_params(params, seed=secrets.randbits(63)),
        limits=_encode_limits(config),
        groups=rollout_pb2.RolloutGroupConfig(
            group_size=groups.group_size,
            max_concurrency=groups.max_concurrency,
            max_replacements=groups.max_replacements,
            min_group_size=groups.min_group_size,
            num_groups=groups.num_groups,
            over_sampling_factor=groups.over_sampling_factor,
        ),
        batch_key=batch_key,
        min_version=min_version,
        max_staleness=max_staleness,
        timeout=encode_duration(timeout_s),
    )
    for task in tasks:
        message = request.tasks.add(seed=task.seed)
        if task.config:
            message.config.update(dict(task.config))
    return request


def decode_episode(
    message: rollout_pb2.RolloutEpisode, tasks: Sequence[EnvironmentTask], *, batch_key: str = ""
) -> PlayedEpisode:
    """Return the value of a play that ended.

    Args:
        message: The play.
        tasks: What is played.
        batch_key: Tells the random draws of the batch from those of others.
    """
    has_finished = message.state == rollout_pb2.RolloutEpisode.STATE_FINISHED
    play = Play(message.task_index, message.member_index, message.attempt)
    played = None
    if message.HasField("trajectory"):
        try:
            played = decode_trajectory(message.trajectory, key=play.key(batch_key))
        except ValueError:
            # Of a play that counts for nothing, a newer server may say what is not known here.
            if has_finished:
                raise
    return PlayedEpisode(
        task=tasks[message.task_index],
        task_index=message.task_index,
        member_index=message.member_index,
        attempt=message.attempt,
        trajectory=played if has_finished else None,
        failure_reason=message.failure_reason,
        failure=message.failure,
        unfinished=None if has_finished else played,
    )


def decode_groups(
    response: rollout_pb2.GenerateRolloutsResponse,
    tasks: Sequence[EnvironmentTask],
    finished: Mapping[tuple[int, int], Trajectory],
    failed: Sequence[UnusedPlay[EnvironmentTask]],
    config: GroupConfig,
) -> GroupResult[EnvironmentTask]:
    """Return the groups that `run_groups` would have returned.

    Args:
        response: Says which episodes were taken.
        tasks: What was played.
        finished: Episodes by task and member.
        failed: Plays that failed, in the order of their ends.
        config: Sizes and limits.
    """
    report = decode_report(response.report)
    groups = tuple(
        make_group(
            tasks[group.task_index],
            tuple(finished[group.task_index, member] for member in group.member_indices),
            config,
        )
        for group in response.groups
    )
    for group in groups:
        report.reasons.update(each.reason.value for each in group.trajectories)
    taken = {group.task_index: tuple(group.member_indices) for group in response.groups}
    return GroupResult(groups, report, (*failed, *list_dropped(tasks, taken, finished)))


def decode_report(message: rollout_pb2.RolloutReport) -> GroupReport:
    """Return what became of the episodes."""
    return GroupReport(
        **{name: getattr(message, name) for name in _COUNTS},
        failures=Counter(message.failures),
        last_failure=message.last_failure,
    )


def _encode_limits(config: RolloutConfig) -> rollout_pb2.RolloutLimits:
    limits = rollout_pb2.RolloutLimits(
        max_turns=config.max_turns,
        max_tokens=config.max_tokens,
        max_tokens_per_turn=config.max_tokens_per_turn,
        max_context_tokens=config.max_context_tokens,
    )
    if config.split_turns:
        limits.history_rewrite = rollout_pb2.RolloutLimits.HISTORY_REWRITE_SPLIT_TURNS
    elif config.append_only:
        limits.history_rewrite = rollout_pb2.RolloutLimits.HISTORY_REWRITE_APPEND
    return limits
