"""The input of a response as messages of a chat.

A call that the model made stands in the message in front of it, where chat templates look for it. A
developer's message is a system message: templates of open models know no other. Items that refer to
what a server would keep, or that no template shows, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith_runtime.errors import InvalidFieldError

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text")


def messages_of(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """Return the messages of a conversation.

    Args:
        given: A text of the user's, or items.
        instructions: What comes first.

    Raises:
        InvalidFieldError: Naming the item that has no place in a conversation.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for index, item in enumerate(given):
        _add(messages, item, f"input.{index}")
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], field: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise InvalidFieldError(f"{field}.role", f"must be one of {sorted(_ROLES)}")
        messages.append({"role": role, "content": _content(item.get("content"), field)})
    elif kind == "function_call":
        call = {
            "id": _text(item, "call_id", field),
            "type": "function",
            "function": {
                "name": _text(item, "name", field),
                "arguments": _text(item, "arguments", field),
            },
        }
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), field)
        call_id = _text(item, "call_id", field)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "item_reference":
        raise InvalidFieldError(
            f"{field}.type",
            "is item_reference, which names what a server keeps; nothing is kept here: send the "
            "items themselves (Vercel's AI SDK does with providerOptions.openai.store: false)",
        )
    else:
        raise InvalidFieldError(f"{field}.type", f"{kind!r} is not offered")


def _text(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidFieldError(f"{field}.{name}", "must be a string")
    return value


def _content(content: object, field: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidFieldError(field, "must have a content of text or parts")
    parts = [_part(part, f"{field}.content.{index}") for index, part in enumerate(content)]
    # Templates of models that read no images join texts by themselves or not at all.
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, field: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise InvalidFieldError(field, f"has the type {kind!r}, which is not offered here")
