"""A teacher as experience: what it thinks of a student's answers, and how it answers itself.

On policy, the student answers and each of its tokens is rewarded by how much likelier the teacher
finds it than the student did. That is the negative reverse KL, token by token, and needs no reward
function. Off policy, the teacher answers and the student imitates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinsmith.recipes.experience import Experience, Scores, Source, length_metrics
from tinsmith.recipes.problem_source import SEEDS_PER_STEP, token_sample
from tinsmith.recipes.tasks.prompts import Messages, PromptSet
from tinsmith.rollouts import DatumArrays, build_arrays
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import FloatArray, SampledSequence, SamplingParams

_SCORED = SEEDS_PER_STEP // 2
"""Where the seeds of scores begin, behind those of any step."""


@dataclass(frozen=True, slots=True)
class TeacherConfig:
    """How much is asked, and what a deviation costs.

    Attributes:
        num_prompts: Of a step.
        num_samples: Answers of the student to each.
        num_demonstrations: Prompts of a step that the teacher answers.
        kl_coef: Factor of the advantages.
        kl_discount_factor: Share of later tokens' advantages that a token gets; 0 for its own.
        num_validation: Held-out prompts that are scored, at most.
    """

    num_prompts: int
    num_samples: int
    num_demonstrations: int
    max_tokens: int
    temperature: float
    kl_coef: float
    kl_discount_factor: float
    num_validation: int
    seed: int


@dataclass(frozen=True, slots=True)
class Teacher:
    """Weights that know better, and what only they are told.

    Attributes:
        sampler: Of its weights.
        tokenizer: Of its base model; token for token that of the student.
        system: Its system message; empty for none.
    """

    sampler: Sampler
    tokenizer: Tokenizer
    system: str

    def prompt(self, messages: Messages) -> list[int]:
        """Return a prompt as the teacher reads it."""
        if self.system:
            # A prompt with a system message of its own keeps it behind the teacher's.
            rest = messages[1:] if messages[0]["role"] == "system" else messages
            own = messages[0]["content"] if rest is not messages else ""
            content = f"{self.system}\n\n{own}" if own else self.system
            messages = [{"role": "system", "content": content}, *rest]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer of the student to a prompt, and what the teacher says to its tokens."""

    prompt: list[int]
    sequence: SampledSequence
    teacher_logprobs: FloatArray

    @property
    def reverse_kl(self) -> FloatArray:
        """By token, an estimate from this one sample: log p of the student less the teacher's."""
        return np.asarray(self.sequence.logprobs, np.float32) - self.teacher_logprobs


class TeacherSource(Source):
    """Prompts that a student answers and a teacher judges."""

    def __init__(
        self,
        config: TeacherConfig,
        sampler: Sampler,
        tokenizer: Tokenizer,
        prompts: PromptSet,
        teacher: Teacher,
    ) -> None:
        self._config = config
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._teacher = teacher
        self.plan = (
            f"{len(prompts.train)} prompts, {len(prompts.held_out)} held out; the teacher is "
            f"{teacher.sampler.base_model}"
            + (f", told {len(teacher.system)} characters more" if teacher.system else ""),
        )

    def play(self, step: int) -> list[Experience]:
        """Answer the prompts of a step; each token's advantage is the negative reverse KL."""
        config = self._config
        drawn = self._prompts.draw(step, num_prompts=config.num_prompts, seed=config.seed)
        answers = self._answer(drawn, config.num_samples, self._seed(step))
        sequences = [self._train_on(answer) for answer in answers]
        kl = _mean_kl(answers)
        metrics = {
            "teacher_kl": kl,
            **length_metrics((len(a.sequence.tokens), a.sequence.stop_reason) for a in answers),
        }
        return [Experience(sequences, len(answers), -kl, metrics)]

    def score(self, num_done: int) -> list[Scores]:
        """Return, for each held-out prompt, the negative reverse KL of an answer by token.

        The seed is the same at each score, so that what differs is what was learned.
        """
        del num_done
        held_out = self._prompts.held_out[: self._config.num_validation]
        answers = self._answer(held_out, 1, self._seed(0) + _SCORED)
        return [Scores([-float(answer.reverse_kl.mean()) for answer in answers])]

    def imitate(self, step: int) -> list[list[DatumArrays]]:
        """Return answers of the teacher to prompts as the student reads them."""
        config = self._config
        drawn = self._prompts.draw(step, num_prompts=config.num_demonstrations, seed=config.seed)
        base = self._seed(step)
        futures = [
            self._teacher.sampler.sample(
                self._teacher.prompt(messages), sampling_params=self._params(base + index)
            )
            for index, messages in enumerate(drawn)
        ]
        return [
            [
                build_arrays(token_sample(self._read(messages), future.result().sequences[0]), 1.0)
                for messages, future in zip(drawn, futures, strict=True)
            ]
        ]

    def _answer(self, prompts: Sequence[Messages], num_samples: int, seed: int) -> list[_Answer]:
        """Return the student's answers with the teacher's scores; requests run all at once."""
        read = [self._read(messages) for messages in prompts]
        sampled = [
            self._sampler.sample(
                prompt,
                sampling_params=self._params(seed + index),
                num_samples=num_samples,
            )
            for index, prompt in enumerate(read)
        ]
        answered = [
            (prompt, self._teacher.prompt(messages), sequence)
            for prompt, messages, future in zip(read, prompts, sampled, strict=True)
            for sequence in future.result().sequences
        ]
        scored = [
            self._teacher.sampler.compute_logprobs([*told, *sequence.tokens])
            for _, told, sequence in answered
        ]
        return [
            _Answer(prompt, sequence, np.array(future.result()[len(told) :], np.float32))
            for (prompt, told, sequence), future in zip(answered, scored, strict=True)
        ]

    def _train_on(self, answer: _Answer) -> DatumArrays:
        config = self._config
        advantages = -config.kl_coef * answer.reverse_kl
        for index in range(len(advantages) - 2, -1, -1):
            advantages[index] += config.kl_discount_factor * advantages[index + 1]
        arrays = build_arrays(token_sample(answer.prompt, answer.sequence), 0.0)
        placed = np.zeros_like(arrays.advantages)
        placed[arrays.mask > 0] = advantages
        return dataclasses.replace(arrays, advantages=placed)

    def _read(self, messages: Messages) -> list[int]:
        return self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def _seed(self, step: int) -> int:
        """Return the first seed of a step."""
        return (self._config.seed * 1000 + step) * SEEDS_PER_STEP

    def _params(self, seed: int) -> SamplingParams:
        config = self._config
        return SamplingParams(
            max_tokens=config.max_tokens, temperature=config.temperature, seed=seed
        )


def _mean_kl(answers: Sequence[_Answer]) -> float:
    """Return the mean over all tokens."""
    return float(np.concatenate([answer.reverse_kl for answer in answers]).mean())
