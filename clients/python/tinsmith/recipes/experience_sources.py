"""Where the experience of the RL recipe comes from: problems with an answer, or environments.

A source plays a step's worth of groups under the live weights and returns training sequences whose
advantages are centred in their group; and it scores what is never trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tinsmith.client import Client
from tinsmith.recipes.tasks import arithmetic
from tinsmith.recipes.tasks.arithmetic import MathRecord
from tinsmith.recipes.tasks.rl_problems import ProblemSet
from tinsmith.recipes.tasks.supervised_tasks import complete
from tinsmith.rollouts import (
    MASKED_VERSION,
    DatumArrays,
    GroupConfig,
    GroupResult,
    RolloutConfig,
    RolloutRunner,
    TokenSample,
    build_arrays,
    center_rewards,
    run_groups,
)
from tinsmith.rollouts.adapters import ServiceInstance, ServiceSampler, create_service_instance
from tinsmith.sampling.sampler import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import SampledSequence, SamplingParams

_VALIDATION_SEED = 1_000_000_000
_SEEDS_PER_STEP = 1_000_000


@dataclass(frozen=True, slots=True)
class SourceConfig:
    """How much is played, and how.

    Attributes:
        num_tasks: Problems or environment seeds of a step.
        group_size: Plays of each.
        max_tokens: Sampled tokens of a turn.
        num_validation: Tasks that are scored, at most.
        seed: Decides what is drawn, with the step.
    """

    num_tasks: int
    group_size: int
    temperature: float
    max_tokens: int
    num_validation: int
    seed: int


@dataclass(frozen=True, slots=True)
class Experience:
    """What a step is trained on.

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


class Source(Protocol):
    """Plays and scores."""

    def play(self, step: int) -> Experience:
        """Play the groups of a step under the live weights."""
        ...

    def score(self) -> list[float]:
        """Return the reward of each validation task, played greedily."""
        ...


class ProblemSource:
    """Single-turn problems: all samples of a problem in one request, rewarded here."""

    def __init__(
        self, config: SourceConfig, sampler: Sampler, tokenizer: Tokenizer, problems: ProblemSet
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._problems = problems

    def play(self, step: int) -> Experience:
        """Play the groups of a step; see `Source`."""
        config = self._config
        records = self._problems.draw(step, num_problems=config.num_tasks, seed=config.seed)
        prompts = [self._prompt(record) for record in records]
        futures = []
        for index, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                seed=(config.seed * 1000 + step) * _SEEDS_PER_STEP + index,
            )
            futures.append(
                self._sampler.sample(prompt, sampling_params=params, num_samples=config.group_size)
            )
        samples_PG = [future.result().sequences for future in futures]
        rewards_PG = np.asarray(
            [
                [self._reward(record, sample) for sample in samples]
                for record, samples in zip(records, samples_PG, strict=True)
            ]
        )
        advantages_PG = center_rewards(rewards_PG)
        sequences = [
            build_arrays(_token_sample(prompt, sample), float(advantage))
            for prompt, samples, advantages in zip(prompts, samples_PG, advantages_PG, strict=True)
            if np.any(advantages)
            for sample, advantage in zip(samples, advantages, strict=True)
        ]
        return Experience(sequences, rewards_PG.size, float(rewards_PG.mean()), {})

    def score(self) -> list[float]:
        """Return the reward of the greedy answer to each validation problem."""
        records = self._problems.validation[: self._config.num_validation]
        prompts = [arithmetic.build_prompt(record) for record in records]
        answers = complete(
            self._sampler, self._tokenizer, prompts, max_tokens=self._config.max_tokens
        )
        return [
            arithmetic.reward(record, answer)
            for record, answer in zip(records, answers, strict=True)
        ]

    def _prompt(self, record: MathRecord) -> list[int]:
        messages = arithmetic.build_prompt(record)
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def _reward(self, record: MathRecord, sample: SampledSequence) -> float:
        """Return what a sample earned: nothing if it did not end its turn."""
        if sample.stop_reason != "stop":
            return 0.0
        answer = self._tokenizer.decode(sample.tokens, skip_special_tokens=True)
        return arithmetic.reward(record, answer)


class EnvironmentSource:
    """Episodes of a served environment, turn by turn; one seed is one task."""

    def __init__(
        self,
        config: SourceConfig,
        sampler: Sampler,
        tokenizer: Tokenizer,
        client: Client,
        environment: str,
        *,
        max_context_tokens: int,
    ) -> None:
        self._config = config
        self._max_context_tokens = max_context_tokens
        self._sampler = ServiceSampler(sampler)
        self._tokenizer = tokenizer
        self._client = client
        self._environment = environment

    def play(self, step: int) -> Experience:
        """Play the groups of a step; see `Source`."""
        config = self._config
        first = (config.seed * 1000 + step) * config.num_tasks
        result = self._run(
            range(first, first + config.num_tasks),
            group_size=config.group_size,
            temperature=config.temperature,
            key=f"{config.seed}/{step}",
        )
        rewards = [reward for group in result.groups for reward in group.rewards]
        sequences = [
            arrays
            for group in result.groups
            if len(set(group.rewards)) > 1
            for arrays in group.arrays()
        ]
        report = result.report
        metrics = {
            "turns": _mean(
                [len(play.turns) for group in result.groups for play in group.trajectories]
            ),
            "replaced": float(report.num_replaced),
            "lost": float(report.num_lost),
        }
        return Experience(sequences, len(rewards), _mean(rewards), metrics)

    def score(self) -> list[float]:
        """Return the reward of one greedy episode for each validation seed."""
        seeds = range(_VALIDATION_SEED, _VALIDATION_SEED + self._config.num_validation)
        result = self._run(seeds, group_size=1, temperature=0.0, key="validation")
        return [group.rewards[0] for group in result.groups]

    def _run(
        self, seeds: Sequence[int], *, group_size: int, temperature: float, key: str
    ) -> GroupResult[int]:
        runner = RolloutRunner(
            self._tokenizer,
            self._sampler,
            RolloutConfig(
                max_tokens_per_turn=self._config.max_tokens,
                max_context_tokens=self._max_context_tokens,
            ),
            params=SamplingParams(temperature=temperature, seed=self._config.seed),
        )
        limits = GroupConfig(group_size=group_size, min_group_size=min(2, group_size))
        return asyncio.run(run_groups(runner, seeds, self._create, limits, batch_key=key))

    async def _create(self, seed: int) -> ServiceInstance:
        return await create_service_instance(
            self._client.environments, self._environment, seed=seed
        )


def _token_sample(prompt: Sequence[int], sample: SampledSequence) -> TokenSample:
    """Return a single turn as it was sampled: what was read is masked."""
    num_read, num_said = len(prompt), len(sample.tokens)
    return TokenSample(
        tokens=np.asarray([*prompt, *sample.tokens], dtype=np.int64),
        loss_mask=np.repeat([False, True], [num_read, num_said]),
        logprobs=np.asarray([0.0] * num_read + list(sample.logprobs), dtype=np.float32),
        versions=np.asarray([MASKED_VERSION] * num_read + list(sample.versions), dtype=np.int64),
        turn_indices=np.repeat(np.asarray([-1, 0]), [num_read, num_said]),
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
