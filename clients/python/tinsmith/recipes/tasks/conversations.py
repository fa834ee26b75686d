"""Conversations as training data, trained on what the assistant said.

The prompt is rendered exactly as it will be when the model is asked, with the generation prompt;
the answer and the end of its turn follow. Only those carry weight. The text is cut where the prompt
ends and both sides become tokens, for a sampler continues the tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.errors import TinsmithError
from tinsmith.recipes.tasks.jsonl import read_lines
from tinsmith.recipes.tasks.row_layouts import (
    ASSISTANT,
    ConversationFormatError,
    read_row,
)
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import Datum, ModelInput

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

LAST, ALL = "last", "all"
TRAIN_ON = (LAST, ALL)
"""Which turns of a row are trained on that marks none: the last answer, or all of them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of a file.

    Attributes:
        messages: As chat templates read them; the last is the assistant's.
        tools: JSON schemas of the tools that the model may call; None if there are none.
        where: File and line, for messages.
        weights: Of each message, how much it is trained on; None if the line does not say.
        layout: How the line was written.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    where: str
    weights: list[float] | None = None
    layout: str = "messages"

    def to_datum(self, tokenizer: Tokenizer) -> Datum:
        """Return the datum of the last answer; see `conversation_to_datum`.

        Raises:
            ConversationFormatError: If the chat template cannot render it; names the line.
        """
        try:
            return conversation_to_datum(tokenizer, self.messages, tools=self.tools)
        except TinsmithError as error:
            raise self._refusal(error) from error

    def to_data(self, tokenizer: Tokenizer, train_on: str = LAST) -> list[Datum]:
        """Return its data: one, or one for each answer where the template rewrites its history.

        Args:
            tokenizer: Of the model.
            train_on: `last` or `all`, for a line that does not say it itself.

        Raises:
            ConversationFormatError: If the chat template cannot render it; names the line.
        """
        try:
            return answers_to_data(
                tokenizer, self.messages, self.weights_of(train_on), tools=self.tools
            )
        except TinsmithError as error:
            raise self._refusal(error) from error

    def weights_of(self, train_on: str) -> list[float]:
        """Return how much each message is trained on: as the line says, else by `train_on`."""
        if self.weights is not None:
            return self.weights
        last = len(self.messages) - 1
        return [
            float(message["role"] == ASSISTANT and (train_on == ALL or index == last))
            for index, message in enumerate(self.messages)
        ]

    def _refusal(self, error: TinsmithError) -> ConversationFormatError:
        return ConversationFormatError(f"{self.where}: {error.message}", remedy=error.remedy)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A prompt and what is said to it, as text."""

    prompt: str
    said: str
    weight: float


def conversation_to_datum(
    tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Tools = None
) -> Datum:
    """Return the datum of a conversation whose last message is the assistant's.

    Returns:
        T tokens with `target_tokens` (int64 [T]) and `weights` (float32 [T]): 1 where the target
        belongs to the last message or its end of turn, else 0.

    Raises:
        ConversationFormatError: If the last message is not the assistant's, or the chat template
            renders the prompt otherwise once an answer follows.
        InvalidArgumentError: If the template refuses it, or passes over a text of it.
    """
    weights = [0.0] * (len(messages) - 1) + [1.0]
    [datum] = answers_to_data(tokenizer, messages, weights, tools=tools)
    return datum


def answers_to_data(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    weights: Sequence[float],
    *,
    tools: Tools = None,
) -> list[Datum]:
    """Return the data of the answers of a conversation that have a weight.

    They are one datum if the template leaves its history alone, else one for each answer.

    Args:
        tokenizer: Of the model.
        messages: What follows the last of those answers is left out.
        weights: Of each message; 0 is only read.
        tools: That the model may call.

    Raises:
        ConversationFormatError: If there is none, one is not the assistant's, or the chat template
            renders a prompt otherwise once an answer follows.
        InvalidArgumentError: If the template refuses it, or passes over a text of it.
    """
    trained = [index for index, weight in enumerate(weights) if weight]
    if not trained:
        raise ConversationFormatError(
            "nothing of it is trained on: no answer has a weight above 0",
            remedy="leave it out, or give an answer a weight",
        )
    if trained[0] == 0 or any(messages[index].get("role") != ASSISTANT for index in trained):
        raise ConversationFormatError("a conversation must end with a message of the assistant")
    answers = [
        _split_answer(tokenizer, messages[: index + 1], weights[index], tools) for index in trained
    ]
    whole = answers[-1].prompt + answers[-1].said
    if all(whole.startswith(answer.prompt + answer.said) for answer in answers):
        return [_to_datum(tokenizer, answers)]
    return [_to_datum(tokenizer, [answer]) for answer in answers]


def scale_weights(batch: Sequence[Datum]) -> list[Datum]:
    """Return a batch whose weights sum to 1, so that a learning rate fits any batch size.

    The service sums losses over tokens and never averages; averaging is the client's choice.
    """
    total = sum(float(np.abs(datum.loss_fn_inputs["weights"]).sum()) for datum in batch)
    return [
        Datum(
            datum.model_input,
            {**datum.loss_fn_inputs, "weights": datum.loss_fn_inputs["weights"] / max(total, 1.0)},
        )
        for datum in batch
    ]


def read_conversations(path: Path) -> list[Conversation]:
    """Read a JSONL file of conversations, one on each line, in any layout of `row_layouts`.

    Raises:
        ConversationFormatError: If the file cannot be read, or a line is none of these; the
            message names the line.
    """
    conversations = [
        _decode_record(line.value, line.where) for line in read_lines(path, ConversationFormatError)
    ]
    if not conversations:
        raise ConversationFormatError(f"{path} holds no conversation", remedy="write one a line")
    return conversations


def _decode_record(record: object, where: str) -> Conversation:
    row = read_row(record, where)
    if row is None:
        found = f" with the keys {', '.join(map(str, record))}" if isinstance(record, dict) else ""
        raise ConversationFormatError(
            f"{where}: a line{found} is no conversation",
            remedy='write {"messages": [{"role": ..., "content": ...}, ...]}, or question and '
            "answer",
        )
    if row.messages[-1]["role"] != ASSISTANT or len(row.messages) < 2:
        raise ConversationFormatError(
            f"{where}: a conversation ends with a message of the assistant that answers another",
            remedy="cut what follows the last answer",
        )
    if row.weights is not None and not any(row.weights):
        raise ConversationFormatError(
            f"{where}: nothing of the line is trained on: no answer has a weight above 0",
            remedy="leave the line out, or give an answer a weight",
        )
    return Conversation(row.messages, row.tools, where, row.weights, row.layout)


def _split_answer(
    tokenizer: Tokenizer, messages: Sequence[Message], weight: float, tools: Tools
) -> _Answer:
    prompt = tokenizer.render_chat_template(messages[:-1], add_generation_prompt=True, tools=tools)
    whole = tokenizer.render_chat_template(messages, tools=tools)
    if not whole.startswith(prompt):
        raise ConversationFormatError(
            "the chat template rewrites the prompt once an answer follows",
            remedy="train on turns one by one with a template that appends",
        )
    said = whole[len(prompt) :]
    # Templates put more behind the end of a turn, such as a line break, which no model says.
    marks = [mark for mark in tokenizer.turn_ends if mark in said]
    return _Answer(
        prompt, said[: max((said.rfind(m) + len(m) for m in marks), default=None)], weight
    )


def _to_datum(tokenizer: Tokenizer, answers: Sequence[_Answer]) -> Datum:
    pieces: list[tuple[str, float]] = []
    done = ""
    for answer in answers:
        pieces += [(answer.prompt[len(done) :], 0.0), (answer.said, answer.weight)]
        done = answer.prompt + answer.said
    tokens, weights = _cut(tokenizer, pieces, done)
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": np.asarray(tokens[1:], dtype=np.int64),
            "weights": np.asarray(weights[1:], dtype=np.float32),
        },
    )


def _cut(
    tokenizer: Tokenizer, pieces: Sequence[tuple[str, float]], whole: str
) -> tuple[list[int], list[float]]:
    """Return the tokens of pieces of a text, and the weight of each token."""
    together = tokenizer.encode(whole, add_special_tokens=False)
    tokens: list[int] = []
    weights: list[float] = []
    text = ""
    for piece, weight in pieces:
        text += piece
        # Where a token ends at the cut, the whole text has the tokens that a sampler continues.
        # Elsewhere, such as between line breaks, each side has tokens of its own.
        up_to_here = tokenizer.encode(text, add_special_tokens=False)
        if up_to_here == together[: len(up_to_here)] and tokens == together[: len(tokens)]:
            found = up_to_here[len(tokens) :]
        else:
            found = tokenizer.encode(piece, add_special_tokens=False)
        tokens += found
        weights += [weight] * len(found)
    if tokenizer.decode(tokens) != tokenizer.decode(together):
        raise ConversationFormatError(
            "the tokenizer writes another text where the prompt is cut from the answer",
            remedy="begin the answer as the model's template does, without white space before it",
        )
    return tokens, weights
