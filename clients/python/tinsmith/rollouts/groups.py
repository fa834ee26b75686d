"""Groups of episodes: G plays for each of P tasks, at once.

An episode that failed for infrastructure, its environment or the sampler, is played again in a
fresh instance. After a bounded number of times it leaves its group. It never counts as a
reward of zero. What was replaced and dropped is in the report, with the reasons.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from tinsmith.rollouts.advantages import center_rewards
from tinsmith.rollouts.datums import DatumArrays, trajectory_arrays
from tinsmith.rollouts.errors import NoRolloutsError, SamplerFailedError
from tinsmith.rollouts.interfaces import EnvironmentInstance
from tinsmith.rollouts.runner import RolloutRunner
from tinsmith.rollouts.trajectory import Trajectory

logger = logging.getLogger(__name__)

TaskT = TypeVar("TaskT")
SAMPLER_FAILED = "sampler_failed"
NOTHING_SAMPLED = "nothing_sampled"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """How many episodes are played, and how failures are met."""

    group_size: int = 8
    """Episodes of one task."""
    max_concurrency: int = 64
    """Episodes that run at once."""
    max_replacements: int = 2
    """Times that one episode is played again after an infrastructure failure."""
    min_group_size: int = 2
    """Groups with fewer episodes are dropped: there is nothing to compare with."""

    def __post_init__(self) -> None:
        for name in ("group_size", "max_concurrency", "min_group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_replacements < 0:
            raise ValueError(f"max_replacements must not be negative, got {self.max_replacements}")
        if self.min_group_size > self.group_size:
            raise ValueError("min_group_size must not be above group_size")


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup(Generic[TaskT]):
    """The episodes of one task that may be trained on."""

    task: TaskT
    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...]
    """Reward minus the mean of the group, in the order of the trajectories."""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards in the order of the trajectories."""
        return tuple(trajectory.reward for trajectory in self.trajectories)

    def arrays(self) -> list[DatumArrays]:
        """Return the training sequences of the group."""
        return [
            arrays
            for trajectory, advantage in zip(self.trajectories, self.advantages, strict=True)
            for arrays in trajectory_arrays(trajectory, advantage)
        ]


@dataclass(slots=True)
class GroupReport:
    """What became of the episodes."""

    num_requested: int = 0
    num_completed: int = 0
    """Episodes in the groups that were returned."""
    num_replaced: int = 0
    """Plays that failed and were played again."""
    num_lost: int = 0
    """Episodes that failed until no replacement was left."""
    num_dropped_groups: int = 0
    """Groups with fewer than `min_group_size` episodes."""
    num_dropped_episodes: int = 0
    """Good episodes of dropped groups."""
    failures: Counter[str] = field(default_factory=Counter)
    """Plays that failed, by reason."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Completed episodes by the reason of their end."""
    last_failure: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class GroupResult(Generic[TaskT]):
    """Groups in the order of their tasks, and the report."""

    groups: tuple[RolloutGroup[TaskT], ...]
    report: GroupReport


async def run_groups(
    runner: RolloutRunner,
    tasks: Sequence[TaskT],
    create_instance: Callable[[TaskT], Awaitable[EnvironmentInstance]],
    config: GroupConfig | None = None,
    *,
    batch_key: str = "",
) -> GroupResult[TaskT]:
    """Play `group_size` episodes of each task.

    Args:
        runner: Plays an episode.
        tasks: What is played.
        create_instance: Creates a fresh instance of a task.
        config: Sizes and limits.
        batch_key: Tells the random draws of this batch from those of others.

    Raises:
        NoRolloutsError: If not one group survived.
        TemplateRewritesHistoryError: See `RolloutRunner.run`.
        ChatTemplateError: See `RolloutRunner.run`.
    """
    config = config or GroupConfig()
    report = GroupReport(num_requested=len(tasks) * config.group_size)
    places = asyncio.Semaphore(config.max_concurrency)

    async def play(task: TaskT, key: str) -> Trajectory | None:
        for attempt in range(config.max_replacements + 1):
            async with places:
                trajectory = await _play_once(
                    runner, lambda: create_instance(task), f"{key}/{attempt}", report
                )
            if trajectory is not None:
                if trajectory.num_sampled_tokens:
                    return trajectory
                # Another play would begin with the same context.
                problem = f"the first context leaves no room ({trajectory.reason.value})"
                _report_failure(report, NOTHING_SAMPLED, problem)
                break
            report.num_replaced += attempt < config.max_replacements
        report.num_lost += 1
        return None

    try:
        async with asyncio.TaskGroup() as playing:
            plays_PG = [
                [
                    playing.create_task(play(task, f"{batch_key}/{p}/{g}"))
                    for g in range(config.group_size)
                ]
                for p, task in enumerate(tasks)
            ]
    except ExceptionGroup as errors:
        # Errors of the configuration; all episodes meet the same one.
        raise errors.exceptions[0] from errors
    groups = []
    for task, plays_G in zip(tasks, plays_PG, strict=True):
        finished = tuple(t for t in (play.result() for play in plays_G) if t is not None)
        if len(finished) < config.min_group_size:
            report.num_dropped_groups += 1
            report.num_dropped_episodes += len(finished)
            continue
        report.num_completed += len(finished)
        report.reasons.update(trajectory.reason.value for trajectory in finished)
        groups.append(_make_group(task, finished, config))
    if tasks and not groups:
        raise NoRolloutsError(
            f"not one group of {report.num_requested} episodes survived; failures: "
            f"{dict(report.failures)}; the last was: {report.last_failure}"
        )
    return GroupResult(tuple(groups), report)


async def _play_once(
    runner: RolloutRunner,
    create_instance: Callable[[], Awaitable[EnvironmentInstance]],
    key: str,
    report: GroupReport,
) -> Trajectory | None:
    """Return an episode that says something about the policy, or None."""
    try:
        trajectory = await runner.run(create_instance, episode_key=key)
    except SamplerFailedError as error:
        _report_failure(report, SAMPLER_FAILED, str(error))
        return None
    if trajectory.reason.is_infrastructure:
        _report_failure(report, trajectory.reason.value, trajectory.failure)
        return None
    return trajectory


def _report_failure(report: GroupReport, reason: str, problem: str) -> None:
    report.failures[reason] += 1
    report.last_failure = problem
    logger.warning("episode left its group", extra={"reason": reason})


def _make_group(
    task: TaskT, trajectories: tuple[Trajectory, ...], config: GroupConfig
) -> RolloutGroup[TaskT]:
    rewards_PG = np.asarray([[trajectory.reward for trajectory in trajectories]])
    advantages = center_rewards(rewards_PG, min_group_size=config.min_group_size)[0]
    return RolloutGroup(task, trajectories, tuple(float(value) for value in advantages))
