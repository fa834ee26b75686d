"""A conversation in the form of OpenAI's chat API, as observations and actions.

Environments of other libraries call their model with the whole conversation each time. Ours show
what is new. So each request has to continue the one before it: an earlier message that was changed
or dropped is refused, since the tokens of the model's turns could not be kept then.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.environments.environment import (
    Action,
    Content,
    InvalidActionError,
    Message,
    Observation,
    Tool,
)
from tinsmith.images import ImageChunk
from tinsmith.text.tool_notations import ToolCall

_DATA_URL = re.compile(r"data:image/(png|jpeg|jpg);base64,(.*)", re.DOTALL)
_ROLES = {"developer": "system"}
"""Roles by another name."""
_FREE_CHOICES = (None, "auto")


class DialogueError(ValueError):
    """What the environment asked of its model cannot be played turn by turn; says why."""


class ChatDialogue:
    """The conversation of one episode."""

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] = []
        self._tools: list[Any] | None = None
        self._stop: tuple[str | int, ...] = ()
        self._num_calls = 0

    def observe(self, request: Mapping[str, Any]) -> Observation:
        """Return what a request shows beyond what was seen.

        Args:
            request: The body of a call of `/chat/completions`.

        Raises:
            DialogueError: If it does not continue the conversation, or asks for what a turn is not.
        """
        _check_plain(request)
        messages = request.get("messages")
        if not isinstance(messages, list) or not all(isinstance(one, Mapping) for one in messages):
            raise DialogueError("the messages of a request are no list of objects")
        num_seen = len(self._seen)
        for index, (seen, given) in enumerate(zip(self._seen, messages, strict=False)):
            if _essence(seen) != _essence(given):
                raise DialogueError(
                    f"message {index} of the conversation was changed after the model had read it"
                )
        if len(messages) < num_seen:
            raise DialogueError(f"{num_seen - len(messages)} messages were dropped")
        shown, images = [], []
        for message in messages[num_seen:]:
            read, found = _read_message(message)
            shown.append(read)
            images += found
        self._seen = list(messages)
        self._stop = _read_stop(request)
        return Observation(
            tuple(shown), tuple(images), tools=self._read_tools(request), stop=self._stop
        )

    def answer(self, action: Action) -> dict[str, Any]:
        """Return the message of the assistant that an action is.

        Raises:
            InvalidActionError: If the action is given as tokens.
        """
        if action.text is None and not action.tool_calls:
            raise InvalidActionError("the environment reads text and calls of tools, no tokens")
        message: dict[str, Any] = {"role": "assistant", "content": self._cut(action.text or "")}
        if action.tool_calls:
            message["tool_calls"] = [self._write_call(call) for call in action.tool_calls]
        self._seen.append(message)
        return message

    def _cut(self, text: str) -> str:
        """Return a text without the stop that ended it, as the API gives it."""
        ends = [each for each in self._stop if isinstance(each, str) and text.endswith(each)]
        return text.removesuffix(max(ends, key=len, default=""))

    def _write_call(self, call: ToolCall) -> dict[str, Any]:
        self._num_calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "id": call.id or f"call_{self._num_calls}",
            "type": "function",
            "function": function,
        }

    def _read_tools(self, request: Mapping[str, Any]) -> tuple[Tool, ...]:
        tools = list(request.get("tools") or [])
        if self._tools is None:
            self._tools = tools
            return tuple(_read_tool(one) for one in tools)
        if tools != self._tools:
            raise DialogueError("the tools were changed after the first turn")
        return ()


def completion(message: Mapping[str, Any], model: str, number: int) -> dict[str, Any]:
    """Return the answer of the API that holds an assistant's message."""
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason}],
    }


def completion_chunk(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return a completion as the one chunk of a stream."""
    [choice] = whole["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(delta["tool_calls"])
        ]
    return {
        **whole,
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}],
    }


def _check_plain(request: Mapping[str, Any]) -> None:
    if request.get("n") not in (None, 1):
        raise DialogueError(f"{request['n']} answers are asked for at once; a turn has one")
    if request.get("tool_choice") not in _FREE_CHOICES and request.get("tools"):
        raise DialogueError(f"tool_choice is {request['tool_choice']!r}; a turn is free to choose")
    if (request.get("response_format") or {"type": "text"}) != {"type": "text"}:
        raise DialogueError("response_format asks for a form of the answer; a turn is free text")


def _read_stop(request: Mapping[str, Any]) -> tuple[str | int, ...]:
    stop = request.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _read_tool(tool: Any) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise DialogueError("a tool is none that the caller runs")
    return Tool(
        str(function.get("name")),
        function.get("description") or "",
        function.get("parameters") or {},
    )


def _read_message(message: Mapping[str, Any]) -> tuple[Message, list[ImageChunk]]:
    role = str(message.get("role"))
    content, images = _read_content(message.get("content"))
    calls = tuple(_read_call(call) for call in message.get("tool_calls") or ())
    read = Message(
        _ROLES.get(role, role),
        content,
        calls,
        message.get("tool_call_id") or "",
        message.get("name") or "" if role == "tool" else "",
    )
    return read, images


def _read_call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise DialogueError("a message calls a tool that is no function")
    if not function.keys() >= {"name", "arguments"}:
        raise DialogueError("a message calls a tool without a name, or without arguments")
    return ToolCall(str(function["name"]), str(function["arguments"]), str(call.get("id") or ""))


def _read_content(content: Any) -> tuple[Content, list[ImageChunk]]:
    if content is None or isinstance(content, str):
        return content or "", []
    if not isinstance(content, Sequence):
        raise DialogueError("the content of a message is neither text nor a list of parts")
    parts: list[dict[str, str]] = []
    images: list[ImageChunk] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            parts.append({"type": "text", "text": str(part.get("text"))})
        elif kind == "image_url":
            parts.append({"type": "image"})
            images.append(_read_image(part))
        else:
            raise DialogueError(f"a part of a message is of type {kind!r}, no text and no image")
    if len(parts) == 1 and not images:
        return parts[0]["text"], []
    return parts, images


def _read_image(part: Mapping[str, Any]) -> ImageChunk:
    url = str((part.get("image_url") or {}).get("url"))
    found = _DATA_URL.fullmatch(url)
    if found is None:
        raise DialogueError("an image is given by an address; only PNG and JPEG within are read")
    try:
        data = base64.b64decode(found[2], validate=True)
    except binascii.Error as error:
        raise DialogueError("an image is no base64") from error
    return ImageChunk(data, "png" if found[1] == "png" else "jpeg")


def _essence(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a message says, in whichever form it was written."""
    content, images = _read_content(message.get("content"))
    calls = [_read_call(call) for call in message.get("tool_calls") or ()]
    said = [(call.id, call.name, call.arguments) for call in calls]
    role = str(message.get("role"))
    return _ROLES.get(role, role), content, images, said, message.get("tool_call_id") or ""
