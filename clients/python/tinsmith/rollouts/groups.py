"""Groups of episodes: G plays for each of P tasks, as many at once as `GroupPlan` lets begin.

An episode that failed for infrastructure, its environment or the sampler, is played again in a
fresh instance. After a bounded number of times it leaves its group. It never counts as a
reward of zero. What was replaced and dropped is in the report, with the reasons.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from tinsmith.rollouts.advantages import center_rewards
from tinsmith.rollouts.datums import DatumArrays, trajectory_arrays
from tinsmith.rollouts.errors import NoRolloutsError, SamplerFailedError
from tinsmith.rollouts.group_plan import GroupConfig, GroupPlan, Play
from tinsmith.rollouts.interfaces import EnvironmentInstance
from tinsmith.rollouts.runner import RolloutRunner
from tinsmith.rollouts.trajectory import Trajectory

logger = logging.getLogger(__name__)

TaskT = TypeVar("TaskT")
SAMPLER_FAILED = "sampler_failed"
NOTHING_SAMPLED = "nothing_sampled"
MAX_FAILED_BYTES = 1 << 18
"""Tokens, texts and pictures of a play that failed; of a longer one nothing is kept."""
_TOKEN_BYTES = 28
"""A token with its log-probability, version and turn."""


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
    num_begun: int = 0
    """Plays that were begun."""
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
    num_cancelled: int = 0
    """Plays that were given up because enough others were complete."""
    failures: Counter[str] = field(default_factory=Counter)
    """Plays that failed, by reason."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Completed episodes by the reason of their end."""
    last_failure: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class UnusedPlay(Generic[TaskT]):
    """A play that is in no group: one that failed, or a good one whose group was dropped."""

    task: TaskT
    trajectory: Trajectory
    """Of one that failed, what was played until then."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupResult(Generic[TaskT]):
    """Groups in the order of their tasks, and the report."""

    groups: tuple[RolloutGroup[TaskT], ...]
    report: GroupReport
    unused: tuple[UnusedPlay[TaskT], ...] = ()
    """To look at, not to train on.

    Without those whose sampler failed, that were given up, or that were too long to keep.
    """


def without_groups(unused: Sequence[UnusedPlay[TaskT]]) -> GroupResult[TaskT]:
    """Return what was played where not one group survived."""
    return GroupResult((), GroupReport(), tuple(unused))


async def run_groups(
    runner: RolloutRunner,
    tasks: Sequence[TaskT],
    create_instance: Callable[[TaskT], Awaitable[EnvironmentInstance]],
    config: GroupConfig | None = None,
    *,
    batch_key: str = "",
) -> GroupResult[TaskT]:
    """Play `group_size` episodes of each task; `GroupPlan` says which episodes when.

    Args:
        runner: Plays an episode.
        tasks: What is played.
        create_instance: Creates a fresh instance of a task.
        config: Sizes and limits.
        batch_key: Tells the random draws of this batch from those of others.

    Raises:
        NoRolloutsError: If not one group survived.
        ValueError: If more groups are wanted than there are tasks.
        TemplateRewritesHistoryError: See `RolloutRunner.run`.
        ChatTemplateError: See `RolloutRunner.run`.
    """
    config = config or GroupConfig()
    plan = GroupPlan(len(tasks), config)
    report = GroupReport(num_requested=plan.num_wanted * config.group_size)
    finished: dict[tuple[int, int], Trajectory] = {}
    failed: list[UnusedPlay[TaskT]] = []
    running: dict[asyncio.Task[Trajectory | PlayFailure], Play] = {}

    async def play_once(play: Play) -> Trajectory | PlayFailure:
        create = partial(create_instance, tasks[play.task])
        try:
            trajectory = await runner.run(create, episode_key=play.key(batch_key))
        except SamplerFailedError as error:
            return PlayFailure(SAMPLER_FAILED, str(error))
        return failure_of(trajectory) or trajectory

    try:
        while True:
            running |= {asyncio.create_task(play_once(play)): play for play in plan.begin()}
            if plan.is_done:
                break
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for ended in sorted(done, key=running.__getitem__):
                play = running.pop(ended)
                if play not in plan.running:
                    continue
                outcome = ended.result()
                if isinstance(outcome, PlayFailure):
                    note_failure(report, outcome)
                    if outcome.trajectory is not None:
                        failed.append(UnusedPlay(tasks[play.task], outcome.trajectory))
                    plan.fail(play, may_repeat=outcome.may_repeat)
                else:
                    finished[play.task, play.member] = outcome
                    plan.finish(play)
            given_up = [episode for episode, play in running.items() if play not in plan.running]
            report.num_cancelled += len(given_up)
            for episode in given_up:
                episode.cancel()
    finally:
        for episode in running:
            episode.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return gather_groups(tasks, plan, finished, failed, config, report)


@dataclass(frozen=True, slots=True)
class PlayFailure:
    """Why a play says nothing about the policy.

    Attributes:
        reason: One word.
        problem: What failed, as a sentence.
        may_repeat: Whether another play could end otherwise.
        trajectory: What was played until then; None where nothing is known of it, or it is long.
    """

    reason: str
    problem: str
    may_repeat: bool = True
    trajectory: Trajectory | None = field(default=None, repr=False)


def failure_of(trajectory: Trajectory) -> PlayFailure | None:
    """Return why an episode that ended is not one of its group; None if it is."""
    if trajectory.reason.is_infrastructure:
        return PlayFailure(
            trajectory.reason.value, trajectory.failure, trajectory=_if_short(trajectory)
        )
    if not trajectory.num_sampled_tokens:
        # Another play would begin with the same context.
        problem = f"the first context leaves no room ({trajectory.reason.value})"
        told = replace(trajectory, failure=problem)
        return PlayFailure(NOTHING_SAMPLED, problem, may_repeat=False, trajectory=_if_short(told))
    return None


def _if_short(trajectory: Trajectory) -> Trajectory | None:
    """Return a play that failed, if it is short: a client holds it, and a server stores it."""
    num_bytes = sum(
        _TOKEN_BYTES * len(sample.tokens) + sum(len(placed.image.data) for placed in sample.images)
        for sample in trajectory.samples
    )
    num_bytes += sum(len(str(message)) for message in trajectory.messages)
    return trajectory if num_bytes <= MAX_FAILED_BYTES else None


def note_failure(report: GroupReport, failure: PlayFailure) -> None:
    """Count a play that failed."""
    report.failures[failure.reason] += 1
    report.last_failure = failure.problem
    # In the message too: a terminal shows nothing else.
    logger.warning("episode left its group: %s", failure.reason, extra={"reason": failure.reason})


def note_plan(report: GroupReport, plan: GroupPlan) -> None:
    """Take over the counts of a plan."""
    report.num_completed = sum(map(len, plan.taken.values()))
    for name in ("begun", "replaced", "lost", "dropped_groups", "dropped_episodes"):
        setattr(report, f"num_{name}", getattr(plan, f"num_{name}"))


def gather_groups(
    tasks: Sequence[TaskT],
    plan: GroupPlan,
    finished: Mapping[tuple[int, int], Trajectory],
    failed: Sequence[UnusedPlay[TaskT]],
    config: GroupConfig,
    report: GroupReport,
) -> GroupResult[TaskT]:
    """Return the groups of a plan that is done.

    Args:
        tasks: What was played.
        plan: Says which episodes were taken.
        finished: Episodes by task and member.
        failed: Plays that failed, in the order of their ends.
        config: Sizes and limits.
        report: What became of the episodes; completed here.

    Raises:
        NoRolloutsError: If not one group survived.
    """
    groups = [
        make_group(tasks[task], tuple(finished[task, each] for each in members), config)
        for task, members in plan.taken.items()
    ]
    for group in groups:
        report.reasons.update(trajectory.reason.value for trajectory in group.trajectories)
    note_plan(report, plan)
    unused = (*failed, *list_dropped(tasks, plan.taken, finished))
    if tasks and not groups:
        raise NoRolloutsError(
            f"not one group of {report.num_requested} episodes survived; failures: "
            f"{dict(report.failures)}; the last was: {report.last_failure}",
            unused,
        )
    return GroupResult(tuple(groups), report, unused)


def list_dropped(
    tasks: Sequence[TaskT],
    taken: Mapping[int, Sequence[int]],
    finished: Mapping[tuple[int, int], Trajectory],
) -> list[UnusedPlay[TaskT]]:
    """Return the finished episodes that no group took."""
    return [
        UnusedPlay(tasks[task], trajectory)
        for (task, member), trajectory in sorted(finished.items(), key=lambda each: each[0])
        if member not in taken.get(task, ())
    ]


def make_group(
    task: TaskT, trajectories: tuple[Trajectory, ...], config: GroupConfig
) -> RolloutGroup[TaskT]:
    """Return the group of some episodes of a task, with their advantages."""
    rewards_PG = np.asarray([[trajectory.reward for trajectory in trajectories]])
    advantages = center_rewards(rewards_PG, min_group_size=config.min_group_size)[0]
    return RolloutGroup(task, trajectories, tuple(float(value) for value in advantages))
