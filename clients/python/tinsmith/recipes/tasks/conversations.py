"""Conversations as training data: one datum each, trained on what the assistant said.

The prompt is rendered exactly as it will be when the model is asked, with the generation prompt;
the answer and the end of its turn follow. Only those carry weight.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.errors import TinsmithError
from tinsmith.recipes.tasks.jsonl import DataFormatError, read_lines
from tinsmith.text.tokenizer import Tokenizer
from tinsmith.types import Datum, ModelInput

Message = Mapping[str, Any]


_PAIRS = (("question", "answer"), ("prompt", "completion"))
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}


class ConversationFormatError(DataFormatError):
    """A record or file does not hold a conversation that can be trained on."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of a file.

    Attributes:
        messages: As chat templates read them; the last is the assistant's.
        tools: JSON schemas of the tools that the model may call; None if there are none.
        where: File and line, for messages.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    where: str

    def to_datum(self, tokenizer: Tokenizer) -> Datum:
        """Return its datum; see `conversation_to_datum`.

        Raises:
            ConversationFormatError: If the chat template cannot render it; names the line.
        """
        try:
            return conversation_to_datum(tokenizer, self.messages, tools=self.tools)
        except TinsmithError as error:
            raise ConversationFormatError(
                f"{self.where}: {error.message}", remedy=error.remedy
            ) from error


def conversation_to_datum(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Datum:
    """Return the datum of a conversation whose last message is the assistant's.

    Returns:
        T tokens with `target_tokens` (int64 [T]) and `weights` (float32 [T]): 1 where the target
        belongs to the last message or its end of turn, else 0.

    Raises:
        ConversationFormatError: If the last message is not the assistant's, or the chat template
            renders the prompt otherwise once an answer follows, or drops a tool call.
    """
    if len(messages) < 2 or messages[-1].get("role") != "assistant":
        raise ConversationFormatError("a conversation must end with a message of the assistant")
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tools=tools)
    whole = tokenizer.apply_chat_template(messages, tools=tools)
    _check_calls(tokenizer, messages, whole)
    if whole[: len(prompt)] != prompt:
        raise ConversationFormatError(
            "the chat template rewrites the prompt once an answer follows",
            remedy="train on turns one by one with a template that appends",
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
    total = sum(float(np.abs(datum.loss_fn_inputs["weights"]).sum()) for datum in batch)
    return [
        Datum(
            datum.model_input,
            {**datum.loss_fn_inputs, "weights": datum.loss_fn_inputs["weights"] / max(total, 1.0)},
        )
        for datum in batch
    ]


def read_conversations(path: Path) -> list[Conversation]:
    """Read a JSONL file of conversations, one on each line.

    A line is `{"messages": [{"role", "content"}, ...]}`, with `tools` beside it if there are any;
    GSM8K's `{"question", "answer"}`; `{"prompt", "completion"}`; or ShareGPT's
    `{"conversations": [{"from", "value"}, ...]}`.

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


def _decode_record(record: Any, where: str) -> Conversation:
    raw = find_messages(record) if isinstance(record, dict) else None
    if not isinstance(raw, list) or not raw:
        found = f" with the keys {', '.join(map(str, record))}" if isinstance(record, dict) else ""
        raise ConversationFormatError(
            f"{where}: a line{found} is no conversation",
            remedy='write {"messages": [{"role": ..., "content": ...}, ...]}, or question and '
            "answer",
        )
    messages = [decode_message(message, where) for message in raw]
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        raise ConversationFormatError(
            f"{where}: a conversation ends with a message of the assistant that answers another",
            remedy="cut what follows the last answer",
        )
    tools = record.get("tools")
    return Conversation(messages, tools if isinstance(tools, list) and tools else None, where)


def find_messages(record: dict[str, Any]) -> object:
    """Return the messages of a record in any of the layouts; None if it has none of them."""
    for question, answer in _PAIRS:
        if question in record and answer in record:
            return [
                {"role": "user", "content": record[question]},
                {"role": "assistant", "content": record[answer]},
            ]
    turns = record.get("conversations")
    if isinstance(turns, list) and all(isinstance(turn, dict) and "from" in turn for turn in turns):
        return [
            {"role": _SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
            for turn in turns
        ]
    return record.get("messages")


def decode_message(message: object, where: str) -> dict[str, Any]:
    """Return a message as templates read it: content is text, arguments of calls are objects.

    Raises:
        ConversationFormatError: If it is no message; names the line.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConversationFormatError(f"{where}: a message has no role", remedy="give it one")
    decoded = {**message, "content": _text_of(message.get("content"))}
    if message.get("tool_calls"):
        # A null would be spelt out by templates that only paste it.
        decoded["content"] = decoded["content"] or ""
        decoded["tool_calls"] = [_decode_call(call, where) for call in message["tool_calls"]]
    if decoded["content"] is None:
        raise ConversationFormatError(
            f"{where}: a message of the {message['role']} has no content that is text",
            remedy="give it a content",
        )
    return decoded


def _text_of(content: object) -> str | None:
    """Return text, also of a list of parts that are all text; None if it is something else."""
    if isinstance(content, list) and content:
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(parts) else None
    return content if isinstance(content, str) else None


def _decode_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or "name" not in function:
        raise ConversationFormatError(
            f"{where}: a tool call names no function", remedy="write it as OpenAI's API does"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # On the wire they are text; templates turn objects into JSON themselves.
        with contextlib.suppress(json.JSONDecodeError):
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _check_calls(
    tokenizer: Tokenizer, messages: Sequence[Message], rendered: Sequence[int]
) -> None:
    """Refuse a template that drops the calls that a conversation is about."""
    names = {
        call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()
    }
    if not names:
        return
    text = tokenizer.decode(rendered)
    for name in sorted(names):
        if str(name) not in text:
            raise ConversationFormatError(
                "the model's chat template has no convention for tool calls: it drops the call of "
                f"{name}",
                remedy="train a model whose template has one, or write calls as text",
            )


def _end_of_turn(tokenizer: Tokenizer, tokens: Sequence[int], start: int) -> int:
    """Return the length up to and including the end of the turn; templates add a line break."""
    for index in range(len(tokens) - 1, start - 1, -1):
        if tokens[index] == tokenizer.eos_token_id:
            return index + 1
    return len(tokens)
