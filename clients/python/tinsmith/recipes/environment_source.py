"""Environments of the client as experience: episodes turn by turn.

Each task is played by a group, and advantages are centred in the group. A task may have a pupil,
whose turns are what a warm start imitates.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from tinsmith.images import ImageRules
from tinsmith.recipes.experience import (
    IS_SUCCESS,
    Experience,
    Scores,
    Source,
    SourceConfig,
    answers_of,
    group_metrics,
    length_metrics,
    outcome_metrics,
)
from tinsmith.recipes.kept_rollouts import KEEP_NOTHING, TRAIN, VALIDATION, RolloutKeeper
from tinsmith.recipes.scripted_sampler import ScriptedSampler
from tinsmith.rollouts import (
    Conversation,
    DatumArrays,
    GroupConfig,
    GroupResult,
    RolloutConfig,
    RolloutRunner,
    Trajectory,
    run_groups,
    trajectory_arrays,
)
from tinsmith.rollouts.adapters import ServiceSampler
from tinsmith.rollouts.interfaces import EnvironmentInstance
from tinsmith.rollouts.records import Origin
from tinsmith.rollouts.records.record import LOCAL
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import SamplingParams

VALIDATION_SEED = 1_000_000_000
"""Seeds from here on are never trained on."""


class Playable(Protocol):
    """Episodes by seed, for training and for validation."""

    def create_instance(self, seed: int, *, is_validation: bool) -> Awaitable[EnvironmentInstance]:
        """Return a fresh instance of a task."""
        ...

    def demonstrate(self, seed: int, occurrence: str) -> Sequence[str]:
        """Return the turns of a pupil in a task; none where nothing can be imitated."""
        ...


class SeededSource(Source):
    """Episodes in which one seed is one task, and a group plays each task."""

    def __init__(self, config: SourceConfig, keeper: RolloutKeeper) -> None:
        self._config = config
        self._keeper = keeper

    def play(self, step: int) -> list[Experience]:
        """Play the groups of a step; see `Source`."""
        config = self._config
        first = (config.seed * 1000 + step) * config.num_tasks
        result = self._run(
            range(first, first + config.num_tasks),
            group_size=config.group_size,
            min_group_size=2,
            temperature=config.temperature,
            key=f"{config.seed}/{step}",
            kept_as=(TRAIN, step),
        )
        return [group_experience(result)]

    def score(self, num_done: int) -> list[Scores]:
        """Return what each validation seed earns, greedily unless the settings say otherwise."""
        seeds = range(VALIDATION_SEED, VALIDATION_SEED + self._config.num_validation)
        result = self._run(
            seeds,
            group_size=self._config.num_samples,
            min_group_size=1,
            temperature=self._config.validation_temperature,
            key="validation",
            kept_as=(VALIDATION, num_done),
        )
        return [group_scores(result)]

    @abc.abstractmethod
    def _run(
        self,
        seeds: Sequence[int],
        *,
        group_size: int,
        min_group_size: int,
        temperature: float,
        key: str,
        kept_as: tuple[str, int],
    ) -> GroupResult[Any]:
        """Play the tasks of some seeds; those of validation are `VALIDATION_SEED` and more."""


class EnvironmentSource(SeededSource):
    """Episodes of an environment, turn by turn; one seed is one task."""

    def __init__(
        self,
        config: SourceConfig,
        sampler: Sampler,
        tokenizer: Tokenizer,
        playable: Playable,
        *,
        max_context_tokens: int,
        images: ImageRules | None = None,
        name: str = "",
        keeper: RolloutKeeper = KEEP_NOTHING,
    ) -> None:
        super().__init__(config, keeper)
        self._name = name
        self._max_context_tokens = max_context_tokens
        self._images = images
        self._sampler = ServiceSampler(sampler)
        self._tokenizer = tokenizer
        self._playable = playable

    def imitate(self, step: int) -> list[list[DatumArrays]]:
        """Return what the pupil says in a step's tasks; see `Source`."""
        config = self._config
        first = (config.seed * 1000 + step) * config.num_demonstrations
        return [asyncio.run(self._imitate(range(first, first + config.num_demonstrations)))]

    async def _imitate(self, seeds: Sequence[int]) -> list[DatumArrays]:
        sequences = []
        for seed in seeds:
            turns = list(self._playable.demonstrate(seed, str(seed)))
            instance = await self._create(seed)
            conversation = Conversation(self._tokenizer, images=self._images)
            conversation.begin(instance.observation.messages, images=instance.observation.images)
            script = ScriptedSampler(
                self._tokenizer, partial(_next_of, turns), conversation.turn_ending()[:1]
            )
            runner = RolloutRunner(
                self._tokenizer, script, self._rollout_config, images=self._images
            )
            trajectory = await runner.run(partial(_returned, instance))
            sequences += trajectory_arrays(trajectory, 1.0)
        return sequences

    def _run(
        self,
        seeds: Sequence[int],
        *,
        group_size: int,
        min_group_size: int,
        temperature: float,
        key: str,
        kept_as: tuple[str, int],
    ) -> GroupResult[int]:
        params = SamplingParams(temperature=temperature, seed=self._config.seed)
        runner = RolloutRunner(
            self._tokenizer,
            self._sampler,
            self._rollout_config,
            params=params,
            images=self._images,
        )
        limits = GroupConfig(group_size=group_size, min_group_size=min_group_size)

        def origin_of(seed: int) -> Origin:
            return self._keeper.origin(
                params,
                self._rollout_config,
                kind=LOCAL,
                environment=self._name,
                environment_seed=seed,
            )

        with self._keeper.keeping_failures(*kept_as, self._tokenizer, origin_of):
            result = asyncio.run(run_groups(runner, seeds, self._create, limits, batch_key=key))
        self._keeper.keep_result(*kept_as, result, self._tokenizer, origin_of)
        return result

    @property
    def _rollout_config(self) -> RolloutConfig:
        return self._config.rollout_config(self._max_context_tokens)

    async def _create(self, seed: int) -> EnvironmentInstance:
        return await self._playable.create_instance(seed, is_validation=seed >= VALIDATION_SEED)


async def _next_of(turns: list[str]) -> str:
    return turns.pop(0)


async def _returned(instance: EnvironmentInstance) -> EnvironmentInstance:
    return instance


def group_experience(result: GroupResult[Any]) -> Experience:
    """Return what groups of episodes teach, with the figures that their environment gave."""
    rewards = [reward for group in result.groups for reward in group.rewards]
    plays = [play for group in result.groups for play in group.trajectories]
    sequences = [
        arrays
        for group in result.groups
        if len(set(group.rewards)) > 1
        for arrays in group.arrays()
    ]
    metrics = {
        "turns": _mean([len(play.turns) for play in plays]),
        "replaced": float(result.report.num_replaced),
        "lost": float(result.report.num_lost),
        **length_metrics(answers_of(plays)),
        **outcome_metrics(map(last_info, plays)),
        **group_metrics(group.rewards for group in result.groups),
    }
    return Experience(sequences, len(rewards), _mean(rewards), metrics)


def group_scores(result: GroupResult[Any]) -> Scores:
    """Return the scores of groups: means over the episodes of each."""
    said = [
        [last_info(play).get(IS_SUCCESS) for play in group.trajectories] for group in result.groups
    ]
    is_said = any(each is not None for group in said for each in group)
    return Scores(
        [_mean(group.rewards) for group in result.groups],
        [_mean([bool(each) for each in group]) for group in said] if is_said else [],
    )


def last_info(play: Trajectory) -> Mapping[str, Any]:
    """Return what the environment said of an episode at its last step."""
    return play.turns[-1].info if play.turns else {}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
