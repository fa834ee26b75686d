"""Messages of Anthropic's form as messages of a chat.

Blocks of text and images stay parts of their message, and so does a call that the model made. Each
result of a call is a message of its own, as chat templates know it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith_runtime.errors import InvalidFieldError

_ROLES = ("user", "assistant", "system")
_PASSED = frozenset({"type", "cache_control"})
"""Of every block: says what it is, or how work is cached."""
_EMPTY: tuple[Any, ...] = (None, [], False)


@dataclass(slots=True)
class Messages:
    """Messages of a chat, and where each comes from.

    Attributes:
        messages: In order.
        origins: For each, what the request calls it.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], origin: str) -> None:
        """Add a message."""
        self.messages.append(message)
        self.origins.append(origin)


def messages_of(
    given: Sequence[Mapping[str, Any]], system: str | Sequence[Mapping[str, Any]] | None
) -> Messages:
    """Return the messages of a conversation.

    Args:
        given: As the request has them.
        system: What comes first.

    Raises:
        InvalidFieldError: Naming the block that has no place in a conversation.
    """
    found = Messages()
    if system is not None and system != []:
        found.add({"role": "system", "content": _texts(system, "system")}, "system")
    for index, message in enumerate(given):
        _add(found, message, f"messages.{index}")
    return found


def _add(found: Messages, message: Mapping[str, Any], origin: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise InvalidFieldError(f"{origin}.role", f"must be one of {', '.join(_ROLES)}")
    unknown = sorted(set(message) - {"role", "content"})
    if unknown:
        raise InvalidFieldError(f"{origin}.{unknown[0]}", "is not known here; leave it out")
    if isinstance(content, str):
        found.add({"role": role, "content": content}, origin)
    elif not isinstance(content, list) or not content:
        raise InvalidFieldError(f"{origin}.content", "must be a text or a list of blocks")
    elif role == "system":
        found.add({"role": role, "content": _texts(content, f"{origin}.content")}, origin)
    elif role == "assistant":
        found.add(_answer(content, f"{origin}.content"), origin)
    else:
        _add_user(found, content, origin)


def _add_user(found: Messages, content: Sequence[Any], origin: str) -> None:
    parts: list[dict[str, Any]] = []

    def end() -> None:
        if parts:
            found.add({"role": "user", "content": list(parts)}, origin)
            parts.clear()

    for index, block in enumerate(content):
        where = f"{origin}.content.{index}"
        if _kind(block, where) == "tool_result":
            end()
            found.add(_result(block, where), origin)
        else:
            parts.append(_part(block, where))
    end()


def _answer(content: Sequence[Any], origin: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        where = f"{origin}.{index}"
        kind = _kind(block, where)
        if kind == "tool_use":
            calls.append(_call(block, where))
        elif calls:
            raise InvalidFieldError(
                where, "follows a tool_use block; chat templates show calls behind all texts"
            )
        elif kind == "thinking":
            _check_fields(block, where, "thinking", "signature")
            before = message.get("reasoning_content", "")
            message["reasoning_content"] = before + _text(block, "thinking", where)
        elif kind == "text":
            texts.append(_part(block, where))
        else:
            raise InvalidFieldError(f"{where}.type", f"{kind!r} is not offered in an answer")
    if texts:
        message["content"] = texts
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    _check_fields(block, where, "id", "name", "input", also={"caller": {"type": "direct"}})
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidFieldError(f"{where}.input", "must be an object")
    function = {
        "name": _text(block, "name", where),
        "arguments": json.dumps(given, ensure_ascii=False),
    }
    return {"id": _text(block, "id", where), "type": "function", "function": function}


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    _check_fields(block, where, "tool_use_id", "content", "is_error")
    content = block.get("content")
    if isinstance(content, list):
        content = [_part(part, f"{where}.content.{index}") for index, part in enumerate(content)]
    if not isinstance(content, str | list | None):
        raise InvalidFieldError(f"{where}.content", "must be a text or a list of blocks")
    if block.get("is_error") and not content:
        raise InvalidFieldError(
            f"{where}.is_error", "needs a content: chat templates show the text of an error alone"
        )
    call_id = _text(block, "tool_use_id", where)
    return {"role": "tool", "tool_call_id": call_id, "content": content or ""}


def _part(block: Any, where: str) -> dict[str, Any]:
    kind = _kind(block, where)
    if kind == "text":
        _check_fields(block, where, "text", also={"citations": None})
        return {"type": "text", "text": _text(block, "text", where)}
    if kind == "image":
        _check_fields(block, where, "source")
        match block.get("source"):
            case {"type": "base64", "media_type": str(media), "data": str(data)}:
                return {"type": "image_url", "image_url": {"url": f"data:{media};base64,{data}"}}
        raise InvalidFieldError(
            f"{where}.source", "must be base64 with its media_type: the server fetches nothing"
        )
    raise InvalidFieldError(f"{where}.type", f"{kind!r} is not offered")


def _texts(given: str | Sequence[Any], where: str) -> str | list[dict[str, Any]]:
    if isinstance(given, str):
        return given
    parts = [_part(block, f"{where}.{index}") for index, block in enumerate(given)]
    for index, part in enumerate(parts):
        if part["type"] != "text":
            raise InvalidFieldError(f"{where}.{index}.type", "must be a text here")
    return parts


def _kind(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidFieldError(where, "must be a block with a type")
    return kind


def _text(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidFieldError(f"{where}.{name}", "must be a string")
    return value


def _check_fields(
    block: Mapping[str, Any], where: str, *known: str, also: Mapping[str, Any] | None = None
) -> None:
    """Refuse a field that would be lost, unless it asks for nothing."""
    for name, value in block.items():
        if name in _PASSED or name in known or value in _EMPTY:
            continue
        if also is None or name not in also or value != also[name]:
            raise InvalidFieldError(f"{where}.{name}", "is not known here; leave it out")
