"""Prompts without answers: what a student and its teacher are asked."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.recipes.tasks import pig_latin
from tinsmith.recipes.tasks.jsonl import read_lines
from tinsmith.recipes.tasks.public_data import hold_out, is_public, read_rows
from tinsmith.recipes.tasks.rl_problems import SHIPPED, load_problems
from tinsmith.recipes.tasks.row_layouts import ConversationFormatError, read_prompt

_REMEDY = 'write {"prompt": ...} or {"messages": [...]}'

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts to train on and prompts that are held out, as chat messages.

    Attributes:
        places: Where each of them stands, those that are held out last; empty if they are made.
    """

    train: Sequence[Messages]
    held_out: Sequence[Messages]
    places: Sequence[str] = ()

    def placed(self) -> Iterator[tuple[str, Messages]]:
        """Yield all prompts, each with where it stands."""
        for number, messages in enumerate((*self.train, *self.held_out)):
            yield self.places[number] if self.places else f"prompt {number + 1}", messages

    def draw(self, step: int, *, num_prompts: int, seed: int) -> list[Messages]:
        """Return the prompts of a step: a function of seed and step."""
        generator = random.Random(f"prompts:{seed}:{step}")
        return generator.sample(list(self.train), min(num_prompts, len(self.train)))


def load_prompts(data: str) -> PromptSet:
    """Return the prompts of `pig_latin`, `arithmetic`, `small_sums`, a file, a folder or `hf://`.

    A row has `prompt`, text or messages, or any layout of a conversation; what the assistant says
    at its end is left out. Of a file, every fifth prompt is held out.

    Raises:
        ConversationFormatError: If a row holds no prompt; names the line.
        ConfigurationError: If the data cannot be loaded.
    """
    if data == "pig_latin":
        split = pig_latin.split_phrases(pig_latin.load_phrases())
        return PromptSet(
            [pig_latin.build_prompt(phrase) for phrase in split.train_phrases],
            [pig_latin.build_prompt(phrase) for phrase in split.held_out_phrases],
        )
    if data in SHIPPED:
        problems = load_problems(data)
        return PromptSet(
            [problems.prompt(record) for record in problems.train],
            [problems.prompt(record) for record in problems.validation],
        )
    if is_public(data):
        rows = read_rows(data)
        return _set_of(
            *(
                [(f"{data}, {part} {number}", row) for number, row in enumerate(rows[part])]
                for part in ("train", "validation")
            )
        )
    located = [(line.where, line.value) for line in read_lines(Path(data), ConversationFormatError)]
    if len(located) < 2:
        raise ConversationFormatError(f"{data}: needs at least 2 prompts", remedy=_REMEDY)
    return _set_of(*hold_out(located))


def _set_of(
    train: Sequence[tuple[str, object]], held_out: Sequence[tuple[str, object]]
) -> PromptSet:
    return PromptSet(
        [decode_prompt(row, where) for where, row in train],
        [decode_prompt(row, where) for where, row in held_out],
        [where for where, _ in (*train, *held_out)],
    )


def decode_prompt(row: object, where: str) -> Messages:
    """Return the messages of a row, up to what the assistant says at the end.

    Raises:
        ConversationFormatError: If there is nothing to ask.
    """
    messages = read_prompt(row, where) if isinstance(row, Mapping) else []
    if not messages:
        raise ConversationFormatError(f"{where}: a row holds no prompt", remedy=_REMEDY)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ConversationFormatError(f"{where}: a row asks nothing", remedy=_REMEDY)
    return messages
