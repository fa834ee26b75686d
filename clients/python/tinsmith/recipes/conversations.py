"""Conversations as training data: one datum each, trained on what the assistant said.

The prompt is rendered exactly as it will be when the model is asked, with the generation prompt;
the answer and the end of its turn follow. Only those carry weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.tokenizer import Tokenizer
from tinsmith.types import Datum, ModelInput

Message = Mapping[str, Any]


class ConversationFormatError(ValueError):
    """A record or file does not hold a conversation that can be trained on."""


def conversation_to_datum(tokenizer: Tokenizer, messages: Sequence[Message]) -> Datum:
    """Return the datum of a conversation whose last message is the assistant's.

    Returns:
        T tokens with `target_tokens` (int64 [T]) and `weights` (float32 [T]): 1 where the target
        belongs to the last message or its end of turn, else 0.

    Raises:
        ConversationFormatError: If the last message is not the assistant's, or the chat template
            renders the prompt otherwise once an answer follows.
    """
    if len(messages) < 2 or messages[-1].get("role") != "assistant":
        raise ConversationFormatError("a conversation must end with a message of the assistant")
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages)
    if whole[: len(prompt)] != prompt:
        raise ConversationFormatError(
            "the chat template rewrites the prompt once an answer follows; train on turns one by "
            "one with a template that appends"
        )
    end = _end_of_turn(tokenizer, whole, len(prompt))
    tokens = whole[:end]
    weights = np.zeros(len(tokens) - 1, dtype=np.float32)
    weights[len(prompt) - 1 :] = 1.0
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": np.asarray(tokens[1:], dtype=np.int64), "weights": weights},
    )


def scale_weights(batch: Sequence[Datum]) -> list[Datum]:
    """Return a batch whose weights sum to 1, so that a learning rate fits any batch size.

    The service sums losses over tokens and never averages; averaging is the client's choice.
    """
    total = sum(float(np.abs(datum.loss_inputs["weights"]).sum()) for datum in batch)
    return [
        Datum(
            datum.model_input,
            {**datum.loss_inputs, "weights": datum.loss_inputs["weights"] / max(total, 1.0)},
        )
        for datum in batch
    ]


def read_conversations(path: Path) -> list[list[dict[str, Any]]]:
    """Read a JSONL file of conversations: `{"messages": [{"role", "content"}, ...]}` on each line.

    Lines in GSM8K's layout, `{"question", "answer"}`, become one question and its answer.

    Raises:
        ConversationFormatError: If a line is neither; the message names the line.
    """
    conversations = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            conversations.append(_decode_line(line, where=f"{path.name}:{number}"))
    if not conversations:
        raise ConversationFormatError(f"{path} holds no conversation")
    return conversations


def _decode_line(line: str, *, where: str) -> list[dict[str, Any]]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConversationFormatError(f"{where}: not JSON: {error.msg}") from error
    if isinstance(record, dict) and "question" in record and "answer" in record:
        record = {
            "messages": [
                {"role": "user", "content": record["question"]},
                {"role": "assistant", "content": record["answer"]},
            ]
        }
    messages = record.get("messages") if isinstance(record, dict) else None
    is_conversation = isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    )
    if not is_conversation or not messages or messages[-1]["role"] != "assistant":
        raise ConversationFormatError(
            f"{where}: expected messages with role and content, the last of the assistant, or "
            "question and answer"
        )
    return list(messages)


def _end_of_turn(tokenizer: Tokenizer, tokens: Sequence[int], start: int) -> int:
    """Return the length up to and including the end of the turn; templates add a line break."""
    for index in range(len(tokens) - 1, start - 1, -1):
        if tokens[index] == tokenizer.eos_token_id:
            return index + 1
    return len(tokens)
