"""Problems with an answer as experience of the RL recipe: one turn, all samples in one request.

Each problem is answered by a group, and advantages are centred in the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tinsmith.recipes.experience import (
    IS_SUCCESS,
    Experience,
    Scores,
    Source,
    SourceConfig,
    group_metrics,
    length_metrics,
)
from tinsmith.recipes.kept_rollouts import KEEP_NOTHING, TRAIN, VALIDATION, RolloutKeeper
from tinsmith.recipes.tasks.arithmetic import MathRecord, format_reward, is_formatted, is_right
from tinsmith.recipes.tasks.conversations import conversation_to_datum
from tinsmith.recipes.tasks.rl_problems import ProblemSet
from tinsmith.recipes.tasks.supervised_tasks import EpochDraw
from tinsmith.rollouts import (
    MASKED_VERSION,
    DatumArrays,
    TerminationReason,
    TokenSample,
    Trajectory,
    Turn,
    build_arrays,
    center_rewards,
)
from tinsmith.rollouts.records import Origin
from tinsmith.rollouts.records.record import PROBLEM
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import SampledSequence, SamplingParams

SEEDS_PER_STEP = 1_000_000
"""Apart from each other, so that no two steps draw with the same seed."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """Problems and the answers to each: P problems, G answers."""

    records: Sequence[MathRecord]
    prompts: Sequence[list[int]]
    params_P: Sequence[SamplingParams]
    samples_PG: Sequence[Sequence[SampledSequence]]
    rewards_PG: Sequence[Sequence[float]]
    successes_PG: Sequence[Sequence[bool]]


class ProblemSource(Source):
    """Single-turn problems: all samples of a problem in one request, rewarded here."""

    def __init__(
        self,
        config: SourceConfig,
        sampler: Sampler,
        tokenizer: Tokenizer,
        problems: ProblemSet,
        name: str = "",
        keeper: RolloutKeeper = KEEP_NOTHING,
    ) -> None:
        self._name = name
        self._keeper = keeper
        self._config = config
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._problems = problems

    def play(self, step: int) -> list[Experience]:
        """Play the groups of a step; see `Source`."""
        config = self._config
        records = self._problems.draw(step, num_problems=config.num_tasks, seed=config.seed)
        prompts = [self._prompt(record) for record in records]
        params_P = [
            SamplingParams(
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                seed=(config.seed * 1000 + step) * SEEDS_PER_STEP + index,
            )
            for index in range(len(prompts))
        ]
        samples_PG = self._sample(prompts, params_P, config.group_size)
        # An answer that did not end its turn has no form, and is not read.
        answers_PG = [[self._answer(sample) for sample in samples] for samples in samples_PG]
        rewards_PG = np.asarray(
            [
                [format_reward(record, answer, config.format_coef) for answer in answers]
                for record, answers in zip(records, answers_PG, strict=True)
            ]
        )
        advantages_PG = center_rewards(rewards_PG)
        successes_PG = _successes(records, answers_PG)
        played = _Answered(
            records, prompts, params_P, samples_PG, rewards_PG.tolist(), successes_PG
        )
        self._keep(TRAIN, step, played, advantages_PG.tolist())
        sequences = [
            build_arrays(token_sample(prompt, sample), float(advantage))
            for prompt, samples, advantages in zip(prompts, samples_PG, advantages_PG, strict=True)
            if np.any(advantages)
            for sample, advantage in zip(samples, advantages, strict=True)
        ]
        metrics = {
            IS_SUCCESS: _mean([each for row in successes_PG for each in row]),
            "is_formatted": _mean([is_formatted(each) for row in answers_PG for each in row]),
            **length_metrics(
                (len(sample.tokens), sample.stop_reason)
                for samples in samples_PG
                for sample in samples
            ),
            **group_metrics(rewards_PG.tolist()),
        }
        return [Experience(sequences, rewards_PG.size, float(rewards_PG.mean()), metrics)]

    def score(self, num_done: int) -> list[Scores]:
        """Return what answers to each validation problem earn; see `SourceConfig`."""
        config = self._config
        records = self._problems.validation[: config.num_validation]
        prompts = [self._prompt(record) for record in records]
        params_P = [
            SamplingParams(
                max_tokens=config.max_tokens,
                temperature=config.validation_temperature,
                seed=config.seed * SEEDS_PER_STEP + index,
            )
            for index in range(len(prompts))
        ]
        samples_PG = self._sample(prompts, params_P, config.num_samples)
        answers_PG = [
            [self._tokenizer.decode(each.tokens, skip_special_tokens=True) for each in samples]
            for samples in samples_PG
        ]
        rewards_PG = [
            [format_reward(record, answer, config.format_coef) for answer in answers]
            for record, answers in zip(records, answers_PG, strict=True)
        ]
        successes_PG = _successes(records, answers_PG)
        played = _Answered(records, prompts, params_P, samples_PG, rewards_PG, successes_PG)
        self._keep(VALIDATION, num_done, played, None)
        return [Scores(list(map(_mean, rewards_PG)), list(map(_mean, successes_PG)))]

    def imitate(self, step: int) -> list[list[DatumArrays]]:
        """Return how the problems' pupil answers, see `ProblemSet.demonstrate`."""
        records = self._problems.warm_start
        num_drawn = min(self._config.num_demonstrations, len(records))
        draw = EpochDraw(len(records), num_drawn, self._config.seed)
        return [[self._demonstrate(records[index], step) for index in draw.indices(step)]]

    def _demonstrate(self, record: MathRecord, step: int) -> DatumArrays:
        prompt = self._prompt(record)
        told = [
            *self._problems.prompt(record),
            {"role": "assistant", "content": self._problems.demonstrate(record, step)},
        ]
        datum = conversation_to_datum(self._tokenizer, told)
        targets, weights = (datum.loss_fn_inputs[name] for name in ("target_tokens", "weights"))
        answer = [int(token) for token in targets[weights > 0]]
        said = SampledSequence(
            tokens=answer,
            logprobs=[0.0] * len(answer),
            versions=[0] * len(answer),
            stop_reason="stop",
        )
        return build_arrays(token_sample(prompt, said), 1.0)

    def _sample(
        self, prompts: Sequence[list[int]], params_P: Sequence[SamplingParams], num_samples: int
    ) -> list[list[SampledSequence]]:
        """Return the answers to each prompt; all requests are under way at once."""
        futures = [
            self._sampler.sample(prompt, sampling_params=params, num_samples=num_samples)
            for prompt, params in zip(prompts, params_P, strict=True)
        ]
        return [list(future.result().sequences) for future in futures]

    def _keep(
        self,
        phase: str,
        num_done: int,
        played: _Answered,
        advantages_PG: Sequence[Sequence[float]] | None,
    ) -> None:
        """Keep the answers, if they are kept."""
        self._keeper.keep_episodes(
            phase, num_done, self._episodes(played, advantages_PG), self._tokenizer
        )

    def _episodes(
        self, played: _Answered, advantages_PG: Sequence[Sequence[float]] | None
    ) -> Iterator[tuple[Trajectory, Origin, float | None]]:
        for problem, (record, samples) in enumerate(
            zip(played.records, played.samples_PG, strict=True)
        ):
            for index, sample in enumerate(samples):
                text = self._tokenizer.decode(sample.tokens, skip_special_tokens=True)
                solved = {IS_SUCCESS: played.successes_PG[problem][index]}
                turn = Turn(
                    len(sample.tokens),
                    sample.stop_reason,
                    played.rewards_PG[problem][index],
                    solved,
                )
                said = {"role": "assistant", "content": text}
                trajectory = Trajectory(
                    (token_sample(played.prompts[problem], sample),),
                    (turn,),
                    TerminationReason.DONE,
                    messages=(*self._problems.prompt(record), said),
                    key=f"{problem}/{index}",
                )
                origin = self._keeper.origin(
                    played.params_P[problem],
                    kind=PROBLEM,
                    environment=self._name,
                    num_samples=len(samples),
                    sample_index=index,
                )
                advantage = None if advantages_PG is None else advantages_PG[problem][index]
                yield trajectory, origin, advantage

    def _prompt(self, record: MathRecord) -> list[int]:
        messages = self._problems.prompt(record)
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def _answer(self, sample: SampledSequence) -> str | None:
        if sample.stop_reason != "stop":
            return None
        return self._tokenizer.decode(sample.tokens, skip_special_tokens=True)


def _successes(
    records: Sequence[MathRecord], answers_PG: Sequence[Sequence[str | None]]
) -> list[list[bool]]:
    return [
        [is_right(record, answer) for answer in answers]
        for record, answers in zip(records, answers_PG, strict=True)
    ]


def token_sample(prompt: Sequence[int], sample: SampledSequence) -> TokenSample:
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
    return float(np.mean(values)) if len(values) else 0.0
