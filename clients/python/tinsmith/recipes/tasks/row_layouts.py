"""Rows of data files in the layouts that people have, as messages: one reader for every recipe.

Known are OpenAI's `messages` (with `weight`, `function_call` and `functions`) and ShareGPT in its
dialects, LLaMA-Factory's calls and observations among them. So are Alpaca's instruction, input and
output, and TRL's prompt and completion as texts or messages. axolotl's `train` and pairs of
question and answer are known too. Columns that are null count as absent. Whatever would be left
out of what the model reads, such as pictures or ranges of characters, is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.recipes.tasks.jsonl import DataFormatError
from tinsmith.text.template_forms import name_calls, texts_of
from tinsmith.text.wholeness import REASONING_FIELDS

Message = dict[str, Any]

ASSISTANT = "assistant"
_ROLES = {
    "human": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "bot": ASSISTANT,
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_CALL_ROLES = frozenset({"function_call", "tool_call"})
"""Turns of ShareGPT that are calls: the text is JSON."""
_PAIRS = (
    ("question", "answer"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("instruction", "output"),
    ("instruction", "response"),
)
_QUESTIONS = ("instruction", "question", "query")
_BESIDE_INSTRUCTION = ("input", "context")
_SYSTEM = ("system", "system_prompt")
_NOT_READ = {
    "images": "shows images, and text alone is trained on",
    "image": "shows an image, and text alone is trained on",
    "videos": "shows videos, and text alone is trained on",
    "audios": "has sounds, and text alone is trained on",
    "segments": "has axolotl's segments, which no chat template renders",
    "chat_template_kwargs": "has settings of a chat template of its own",
    "documents": "has documents for a chat template",
}
"""Columns of texts or settings that would be left out, each with what a row with it does."""
_WEIGHTS = ("weight", "train", "training")


class ConversationFormatError(DataFormatError):
    """A record or file does not hold a conversation that can be trained on."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a row says.

    Attributes:
        messages: As chat templates read them, without the marks of training.
        tools: JSON schemas of the tools that the model may call; None if there are none.
        weights: Of each message, how much it is trained on; None if the row does not say.
        layout: Its name, for people.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    weights: list[float] | None
    layout: str


def read_row(record: object, where: str) -> Row | None:
    """Return what a row says; None if it has no layout that is known.

    Raises:
        ConversationFormatError: If it has one and holds what cannot be read; names the line.
    """
    if not isinstance(record, Mapping):
        return None
    record = {key: value for key, value in record.items() if value is not None}
    found = _find_turns(record, where)
    if found is None:
        return None
    layout, turns, weights = found
    for column, problem in _NOT_READ.items():
        if record.get(column):
            raise ConversationFormatError(
                f"{where}: the row {problem} ({column})", remedy="leave the row or the column out"
            )
    messages = [decode_message(turn, where) for turn in turns]
    if weights is None:
        weights = _marked_weights(turns, messages, where)
    system = _system_of(record, messages, where)
    if system is not None:
        messages = [system, *messages]
        weights = None if weights is None else [0.0, *weights]
    tools = read_tools(record, where)
    return Row(messages, tools, weights, layout)


def read_prompt(record: Mapping[str, Any], where: str) -> list[Message]:
    """Return the messages of a row that are asked; none if there are none.

    That is its column `prompt`, or its messages or its question, with whatever answers they hold.

    Raises:
        ConversationFormatError: If they cannot be read; names the line.
    """
    record = {key: value for key, value in record.items() if value is not None}
    turns: Sequence[object] = ()
    if record.get("prompt"):
        turns = _turns(record["prompt"], "user", where)
    elif (found := _find_turns(record, where)) is not None:
        turns = found[1]
    elif (question := next((name for name in _QUESTIONS if record.get(name)), None)) is not None:
        turns = _asked(record, question, where)
    messages = [decode_message(turn, where) for turn in turns]
    system = _system_of(record, messages, where) if messages else None
    return messages if system is None else [system, *messages]


def read_tools(record: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row, which may be JSON text and may be functions alone.

    Raises:
        ConversationFormatError: If they are none; names the line.
    """
    given = record.get("tools") or record.get("functions")
    tools = _parse(given, where, "the tools")
    if isinstance(tools, Mapping):
        tools = [tools]
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ConversationFormatError(
            f"{where}: the tools are no list", remedy="write them as OpenAI's API does"
        )
    decoded = []
    for each in tools:
        tool = _parse(each, where, "a tool")
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConversationFormatError(
                f"{where}: a tool has no name", remedy="write tools as OpenAI's API does"
            )
        decoded.append({"type": "function", "function": dict(function)})
    return decoded


def decode_message(message: object, where: str) -> Message:
    """Return a message as templates read it, whatever layout it came in.

    Raises:
        ConversationFormatError: If it is no message, or has no text; names the line.
    """
    fields = (
        {key: value for key, value in message.items() if value is not None}
        if isinstance(message, Mapping)
        else {}
    )
    role = fields.pop("role", fields.pop("from", None))
    if not isinstance(role, str) or not role:
        raise ConversationFormatError(f"{where}: a message has no role", remedy="give it one")
    for name in ("value", "text"):
        if name in fields and "content" not in fields:
            fields["content"] = fields.pop(name)
    if "train_detail" in fields:
        raise ConversationFormatError(
            f"{where}: a message marks ranges of its characters for training (train_detail)",
            remedy="mark whole messages with weight or train",
        )
    for name in _WEIGHTS:
        fields.pop(name, None)
    role = role.strip().lower().replace("-", "_")
    if role in _CALL_ROLES:
        return _decode_call_turn(fields, where)
    decoded = {"role": _ROLES.get(role, role), **name_calls(fields)}
    decoded["content"] = _text_of(decoded.get("content"), role, where)
    calls = _parse(decoded.pop("tool_calls", None), where, "the tool calls")
    if calls:
        decoded["tool_calls"] = _decode_calls(calls, where)
    if decoded["content"] is None:
        if not calls and not any(decoded.get(name) for name in REASONING_FIELDS):
            raise ConversationFormatError(
                f"{where}: a message of the {role} has no content that is text",
                remedy="give it a content",
            )
        decoded["content"] = ""
    return decoded


def _find_turns(
    record: Mapping[str, Any], where: str
) -> tuple[str, list[object], list[float] | None] | None:
    """Return the layout of a row, its turns and how much each is trained on, if that is said."""
    for column, layout in (("messages", "messages"), ("conversations", "ShareGPT")):
        turns = _parse(record.get(column), where, column)
        if isinstance(turns, list) and turns:
            return layout, turns, None
    for question, answer in _PAIRS:
        if question in record and answer in record:
            return _pair_turns(record, question, answer, where)
    return None


def _pair_turns(
    record: Mapping[str, Any], question: str, answer: str, where: str
) -> tuple[str, list[object], list[float] | None]:
    prompt = _asked(record, question, where)
    said = _turns(record[answer], ASSISTANT, where)
    thought = {name: record[name] for name in REASONING_FIELDS[:2] if name in record}
    if thought:
        said = [*said[:-1], {**said[-1], **thought}]
    # What stands in the column of the answer is trained on, and nothing else.
    is_said = [float(turn.get("role", turn.get("from")) == ASSISTANT) for turn in said]
    weights = [0.0] * len(prompt) + is_said
    return f"{question} and {answer}", [*prompt, *said], weights


def _asked(record: Mapping[str, Any], question: str, where: str) -> list[Message]:
    asked = record[question]
    if question == "instruction" and isinstance(asked, str):
        beside = [record[name] for name in _BESIDE_INSTRUCTION if record.get(name)]
        asked = "\n".join([asked, *map(str, beside)])
    return [*_history(record, where), *_turns(asked, "user", where)]


def _history(record: Mapping[str, Any], where: str) -> list[Message]:
    """Return the rounds before the question, pairs of texts, as LLaMA-Factory keeps them."""
    turns: list[Message] = []
    for pair in record.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConversationFormatError(
                f"{where}: history is no list of pairs of question and answer",
                remedy="write [[question, answer], ...], or messages",
            )
        turns += [{"role": "user", "content": pair[0]}, {"role": ASSISTANT, "content": pair[1]}]
    return turns


def _turns(value: object, role: str, where: str) -> list[Message]:
    """Return the turns of a column that holds a text, a message or messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        value = [value]
    turns = [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list) else []
    if not turns or not isinstance(value, list) or len(turns) != len(value):
        raise ConversationFormatError(
            f"{where}: neither text nor messages: {value!r:.80}",
            remedy='write a text, or [{"role": ..., "content": ...}, ...]',
        )
    return [dict(turn) for turn in turns]


def _system_of(
    record: Mapping[str, Any], messages: Sequence[Message], where: str
) -> Message | None:
    """Return the message of the system that stands beside the turns."""
    given = {str(record[name]): None for name in _SYSTEM if record.get(name)}
    if not given:
        return None
    begins = bool(messages) and messages[0]["role"] in ("system", "developer")
    if begins and list(given) == [messages[0]["content"]]:
        return None
    if begins or len(given) > 1:
        raise ConversationFormatError(
            f"{where}: the row has two prompts of the system", remedy="leave one of them out"
        )
    return {"role": "system", "content": next(iter(given))}


def _marked_weights(
    turns: Sequence[object], messages: Sequence[Message], where: str
) -> list[float] | None:
    """Return how much each message is trained on by marks of its own; None if none has any."""
    marks = [
        next((turn[name] for name in _WEIGHTS if turn.get(name) is not None), None)
        if isinstance(turn, Mapping)
        else None
        for turn in turns
    ]
    if all(mark is None for mark in marks):
        return None
    weights = []
    for mark, message in zip(marks, messages, strict=True):
        is_answer = message["role"] == ASSISTANT
        if mark is not None and (not isinstance(mark, int | float) or not 0 <= mark <= 1):
            raise ConversationFormatError(
                f"{where}: a message has the weight {mark!r}", remedy="give a number from 0 to 1"
            )
        if mark and not is_answer:
            raise ConversationFormatError(
                f"{where}: a message of the {message['role']} is marked to be trained on",
                remedy="mark messages of the assistant alone",
            )
        weights.append(float(is_answer if mark is None else mark))
    return weights


def _text_of(content: object, role: str, where: str) -> str | None:
    """Return text, also of a list of parts that are all text; None if there is none."""
    texts = texts_of(content)
    if texts:
        return "".join(texts)
    if isinstance(content, list) and content:
        raise ConversationFormatError(
            f"{where}: a message of the {role} has no content that is text alone",
            remedy="leave out the row, or the parts that are no text",
        )
    return content if isinstance(content, str) else None


def _decode_call_turn(fields: Mapping[str, Any], where: str) -> Message:
    calls = _parse(fields.get("content"), where, "a call")
    decoded = _decode_calls(calls if isinstance(calls, list) else [calls], where)
    return {"role": ASSISTANT, "content": "", "tool_calls": decoded}


def _decode_calls(calls: object, where: str) -> list[dict[str, Any]]:
    decoded = []
    for each in calls if isinstance(calls, list) else [calls]:
        call = _parse(each, where, "a tool call")
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConversationFormatError(
                f"{where}: a tool call names no function", remedy="write it as OpenAI's API does"
            )
        arguments = function.get("arguments", function.get("parameters"))
        given = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        rest = {key: value for key, value in call.items() if key == "id" and value is not None}
        decoded.append({**rest, "type": "function", "function": given})
    return decoded


def _parse(value: object, where: str, what: str) -> Any:
    """Return what JSON text holds; anything else as it is."""
    if not isinstance(value, str) or not value.strip():
        return None if isinstance(value, str) else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ConversationFormatError(
            f"{where}: {what} cannot be read as JSON", remedy="write valid JSON"
        ) from error
