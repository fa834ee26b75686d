"""Environments of the server as experience: episodes turn by turn, played here or there.

Each task is played by a group, and advantages are centred in the group. Validation may play another
environment, or the same one with other settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.environment_source import VALIDATION_SEED, group_experience, group_scores
from tinsmith.recipes.experience import Experience, Scores, Source, SourceConfig
from tinsmith.recipes.kept_rollouts import KEEP_NOTHING, TRAIN, VALIDATION, RolloutKeeper
from tinsmith.rollouts import EnvironmentTask, GroupConfig, GroupResult
from tinsmith.rollouts.play_calls import Place
from tinsmith.rollouts.records import Origin
from tinsmith.sampling.sampler import Sampler
from tinsmith.types import SamplingParams


@dataclass(frozen=True, slots=True)
class EnvironmentPlan:
    """Which environments are played, and where.

    Attributes:
        environment: What is trained on.
        settings: Of its tasks.
        validation_environment: What is scored.
        validation_settings: Of its tasks.
        max_context_tokens: Of the model.
        rollouts: Where episodes are played.
    """

    environment: str
    settings: Mapping[str, Any]
    validation_environment: str
    validation_settings: Mapping[str, Any]
    max_context_tokens: int
    rollouts: Place


class ServedSource(Source):
    """Episodes of a served environment, turn by turn; one seed is one task."""

    def __init__(
        self,
        config: SourceConfig,
        sampler: Sampler,
        client: Client,
        plan: EnvironmentPlan,
        keeper: RolloutKeeper = KEEP_NOTHING,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._tokenizer = sampler.get_tokenizer()
        self._client = client
        self._plan = plan
        self._keeper = keeper

    def play(self, step: int) -> list[Experience]:
        """Play the groups of a step; see `Source`."""
        config, plan = self._config, self._plan
        first = (config.seed * 1000 + step) * config.num_tasks
        seeds = range(first, first + config.num_tasks)
        result = self._play(
            plan.environment,
            [EnvironmentTask(seed, plan.settings) for seed in seeds],
            group_size=config.group_size,
            temperature=config.temperature,
            key=f"{config.seed}/{step}",
            kept_as=(TRAIN, step),
        )
        return [group_experience(result)]

    def score(self, num_done: int) -> list[Scores]:
        """Return the reward of one greedy episode for each validation seed."""
        plan = self._plan
        seeds = range(VALIDATION_SEED, VALIDATION_SEED + self._config.num_validation)
        result = self._play(
            plan.validation_environment,
            [EnvironmentTask(seed, plan.validation_settings) for seed in seeds],
            group_size=1,
            temperature=0.0,
            key="validation",
            kept_as=(VALIDATION, num_done),
        )
        return [group_scores(result)]

    def _play(
        self,
        environment: str,
        tasks: Sequence[EnvironmentTask],
        *,
        group_size: int,
        temperature: float,
        key: str,
        kept_as: tuple[str, int],
    ) -> GroupResult[EnvironmentTask]:
        limits = self._config.rollout_config(self._plan.max_context_tokens)
        params = SamplingParams(temperature=temperature, seed=self._config.seed)
        result = self._client.environments.play(
            environment,
            sampler=self._sampler,
            seeds=tasks,
            config=limits,
            params=params,
            groups=GroupConfig(group_size=group_size, min_group_size=min(2, group_size)),
            batch_key=key,
            rollouts=self._plan.rollouts,
        )

        def origin_of(task: EnvironmentTask) -> Origin:
            return self._keeper.origin(
                params,
                limits,
                environment=environment,
                environment_config=dict(task.config),
                environment_seed=task.seed,
            )

        self._keeper.keep_result(*kept_as, result, self._tokenizer, origin_of)
        return result


def check_served(client: Client, *names: str) -> None:
    """Refuse environments that are not served.

    Raises:
        ConfigurationError: If one is not; names those that are.
    """
    served = sorted(each.name.rpartition("/")[2] for each in client.environments.list())
    for name in names:
        if name not in served:
            raise ConfigurationError(
                f"no environment {name} is served",
                remedy=f"give environment= one of {', '.join(served)}",
            )


def read_settings(text: str, setting: str) -> dict[str, Any]:
    """Return the settings of an environment, given as a JSON object; none if it is empty.

    Raises:
        ConfigurationError: If it is none.
    """
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{setting} is {text!r}", remedy="""give a JSON object, such as {"high": 50}"""
        )
    return value
