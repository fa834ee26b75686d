"""What recipes of reinforcement learning train on, whatever it is played in.

A source plays a step's worth of tasks under the live weights and returns training sequences with
their advantages. It scores what is never trained on, and it may have a teacher to be imitated.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from tinsmith.errors import ConfigurationError
from tinsmith.rollouts import DatumArrays, RolloutConfig, Trajectory
from tinsmith.training.run_forms import TrainingRun

IS_SUCCESS, METRICS = "is_success", "metrics"
"""What an environment may say in the `info` of its last step: a boolean, and numbers by name."""


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """How much is played, and how.

    Attributes:
        num_tasks: Problems or environment seeds of a step.
        group_size: Plays of each.
        max_tokens: Sampled tokens of a turn.
        num_validation: Tasks that are scored, at most.
        num_samples: Plays of each of them; its score is their mean.
        validation_temperature: Of these; 0 is greedy.
        seed: Decides what is drawn, with the step.
        format_coef: What an answer loses that has not the wanted form.
        num_demonstrations: Of a step of the warm start.
        max_turns: Turns of an episode.
        max_episode_tokens: Sampled tokens of all turns of an episode.
        history: What becomes of an episode whose chat template rewrites its history; see
            the recipe `rl`.
    """

    num_tasks: int
    group_size: int
    temperature: float
    max_tokens: int
    num_validation: int
    seed: int
    format_coef: float = 0.0
    num_demonstrations: int = 64
    max_turns: int = 16
    max_episode_tokens: int = 4096
    history: str = "refuse"
    num_samples: int = 1
    validation_temperature: float = 0.0

    def rollout_config(self, max_context_tokens: int) -> RolloutConfig:
        """Return the limits of an episode, for a model with this context."""
        return RolloutConfig(
            max_turns=self.max_turns,
            max_tokens=self.max_episode_tokens,
            max_tokens_per_turn=self.max_tokens,
            max_context_tokens=max_context_tokens,
            split_turns=self.history == "split",
            append_only=self.history == "append",
        )


@dataclass(frozen=True, slots=True)
class Experience:
    """What a step of one policy is trained on.

    Attributes:
        sequences: Of the groups whose plays differ in reward; the others teach nothing.
        num_plays: Plays in all, also of groups that were left out.
        mean_reward: Over all plays.
        metrics: Further figures of the source.
    """

    sequences: list[DatumArrays]
    num_plays: int
    mean_reward: float
    metrics: dict[str, float]


def group_metrics(groups: Iterable[Sequence[float]]) -> dict[str, float]:
    """Return what the rewards of groups say about learning; dashboards and alerts know the names.

    `reward_spread` is the mean deviation within a group, and `dead_group_fraction` the share of
    groups whose rewards are all equal, from which nothing is learned.
    """
    spreads = [pstdev(rewards) for rewards in groups if len(rewards)]
    if not spreads:
        return {}
    num_dead = sum(spread == 0 for spread in spreads)
    return {"reward_spread": fmean(spreads), "dead_group_fraction": num_dead / len(spreads)}


def outcome_metrics(ends: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of `is_success` and of each of the `metrics` that episodes ended with.

    Those have the prefix `environment/`, so none is taken for a figure of the training. What is no
    finite number is left out.

    Args:
        ends: What was said of each episode at its end.
    """
    found: dict[str, list[float]] = {}
    for end in ends:
        own = end.get(METRICS)
        figures = own if isinstance(own, Mapping) else {}
        values = {f"environment/{name}": value for name, value in figures.items()}
        values[IS_SUCCESS] = end.get(IS_SUCCESS)
        for name, value in values.items():
            if isinstance(value, bool | int | float) and math.isfinite(value):
                found.setdefault(name, []).append(float(value))
    return {name: fmean(values) for name, values in found.items()}


def length_metrics(answers: Iterable[tuple[int, str]]) -> dict[str, float]:
    """Return how long answers are, and which share was cut off; dashboards know the names.

    Args:
        answers: Number of tokens and stop reason of the answer of each turn.
    """
    said = list(answers)
    if not said:
        return {}
    return {
        "response_tokens": fmean(num_tokens for num_tokens, _ in said),
        "truncated_fraction": fmean(stop_reason == "length" for _, stop_reason in said),
    }


def answers_of(plays: Iterable[Trajectory]) -> Iterator[tuple[int, str]]:
    """Yield the number of tokens and the stop reason of each turn."""
    return ((turn.num_tokens, turn.stop_reason) for play in plays for turn in play.turns)


@dataclass(frozen=True, slots=True)
class Scores:
    """What a policy earned on tasks that are held out, in their order.

    Attributes:
        rewards: Of each task.
        successes: Share of the plays of each that solved it; empty where tasks do not say.
    """

    rewards: list[float]
    successes: list[float] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of a step that was scored."""
        metrics = {"validation": fmean(self.rewards)} if self.rewards else {}
        if self.successes:
            metrics["validation_is_success"] = fmean(self.successes)
        return metrics


class Source(abc.ABC):
    """Plays and scores, for one policy or for several that play each other."""

    agents: tuple[str, ...] = ("",)
    """Names of the policies; the first is the experiment's own run."""
    partners: Sequence[TrainingRun] = ()
    """Runs of the other policies."""
    plan: Sequence[str] = ()
    """What is going to be done, in sentences."""

    @property
    def results(self) -> Sequence[str]:
        """Further lines about what came out."""
        return ()

    def prefix(self, index: int) -> str:
        """Return what the metrics of a policy begin with; nothing where there is one policy."""
        return f"{self.agents[index]}/" if len(self.agents) > 1 else ""

    @abc.abstractmethod
    def play(self, step: int) -> list[Experience]:
        """Play a step under the live weights; return each policy's experience."""

    @abc.abstractmethod
    def score(self, num_done: int) -> list[Scores]:
        """Play each validation task greedily after some steps; return each policy's rewards."""

    def imitate(self, step: int) -> list[list[DatumArrays]]:
        """Return what a teacher says in a step of the warm start, for each policy.

        Raises:
            ConfigurationError: If there is no teacher.
        """
        del step
        raise ConfigurationError(
            "there is nothing to imitate in this task", remedy="set num_imitation_steps=0"
        )

    def end_step(self, num_done: int) -> None:  # noqa: B027 - most sources keep nothing.
        """Note that a step is done; again for the same step, do nothing."""

    def save(self, num_done: int) -> list[str]:
        """Keep what belongs to the weights after a step; return the partners' checkpoints.

        It is called before the experiment's own run is saved.
        """
        del num_done
        return []
