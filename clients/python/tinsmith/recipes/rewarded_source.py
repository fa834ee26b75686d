"""Prompts with a reward of the user's own as experience: the settings `reward` and `judge`."""

from __future__ import annotations

import dataclasses

from tinsmith.client import Client
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.environment_source import EnvironmentSource
from tinsmith.recipes.experience import SourceConfig
from tinsmith.recipes.experiment.settings import PlayConfig
from tinsmith.recipes.kept_rollouts import RolloutKeeper
from tinsmith.recipes.tasks.own_reward import RewardedPrompts, judged_by, load_reward
from tinsmith.rollouts.judge import INSTRUCTION, Judge
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import ModelInfo


def check_judge(config: PlayConfig) -> None:
    """Refuse settings of a judge that contradict each other.

    Raises:
        ConfigurationError: If a reward is given as well, or what a judge is told and no judge.
    """
    if config.reward and config.judge:
        raise ConfigurationError(
            "reward and judge are both given, and either scores the answers",
            remedy="give one of them",
        )
    if config.judge_instruction and not config.judge:
        raise ConfigurationError(
            "judge_instruction belongs to judge=, which is not given",
            remedy="leave judge_instruction out, or name a model in judge=",
        )


class RewardedData:
    """Prompts and what rewards their answers, ready to be played.

    Raises:
        ConfigurationError: If it cannot be had, or cannot be played so.
        NotFoundError: If there is no such judge.
    """

    def __init__(self, config: PlayConfig, client: Client) -> None:
        name = "judge" if config.judge else "reward"
        if config.environment:
            raise ConfigurationError(
                f"{name} and environment are both given, and an environment rewards by itself",
                remedy="give one of them",
            )
        if config.rollouts != "client":
            raise ConfigurationError(
                f"a {name} of this process is not played on the server",
                remedy="set rollouts=client",
            )
        self._name = f"judge:{config.judge}" if config.judge else config.reward
        self._prompts = RewardedPrompts(
            config.data,
            judged_by(_open_judge(config, client)) if config.judge else load_reward(config.reward),
            step_timeout_s=config.step_timeout_s,
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


def _open_judge(config: PlayConfig, client: Client) -> Judge:
    """Return the judge that is named: a base model that is served, else a checkpoint."""
    served = {model.base_model for model in client.list_models()}
    is_model = config.judge in served or "/" not in config.judge
    kind = "base_model" if is_model else "checkpoint"
    return Judge(
        client.create_sampler(**{kind: config.judge}),
        instruction=config.judge_instruction or INSTRUCTION,
        timeout_s=config.step_timeout_s,
    )
