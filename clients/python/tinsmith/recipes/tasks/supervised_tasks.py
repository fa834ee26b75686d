"""What the supervised recipe can train on: batches by step, and a held-out score."""

from __future__ import annotations

import random
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.tasks import arithmetic, pig_latin
from tinsmith.recipes.tasks.conversations import (
    Conversation,
    conversation_to_datum,
    read_conversations,
    scale_weights,
)
from tinsmith.recipes.tasks.lengths import fit_length
from tinsmith.recipes.tasks.public_data import hold_out
from tinsmith.recipes.tasks.row_layouts import ConversationFormatError
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import Datum, FloatArray, SamplingParams

_NUM_SHOWN = 5
_PIG_LATIN, _WARM_START = "pig_latin", "warm_start"
SHIPPED = (_PIG_LATIN, _WARM_START)
"""Data that come with the package; every other name is a file."""


@dataclass(frozen=True, slots=True)
class Example:
    """One answer of the model beside the one that was wanted."""

    prompt: str
    completion: str
    expected: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out score and some answers to look at."""

    metrics: dict[str, float]
    examples: list[Example] = field(default_factory=list)


class SupervisedTask(Protocol):
    """Data of the supervised recipe; everything is a function of seed and step.

    Attributes:
        description: What it is, in words.
    """

    description: str

    def batch(self, step: int) -> list[Datum]:
        """Return the batch of a step, its weights scaled."""
        ...

    def evaluate(self, sampler: Sampler) -> Evaluation:
        """Score data that no batch contains."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRules:
    """What is made of the lines of a file.

    Attributes:
        train_on: Which answers of a line are trained on that does not say it, see `TRAIN_ON`.
        too_long: What is done with a line that is longer than the context, see `TOO_LONG`.
        max_context_tokens: Of the model.
    """

    train_on: str
    too_long: str
    max_context_tokens: int

    def data_of(self, conversation: Conversation, tokenizer: Tokenizer) -> list[Datum]:
        """Return the data of a line.

        Raises:
            ConversationFormatError: If it cannot be rendered, or is too long; names the line.
        """
        return fit_length(
            conversation.to_data(tokenizer, self.train_on),
            conversation.where,
            max_tokens=self.max_context_tokens,
            too_long=self.too_long,
        )


def make_task(
    name: str,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    seed: int,
    max_tokens: int,
    rules: RowRules,
) -> SupervisedTask:
    """Return the task of a name: `pig_latin`, `warm_start`, or a JSONL file of conversations.

    Raises:
        ConversationFormatError: If the file is not one.
    """
    if name == _PIG_LATIN:
        return PigLatinTask(tokenizer, batch_size=batch_size, seed=seed)
    if name == _WARM_START:
        return WarmStartTask(tokenizer, batch_size=batch_size, seed=seed)
    return ConversationTask(
        tokenizer, Path(name), batch_size=batch_size, seed=seed, max_tokens=max_tokens, rules=rules
    )


class PigLatinTask:
    """The shipped phrases; scored on words that no training phrase contains."""

    description = "the shipped Pig Latin phrases (data=FILE.jsonl trains on conversations of yours)"

    def __init__(self, tokenizer: Tokenizer, *, batch_size: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._split = pig_latin.split_phrases(pig_latin.load_phrases())
        self._data = [
            conversation_to_datum(tokenizer, pig_latin.build_messages(phrase))
            for phrase in self._split.train_phrases
        ]
        self._draw = EpochDraw(len(self._data), batch_size, seed)

    def batch(self, step: int) -> list[Datum]:
        """Return the batch of a step."""
        return scale_weights([self._data[index] for index in self._draw.indices(step)])

    def evaluate(self, sampler: Sampler) -> Evaluation:
        """Score held-out words by exact match in greedy completions."""
        phrases = self._split.held_out_phrases
        prompts = [pig_latin.build_prompt(phrase) for phrase in phrases]
        completions = complete(sampler, self._tokenizer, prompts, max_tokens=96)
        score = pig_latin.score_phrases(phrases, completions, self._split.held_out_words)
        examples = [
            Example(phrase, completion, pig_latin.to_pig_latin(phrase))
            for phrase, completion in zip(phrases, completions, strict=True)
        ]
        metrics = {"held_out_words": score.accuracy, "num_held_out_words": score.num_words}
        return Evaluation(metrics, examples[:_NUM_SHOWN])


class WarmStartTask:
    """A start for a random model: sums as a careless pupil writes them, and copying of words.

    The pupil's fault, forgetting to carry, is what reinforcement learning has to find and mend
    (`tasks.arithmetic`). Copying makes Pig Latin learnable by a small model. Neither
    sees a validation problem or a held-out word.
    """

    description = "sums as a careless pupil writes them, and copied words"

    COPY_SHARE = 0.3
    MAX_COPIED_WORDS = 3

    def __init__(self, tokenizer: Tokenizer, *, batch_size: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        split = pig_latin.split_phrases(pig_latin.load_phrases())
        self._words = sorted({word for phrase in split.train_phrases for word in phrase.split()})
        self._held_out = split.held_out_words
        arithmetic_split = arithmetic.make_split()
        self._problems = arithmetic_split.warm_start
        self._validation = arithmetic_split.validation
        self._num_copies = round(batch_size * self.COPY_SHARE)
        self._num_sums = batch_size - self._num_copies
        self._draw = EpochDraw(len(self._problems), self._num_sums, seed)

    def batch(self, step: int) -> list[Datum]:
        """Return the batch of a step: each half of the mixture weighs as much as the other."""
        sums = [
            arithmetic.build_messages(
                arithmetic.make_demonstration(self._problems[index], occurrence=step)
            )
            for index in self._draw.indices(step)
        ]
        draw = random.Random(f"copy:{self._seed}:{step}")
        copies = [self._copy(draw) for _ in range(self._num_copies)]
        return [
            datum
            for part in (sums, copies)
            for datum in scale_weights(
                [conversation_to_datum(self._tokenizer, messages) for messages in part]
            )
        ]

    def evaluate(self, sampler: Sampler) -> Evaluation:
        """Score validation problems, against true sums."""
        prompts = [arithmetic.build_prompt(record) for record in self._validation]
        completions = complete(sampler, self._tokenizer, prompts, max_tokens=8)
        examples = [
            Example(record.question, completion, record.final_answer)
            for record, completion in zip(self._validation, completions, strict=True)
        ]
        score = arithmetic.accuracy(self._validation, completions)
        return Evaluation({"validation_accuracy": score}, examples[:_NUM_SHOWN])

    def _copy(self, draw: random.Random) -> list[dict[str, str]]:
        num_words = draw.randint(1, self.MAX_COPIED_WORDS)
        if draw.random() < 0.5:
            words = [draw.choice(self._words) for _ in range(num_words)]
        else:
            words = [self._nonsense(draw) for _ in range(num_words)]
        text = " ".join(words)
        return [
            {"role": "user", "content": f"Repeat: {text}"},
            {"role": "assistant", "content": text},
        ]

    def _nonsense(self, draw: random.Random) -> str:
        while True:
            word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9)))
            if word not in self._held_out:
                return word


class ConversationTask:
    """A user's JSONL file; every fifth conversation is held out, as where others read the file."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        path: Path,
        *,
        batch_size: int,
        seed: int,
        max_tokens: int,
        rules: RowRules,
    ) -> None:
        # All of the file is rendered before anything is trained: a bad line is found at once.
        rendered = [(each, rules.data_of(each, tokenizer)) for each in read_conversations(path)]
        kept = [row for row in rendered if row[1]]
        if not kept:
            raise ConversationFormatError(
                f"{path}: each line is longer than the model's context",
                remedy="shorten them, or train a model with a longer one",
            )
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        # By their place in the file: `tinsmith eval` scores no row that was trained on.
        trained, held_out = ([row for row in part if row[1]] for part in hold_out(rendered))
        if not trained:
            trained, held_out = kept, []
        self._held_out = [conversation for conversation, _ in held_out]
        self._held_out_data = [datum for _, data in held_out for datum in data]
        self._data = [datum for _, data in trained for datum in data]
        self._draw = EpochDraw(len(self._data), min(batch_size, len(self._data)), seed)
        self.description = (
            f"{len(trained)} conversations of {path}, {len(held_out) or 'none'} held out"
            + _told_layouts([conversation for conversation, _ in kept])
            + (f", {len(rendered) - len(kept)} too long" if len(kept) < len(rendered) else "")
            + _told_end(tokenizer)
        )

    def batch(self, step: int) -> list[Datum]:
        """Return the batch of a step."""
        return scale_weights([self._data[index] for index in self._draw.indices(step)])

    def evaluate(self, sampler: Sampler) -> Evaluation:
        """Score the log-probability of held-out answers, and answer some of their questions."""
        if not self._held_out:
            return Evaluation({})
        data = self._held_out_data
        loss = 0.0
        num_tokens = 0.0
        for datum, logprobs in zip(data, target_logprobs(sampler, data), strict=True):
            weights = datum.loss_fn_inputs["weights"]
            loss -= float((weights * logprobs).sum())
            num_tokens += float(weights.sum())
        shown = self._held_out[:_NUM_SHOWN]
        completions = complete(
            sampler,
            self._tokenizer,
            [each.messages[:-1] for each in shown],
            max_tokens=self._max_tokens,
            tools=[each.tools for each in shown],
        )
        examples = [
            Example(each.messages[-2]["content"], completion, each.messages[-1]["content"])
            for each, completion in zip(shown, completions, strict=True)
        ]
        return Evaluation({"held_out_loss": loss / max(num_tokens, 1.0)}, examples)


def _told_layouts(conversations: Sequence[Conversation]) -> str:
    """Return how many lines have which layout; nothing if all are plain messages."""
    counts = Counter(conversation.layout for conversation in conversations)
    if set(counts) == {"messages"}:
        return ""
    return f" ({', '.join(f'{count} as {name}' for name, count in counts.most_common())})"


def _told_end(tokenizer: Tokenizer) -> str:
    """Return what answers learn to end with, where the model's texts end otherwise."""
    _, *ends = tokenizer.turn_ends or ("",)
    return f"; answers end with {ends[0]}, which stops samples" if ends else ""


class EpochDraw:
    """Indices by step: each epoch is a new permutation, drawn from seed and epoch alone."""

    def __init__(self, num_items: int, batch_size: int, seed: int) -> None:
        if not 0 < batch_size <= num_items:
            raise ConfigurationError(
                f"batch_size is {batch_size}", remedy=f"give a whole number from 1 to {num_items}"
            )
        self._num_items = num_items
        self._batch_size = batch_size
        self._seed = seed

    def indices(self, step: int) -> list[int]:
        """Return the indices of the batch of a step; a remainder of an epoch is left out."""
        epoch, position = divmod(step, self._num_items // self._batch_size)
        order = list(range(self._num_items))
        random.Random(f"epoch:{self._seed}:{epoch}").shuffle(order)
        begin = position * self._batch_size
        return order[begin : begin + self._batch_size]


def target_logprobs(sampler: Sampler, data: Sequence[Datum]) -> list[FloatArray]:
    """Return what a sampler's weights say to the targets of data, float32 [T] each, all at once."""
    futures = [
        sampler.compute_logprobs(
            [*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"][-1])]
        )
        for datum in data
    ]
    return [np.array(future.result()[1:], np.float32) for future in futures]


def complete(
    sampler: Sampler,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[dict[str, Any]]],
    *,
    max_tokens: int,
    tools: Sequence[Sequence[dict[str, Any]] | None] | None = None,
) -> list[str]:
    """Return the greedy completion of each prompt, without special tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    futures = [
        sampler.sample(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tools=offered),
            sampling_params=params,
        )
        for prompt, offered in zip(prompts, tools or [None] * len(prompts), strict=True)
    ]
    return [
        tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True)
        for future in futures
    ]
