"""Code of the user's own as experience: the settings `reward` and `environment=FILE.py:CLASS`."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.environment_source import EnvironmentSource
from tinsmith.recipes.experience import SourceConfig
from tinsmith.recipes.kept_rollouts import RolloutKeeper
from tinsmith.recipes.served_source import read_settings
from tinsmith.recipes.tasks.own_code import OwnEnvironment, RewardedPrompts, is_own
from tinsmith.sampling.sampler import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import ModelInfo


class OwnConfig(Protocol):
    """The settings of a recipe that plays code of the user's own."""

    @property
    def data(self) -> str: ...  # noqa: D102
    @property
    def environment(self) -> str: ...  # noqa: D102
    @property
    def environment_config(self) -> str: ...  # noqa: D102
    @property
    def reward(self) -> str: ...  # noqa: D102
    @property
    def rollouts(self) -> str: ...  # noqa: D102
    @property
    def step_timeout_s(self) -> float: ...  # noqa: D102


class OwnCode:
    """A reward or an environment, imported and ready to be played.

    Args:
        config: Settings; `is_named` says whether they name code at all.
        validation_environment: Another class that is scored; the same if it is empty.
        validation_config: Settings of what is scored, as a JSON object; those of training if both
            are empty.

    Raises:
        ConfigurationError: If it cannot be had, or cannot be played so.
    """

    def __init__(
        self, config: OwnConfig, *, validation_environment: str = "", validation_config: str = ""
    ) -> None:
        if config.reward and config.environment:
            raise ConfigurationError(
                "reward and environment are both given, and an environment rewards by itself",
                remedy="give one of them",
            )
        if validation_environment and (config.reward or not is_own(validation_environment)):
            raise ConfigurationError(
                "validation_environment and the environment of training are not of one kind",
                remedy="name two classes, or two environments that are served",
            )
        if config.rollouts != "client":
            raise ConfigurationError(
                "code of this process is not played on the server",
                remedy="set rollouts=client, or serve it: tinsmith env serve",
            )
        self._name = config.environment or config.reward
        self._num_held_out: int | None = None
        self._playable: RewardedPrompts | OwnEnvironment
        if config.reward:
            self._playable = prompts = RewardedPrompts(
                config.data, config.reward, step_timeout_s=config.step_timeout_s
            )
            self._num_held_out = prompts.num_held_out
        else:
            own = read_settings(config.environment_config, "environment_config")
            is_other = validation_environment or validation_config
            self._playable = OwnEnvironment(
                config.environment,
                own,
                read_settings(validation_config, "validation_config") if is_other else own,
                validation_path=validation_environment,
                step_timeout_s=config.step_timeout_s,
            )

    @staticmethod
    def is_named(config: OwnConfig) -> bool:
        """Whether settings name code of the user's own."""
        return bool(config.reward) or is_own(config.environment)

    def source(
        self,
        settings: SourceConfig,
        sampler: Sampler,
        tokenizer: Tokenizer,
        model: ModelInfo,
        keeper: RolloutKeeper,
    ) -> EnvironmentSource:
        """Return what is played with a model; each held-out prompt is scored once at most."""
        if self._num_held_out is not None:
            num_validation = min(settings.num_validation, self._num_held_out)
            settings = dataclasses.replace(settings, num_validation=num_validation)
        return EnvironmentSource(
            settings,
            sampler,
            tokenizer,
            self._playable,
            max_context_tokens=model.max_context_tokens,
            images=model.images,
            name=self._name,
            keeper=keeper,
        )
