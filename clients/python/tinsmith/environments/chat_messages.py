"""Messages as chat templates read them, from the values of environments and back, with checks.

A chat message is a mapping with `role` and `content`, as transformers takes it. Its content is a
text, or a list of parts: texts, and places of images. What an environment shows is a stranger's:
anything else is an `ObservationError` that says what, and never reaches a template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.environments.environment import (
    ACTION_KINDS,
    TOKENS_ALONE,
    Action,
    InvalidActionError,
    Message,
    Tool,
)
from tinsmith.text.tool_notations import ToolCall, is_function_name

ROLES = ("system", "user", "assistant", "tool")

_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})

MAX_STOP_STRINGS = 16
"""Of an observation. A sampler takes 64 with those of the sampling parameters."""
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_SHOWN_TOKENS = 1 << 20
"""Of an observation; no model reads as many."""
_MAX_TOKEN_ID = 2**31 - 1


class ObservationError(ValueError):
    """What an environment showed is no observation; its episode is lost."""


def to_chat_message(message: object) -> dict[str, Any]:
    """Return a message of an environment as chat templates read it.

    Raises:
        ObservationError: If it is no message.
    """
    if not isinstance(message, Message):
        raise ObservationError(f"expected a Message, got {type(message).__name__}")
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = [to_chat_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    if message.name:
        chat["name"] = message.name
    return read_chat_message(chat)


def read_stop(observation: object) -> tuple[str | int, ...]:
    """Return where the action behind an observation ends: strings, then token ids.

    A class of one's own may have no `stop`.

    Raises:
        ObservationError: If it is no list of them, or they are too many or too long.
    """
    stop = getattr(observation, "stop", None)
    if stop is None:
        return ()
    if not isinstance(stop, list | tuple):
        raise ObservationError(f"stop is a list, got {type(stop).__name__}")
    strings = [each for each in stop if isinstance(each, str)]
    token_ids = [each for each in stop if isinstance(each, int) and not isinstance(each, bool)]
    if len(strings) + len(token_ids) != len(stop):
        raise ObservationError("stop holds what is neither a string nor a token id")
    if len(strings) > MAX_STOP_STRINGS or len(token_ids) > MAX_STOP_TOKENS:
        raise ObservationError(
            f"stop holds {len(strings)} strings and {len(token_ids)} token ids, at most "
            f"{MAX_STOP_STRINGS} and {MAX_STOP_TOKENS} may be"
        )
    if not all(1 <= len(each) <= MAX_STOP_CHARACTERS for each in strings):
        raise ObservationError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
    if any("\ud800" <= character <= "\udfff" for each in strings for character in each):
        raise ObservationError("a stop string holds half of a surrogate pair")
    if not all(0 <= each <= _MAX_TOKEN_ID for each in token_ids):
        raise ObservationError(f"a stop token is a whole number from 0 to {_MAX_TOKEN_ID}")
    return (*strings, *token_ids)


def read_tokens(observation: object) -> tuple[int, ...]:
    """Return the tokens that an observation shows; none where it shows messages.

    A class of one's own may have no `tokens`.

    Raises:
        ObservationError: If they are no list of token ids, too many, or stand beside messages.
    """
    tokens = getattr(observation, "tokens", ())
    if not isinstance(tokens, list | tuple):
        raise ObservationError(f"tokens are a list, got {type(tokens).__name__}")
    if len(tokens) > MAX_SHOWN_TOKENS:
        raise ObservationError(
            f"an observation shows {len(tokens)} tokens, at most {MAX_SHOWN_TOKENS} may be"
        )
    if tokens and any(getattr(observation, each, ()) for each in ("messages", "images", "tools")):
        raise ObservationError(
            "an observation shows tokens beside messages, images or tools; it shows one or other"
        )
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= _MAX_TOKEN_ID:
            raise ObservationError(
                f"a token is a whole number from 0 to {_MAX_TOKEN_ID}, got {type(token).__name__}"
                + (f" {token}" if type(token) is int and token.bit_length() < 64 else "")
            )
    return tuple(tokens)


def read_action_kinds(environment: object) -> frozenset[str]:
    """Return the kinds of actions that an environment says that it understands.

    Raises:
        ObservationError: If they are none.
    """
    kinds = getattr(environment, "action_kinds", None)
    if not isinstance(kinds, frozenset | set | list | tuple) or not kinds:
        raise ObservationError(f"action_kinds is a set, got {type(kinds).__name__}")
    unknown = [kind for kind in kinds if kind not in ACTION_KINDS]
    if unknown:
        raise ObservationError(
            f"action_kinds holds {str(unknown[0])[:32]!r}; known are: {', '.join(ACTION_KINDS)}"
        )
    return frozenset(kinds)


def check_action_kind(action: Action, kinds: frozenset[str]) -> None:
    """Refuse an action of a kind that an environment lacks.

    Raises:
        InvalidActionError: If it is so.
    """
    if action.kind not in kinds:
        raise InvalidActionError(
            f"must be of the kind {', '.join(sorted(kinds))}, got {action.kind}"
        )


def check_shown_tokens(tokens: Sequence[int], kinds: frozenset[str]) -> None:
    """Refuse tokens of an environment that is told its actions as text.

    Without a template that text has no known end.

    Raises:
        ObservationError: If it is so.
    """
    if tokens and kinds != TOKENS_ALONE:
        raise ObservationError(
            "the environment shows tokens, and steps on "
            f"{' and '.join(sorted(kinds))}; set action_kinds = frozenset({{'tokens'}})"
        )


def to_chat_call(call: object) -> dict[str, Any]:
    """Return a call of a tool as chat templates read it.

    Raises:
        ObservationError: If it is no call.
    """
    if not isinstance(call, ToolCall):
        raise ObservationError(f"expected a ToolCall, got {type(call).__name__}")
    function = {"name": call.name, "arguments": call.arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})


def to_chat_tool(tool: object) -> dict[str, Any]:
    """Return a tool as chat templates read it.

    Raises:
        ObservationError: If it is no tool.
    """
    if not isinstance(tool, Tool):
        raise ObservationError(f"expected a Tool, got {type(tool).__name__}")
    parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
    return read_chat_tool(
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": parameters,
            },
        }
    )


def from_chat_message(chat: Mapping[str, Any]) -> Message:
    """Return a message of its chat form, which was checked."""
    return Message(
        chat["role"],
        chat["content"],
        tuple(from_chat_call(call) for call in chat.get("tool_calls", ())),
        chat.get("tool_call_id", ""),
        chat.get("name", ""),
    )


def from_chat_call(chat: Mapping[str, Any]) -> ToolCall:
    """Return a call of a tool of its chat form, which was checked."""
    function = chat["function"]
    return ToolCall(function["name"], function["arguments"], chat.get("id", ""))


def from_chat_tool(chat: Mapping[str, Any]) -> Tool:
    """Return a tool of its chat form, which was checked."""
    function = chat["function"]
    return Tool(function["name"], function["description"], function["parameters"])


def read_chat_message(chat: object) -> dict[str, Any]:
    """Return a copy of a chat message that holds nothing but what a message may hold.

    Raises:
        ObservationError: If it is no message.
    """
    if not isinstance(chat, Mapping):
        raise ObservationError(f"a message is a mapping, got {type(chat).__name__}")
    unknown = sorted(str(key)[:32] for key in chat if key not in _FIELDS)
    if unknown:
        raise ObservationError(f"a message has no field {unknown[0]!r}")
    role = chat.get("role")
    if role not in ROLES:
        raise ObservationError(f"the role of a message is {role!r}, not one of {', '.join(ROLES)}")
    read: dict[str, Any] = {"role": role, "content": _read_content(chat.get("content"))}
    for name in ("tool_call_id", "name"):
        if chat.get(name) is not None:
            read[name] = _read_text(chat[name], f"the {name} of a message")
    if chat.get("tool_calls"):
        if role != "assistant":
            raise ObservationError(f"a message of role {role} calls tools; an assistant's may")
        if not isinstance(chat["tool_calls"], Sequence):
            raise ObservationError("the tool_calls of a message are no list")
        read["tool_calls"] = [_read_call(call) for call in chat["tool_calls"]]
    return read


def read_chat_tool(chat: object) -> dict[str, Any]:
    """Return a copy of a tool in the form of chat templates.

    Raises:
        ObservationError: If it is no tool.
    """
    function = chat.get("function") if isinstance(chat, Mapping) else None
    if not isinstance(function, Mapping) or not is_function_name(function.get("name")):
        raise ObservationError("a tool needs a name of letters, digits, '_', '.' and '-'")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):
        raise ObservationError(f"the parameters of tool {function['name']} are no JSON schema")
    _require_json(parameters, f"the parameters of tool {function['name']}")
    description = _read_text(function.get("description", ""), "the description of a tool")
    read = {"name": function["name"], "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": read}


def count_images(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how many places for images the messages have."""
    return sum(
        part["type"] == "image"
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
    )


def place_images(messages: list[dict[str, Any]], num_images: int) -> None:
    """Put places for images before the text of the first message, if no message has any.

    Raises:
        ObservationError: If there are more or fewer images than places.
    """
    num_places = count_images(messages)
    if num_images and not num_places and messages:
        content = messages[0]["content"]
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages[0]["content"] = [*({"type": "image"} for _ in range(num_images)), *texts]
    elif num_images != num_places:
        raise ObservationError(
            f"the observation holds {num_images} images and has places for {num_places}"
        )


def _read_content(content: object) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise ObservationError(
            f"the content of a message is a text or a list of parts, got {type(content).__name__}"
        )
    return [_read_part(part) for part in content]


def _read_part(part: object) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind == "image" and set(part) == {"type"}:
        return {"type": "image"}
    if isinstance(part, Mapping) and kind == "text" and set(part) == {"type", "text"}:
        return {"type": "text", "text": _read_text(part["text"], "the text of a part")}
    raise ObservationError(
        f"a part of a message is {kind!r}; it is {{'type': 'text', 'text': ...}} or "
        "{'type': 'image'}, whose image stands in the observation's images"
    )


def _read_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise ObservationError("a call of a tool is {'function': {'name': ..., 'arguments': ...}}")
    name, arguments = function.get("name"), function.get("arguments")
    if not is_function_name(name):
        raise ObservationError("a call names a tool by letters, digits, '_', '.' and '-'")
    if isinstance(arguments, Mapping):
        arguments = _require_json(arguments, f"the arguments of a call of {name}")
    if not isinstance(arguments, str) or not _is_object(arguments):
        raise ObservationError(f"the arguments of a call of {name} are no JSON object")
    read: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if call.get("id"):
        read["id"] = _read_text(call["id"], "the id of a call")
    return read


def _read_text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise ObservationError(f"{what} is a text, got {type(value).__name__}")
    return value


def _require_json(value: Mapping[str, Any], what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ObservationError(f"{what} have no JSON form: {error}") from error


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
