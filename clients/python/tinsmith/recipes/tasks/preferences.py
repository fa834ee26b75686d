"""Pairs of answers of which one is preferred: what DPO and preference models learn from.

Rows are those of the common data sets (UltraFeedback, HelpSteer, HH): `prompt`, `chosen` and
`rejected`. A prompt is text or messages; an answer is text, a message, or a whole conversation,
which then stands for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.recipes.tasks.conversations import Conversation
from tinsmith.recipes.tasks.jsonl import read_lines
from tinsmith.recipes.tasks.public_data import hold_out, is_public, read_rows
from tinsmith.recipes.tasks.row_layouts import (
    ConversationFormatError,
    decode_message,
    read_prompt,
    read_tools,
)
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import Datum

LARGER_NUMBER = "larger_number"
"""The built-in task: of two digits the larger is preferred."""

_REMEDY = 'write {"prompt": ..., "chosen": ..., "rejected": ...}'


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """A prompt with the answer that is preferred, and the one that is not."""

    chosen: Conversation
    rejected: Conversation

    def to_data(self, tokenizer: Tokenizer) -> tuple[Datum, Datum]:
        """Return the data of both; weights are 1 on the answer.

        Raises:
            ConversationFormatError: If the chat template cannot render one; names the line.
        """
        return self.chosen.to_datum(tokenizer), self.rejected.to_datum(tokenizer)


@dataclass(frozen=True, slots=True)
class PreferenceSet:
    """Pairs to train on and pairs that are held out; no pair is in both."""

    train: Sequence[PreferencePair]
    held_out: Sequence[PreferencePair]


def load_preferences(data: str) -> PreferenceSet:
    """Return the pairs of `larger_number`, of a JSONL file, a folder, or `hf://NAME[:CONFIG]`.

    Of a file, every fifth pair is held out.

    Raises:
        ConversationFormatError: If a row is no pair; names the line.
        ConfigurationError: If the data cannot be loaded.
    """
    if data == LARGER_NUMBER:
        return _split(list(_larger_numbers()))
    if is_public(data):
        rows = read_rows(data)
        train, held_out = (
            [decode_pair(row, f"{data}, {part} {number}") for number, row in enumerate(rows[part])]
            for part in ("train", "validation")
        )
        return PreferenceSet(train, held_out)
    lines = read_lines(Path(data), ConversationFormatError)
    return _split([decode_pair(line.value, line.where) for line in lines], data)


def decode_pair(row: object, where: str) -> PreferencePair:
    """Return the pair of a row.

    Raises:
        ConversationFormatError: If it is none.
    """
    if not isinstance(row, Mapping) or "chosen" not in row or "rejected" not in row:
        found = f" with the keys {', '.join(map(str, row))}" if isinstance(row, Mapping) else ""
        raise ConversationFormatError(f"{where}: a row{found} is no pair", remedy=_REMEDY)
    prompt = read_prompt(row, where)
    tools = read_tools(row, where)
    chosen, rejected = (
        _conversation(prompt, _answer(row[key], where), tools, where)
        for key in ("chosen", "rejected")
    )
    if chosen.messages == rejected.messages:
        raise ConversationFormatError(
            f"{where}: the answers are equal, so none can be preferred", remedy="leave the row out"
        )
    return PreferencePair(chosen, rejected)


def _conversation(
    prompt: list[dict[str, Any]],
    answer: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    where: str,
) -> Conversation:
    # An answer that begins with what was asked is the whole conversation.
    is_whole = len(answer) > 1 and answer[0]["role"] != "assistant"
    messages = answer if is_whole else [*prompt, *answer]
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ConversationFormatError(
            f"{where}: an answer of the assistant to a prompt is wanted", remedy=_REMEDY
        )
    return Conversation(messages, tools, where)


def _answer(value: object, where: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise ConversationFormatError(
            f"{where}: neither text nor messages: {value!r}", remedy=_REMEDY
        )
    return [decode_message(message, where) for message in value]


def _larger_numbers() -> list[PreferencePair]:
    return [
        decode_pair(
            {
                "prompt": f"Larger: {first} or {second}?",
                "chosen": str(max(first, second)),
                "rejected": str(min(first, second)),
            },
            f"{first} and {second}",
        )
        for first, second in itertools.permutations(range(10), 2)
    ]


def _split(pairs: list[PreferencePair], data: str = LARGER_NUMBER) -> PreferenceSet:
    if len(pairs) < 2:
        raise ConversationFormatError(f"{data}: needs at least 2 pairs", remedy=_REMEDY)
    return PreferenceSet(*hold_out(pairs))
