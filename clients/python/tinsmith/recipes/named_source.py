"""Environments as experience: episodes turn by turn, of a server or of a class of this process.

Each task is played by a group, and advantages are centred in the group. Validation may play another
environment, or the same one with other settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.client import Client
from tinsmith.environments.local import STEP_TIMEOUT_S
from tinsmith.environments.naming import NamedEnvironment
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.environment_source import SeededSource
from tinsmith.recipes.experience import SourceConfig
from tinsmith.recipes.experiment.settings import PlayConfig
from tinsmith.recipes.kept_rollouts import KEEP_NOTHING, VALIDATION, RolloutKeeper
from tinsmith.rollouts import EnvironmentTask, GroupConfig, GroupResult
from tinsmith.rollouts.keeping import kind_of
from tinsmith.rollouts.play_calls import Place, check_place
from tinsmith.rollouts.records import Origin
from tinsmith.sampling.sampler_forms import Sampler
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
        step_timeout_s: What a step of a class of this process may take.
    """

    environment: NamedEnvironment
    settings: Mapping[str, Any]
    validation_environment: NamedEnvironment
    validation_settings: Mapping[str, Any]
    max_context_tokens: int
    rollouts: Place = "client"
    step_timeout_s: float = STEP_TIMEOUT_S


class NamedSource(SeededSource):
    """Episodes of an environment that was named, turn by turn; one seed is one task."""

    def __init__(
        self,
        config: SourceConfig,
        sampler: Sampler,
        client: Client,
        plan: EnvironmentPlan,
        keeper: RolloutKeeper = KEEP_NOTHING,
    ) -> None:
        super().__init__(config, keeper)
        self._sampler = sampler
        self._tokenizer = sampler.get_tokenizer()
        self._client = client
        self._plan = plan

    def _run(
        self,
        seeds: Sequence[int],
        *,
        group_size: int,
        min_group_size: int,
        temperature: float,
        key: str,
        kept_as: tuple[str, int],
    ) -> GroupResult[EnvironmentTask]:
        plan = self._plan
        environment, settings = plan.environment, plan.settings
        if kept_as[0] == VALIDATION:
            environment, settings = plan.validation_environment, plan.validation_settings
        limits = self._config.rollout_config(plan.max_context_tokens)
        params = SamplingParams(temperature=temperature, seed=self._config.seed)

        def origin_of(task: EnvironmentTask) -> Origin:
            return self._keeper.origin(
                params,
                limits,
                kind=kind_of(environment),
                environment=environment.given,
                environment_config=dict(task.config),
                environment_seed=task.seed,
            )

        with self._keeper.keeping_failures(*kept_as, self._tokenizer, origin_of):
            result = self._client.environments.play(
                environment,
                sampler=self._sampler,
                seeds=[EnvironmentTask(seed, settings) for seed in seeds],
                config=limits,
                params=params,
                groups=GroupConfig(group_size=group_size, min_group_size=min_group_size),
                batch_key=key,
                rollouts=plan.rollouts,
                step_timeout_s=plan.step_timeout_s,
            )
        self._keeper.keep_result(*kept_as, result, self._tokenizer, origin_of)
        return result


def plan_environments(
    config: PlayConfig,
    client: Client,
    *,
    max_context_tokens: int,
    validation_environment: str = "",
    validation_config: str = "",
) -> EnvironmentPlan:
    """Return what is played, once it is known to be there.

    Args:
        config: Settings of the recipe.
        client: Of the service.
        max_context_tokens: Of the model.
        validation_environment: What is scored; the environment of training if it is empty.
        validation_config: Settings of what is scored, as a JSON object; those of training if both
            are empty.

    Raises:
        ConfigurationError: If an environment is not there, or not played in that place, or
            settings are no JSON object.
    """
    trained = client.environments.find(config.environment)
    scored = trained
    if validation_environment:
        scored = client.environments.find(validation_environment, setting="validation_environment")
    for each in (trained, scored):
        check_place(each, config.rollouts)
    own = read_settings(config.environment_config, "environment_config")
    is_other = validation_environment or validation_config
    return EnvironmentPlan(
        environment=trained,
        settings=own,
        validation_environment=scored,
        validation_settings=read_settings(validation_config, "validation_config")
        if is_other
        else own,
        max_context_tokens=max_context_tokens,
        rollouts="server" if config.rollouts == "server" else "client",
        step_timeout_s=config.step_timeout_s,
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
