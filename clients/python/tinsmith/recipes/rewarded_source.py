"""Prompts with a reward function of the user's own as experience: the setting `reward`."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.environment_source import EnvironmentSource
from tinsmith.recipes.experience import SourceConfig
from tinsmith.recipes.kept_rollouts import RolloutKeeper
from tinsmith.recipes.tasks.own_reward import RewardedPrompts
from tinsmith.sampling.sampler import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import ModelInfo


class RewardConfig(Protocol):
    """The settings of a recipe that a function of the user's own rewards."""

    @property
    def data(self) -> str: ...  # noqa: D102
    @property
    def environment(self) -> str: ...  # noqa: D102
    @property
    def reward(self) -> str: ...  # noqa: D102
    @property
    def rollouts(self) -> str: ...  # noqa: D102
    @property
    def step_timeout_s(self) -> float: ...  # noqa: D102


class RewardedData:
    """Prompts and their reward function, imported and ready to be played.

    Args:
        config: Settings.

    Raises:
        ConfigurationError: If it cannot be had, or cannot be played so.
    """

    def __init__(self, config: RewardConfig) -> None:
        if config.environment:
            raise ConfigurationError(
                "reward and environment are both given, and an environment rewards by itself",
                remedy="give one of them",
            )
        if config.rollouts != "client":
            raise ConfigurationError(
                "a reward of this process is not played on the server",
                remedy="set rollouts=client",
            )
        self._name = config.reward
        self._prompts = RewardedPrompts(
            config.data, config.reward, step_timeout_s=config.step_timeout_s
        )

    def source(
        self,
        settings: SourceConfig,
        sampler: Sampler,
        tokenizer: Tokenizer,
        model: ModelInfo,
        keeper: RolloutKeeper,
    ) -> EnvironmentSource:
        """Return what is played with a model; each held-out prompt is scored once at most."""
        num_validation = min(settings.num_validation, self._prompts.num_held_out)
        return EnvironmentSource(
            dataclasses.replace(settings, num_validation=num_validation),
            sampler,
            tokenizer,
            self._prompts,
            max_context_tokens=model.max_context_tokens,
            images=model.images,
            name=self._name,
            keeper=keeper,
        )
