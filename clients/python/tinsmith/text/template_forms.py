"""The forms of messages that a chat template shows: asked of it by rendering, never read from it.

Clients and data sets write the same message in several forms. A content is text or a list of parts,
empty or null beside calls; arguments of calls are text or an object; instructions come from a
`developer`. A template knows some of them. Of the others it loses the text, pastes Python's
spelling, or fails. So each template renders a few conversations with a mark in them, once, and
every message is given in a form that shows the mark. What a message says is never changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

Message = dict[str, Any]
Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None], str]
"""Renders messages and tools as they are; raises whatever the template raises."""

_MARK, _SECOND = "zq1mark", "zq2mark"
_NONSENSE_ROLE = "zqrole"
_OTHER_NAMES = {"developer": "system", "function": "tool"}
"""What a template that does not know a role calls the same one."""
_CALL_ID = "zq3mark00"
"""Nine letters and digits: templates of Mistral take no other."""
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "zqtool",
        "description": "x",
        "parameters": {"type": "object", "properties": {"zqkey": {"type": "string"}}},
    },
}
_TEXT_TYPES = frozenset({None, "text", "input_text", "output_text"})
_ABSENT = object()
_EMPTY_CONTENTS: tuple[Any, ...] = ("", None, _ABSENT)
"""Forms of a content that says nothing, in the order in which they are tried."""


class TemplateForms:
    """What one template shows.

    Args:
        render: Renders with the template.
        reads_images: Whether the model reads images: then lists of parts stay lists.
    """

    def __init__(self, render: Render, *, reads_images: bool) -> None:
        self._render = render
        self._reads_images = reads_images
        self._shown_contents = cache(self._probe_contents)
        self._shown_arguments = cache(self._probe_arguments)
        self._knows = cache(self._probe_role)

    def shape(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return copies of messages in forms that the template shows, where it has such forms."""
        return [self._shape_message(name_calls(message)) for message in messages]

    def _shape_message(self, message: Message) -> Message:
        role = message.get("role")
        if isinstance(role, str):
            if role in _OTHER_NAMES and not self._knows(role):
                role = message["role"] = _OTHER_NAMES[role]
            if "content" in message:
                message["content"] = self._shape_content(role, message["content"])
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            return self._shape_calls(message, calls)
        if "content" in message and message["content"] is None:
            # Nothing was said, which many templates spell as `None` or cannot join to a string.
            message["content"] = ""
        return message

    def _shape_content(self, role: str, content: Any) -> Any:
        shown = self._shown_contents(role)
        if isinstance(content, str):
            is_lost = "text" not in shown and "parts" in shown
            return [{"type": "text", "text": content}] if is_lost else content
        texts = texts_of(content)
        if texts is None:
            return content
        if "parts" in shown and (self._reads_images or "text" not in shown):
            return [{"type": "text", "text": text} for text in texts]
        return "".join(texts)

    def _shape_calls(self, message: Message, calls: Sequence[Any]) -> Message:
        if not message.get("content"):
            message = self._shape_empty(message)
        message["tool_calls"] = [self._shape_call(call) for call in calls]
        return message

    def _shape_empty(self, message: Message) -> Message:
        given = message.get("content", _ABSENT)
        shown = self._empty_contents
        if (given,) in shown:
            return message
        ((best,), *_) = shown or [("",)]
        rest = {key: value for key, value in message.items() if key != "content"}
        return rest if best is _ABSENT else {**rest, "content": best}

    def _shape_call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        shown = self._call_forms[1] if self._call_forms else frozenset[str]()
        if isinstance(arguments, str) and "text" not in shown:
            arguments = _object_of(arguments)
        elif isinstance(arguments, dict) and "object" not in shown and "text" in shown:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    @cached_property
    def _ask(self) -> Message:
        """A message of the user in a form that is shown."""
        parts = [{"type": "text", "text": "x"}]
        is_text = "text" in self._shown_contents("user")
        return {"role": "user", "content": "x" if is_text else parts}

    @property
    def _empty_contents(self) -> list[tuple[Any]]:
        return self._call_forms[0] if self._call_forms else []

    @cached_property
    def _call_forms(self) -> tuple[list[tuple[Any]], frozenset[str]] | None:
        """The empty contents beside which calls are shown, and the arguments; None for none."""
        empties = [(empty,) for empty in _EMPTY_CONTENTS if self._shown_arguments(empty)]
        if not empties:
            return None
        return empties, frozenset().union(*(self._shown_arguments(one) for (one,) in empties))

    def _probe_contents(self, role: str) -> frozenset[str]:
        forms = {
            "text": f"{_MARK} {_SECOND}",
            "parts": [{"type": "text", "text": _MARK}, {"type": "text", "text": _SECOND}],
        }
        return frozenset(
            name
            for name, content in forms.items()
            if any(
                _joins_marks(self._try(around))
                for around in self._around({"role": role, "content": content})
            )
        )

    def _around(self, message: Message) -> list[list[Message]]:
        """Return conversations in which a message of its role may stand."""
        role = message["role"]
        if role == "user":
            return [[message]]
        if role == "assistant":
            return [[self._ask, message]]
        if role in ("tool", "function", "ipython", "observation"):
            answer = {"tool_call_id": _CALL_ID, "name": "x", **message}
            return [[self._ask, call, answer] for call in self._probe_calls("x")]
        return [[message, self._ask], [self._ask, message]]

    def _probe_calls(self, name: str) -> list[Message]:
        """Return messages that call a tool, in the form that is shown or in all forms."""
        empties, arguments = self._call_forms or ([("",)], frozenset({"text", "object"}))
        ((empty,), *_) = empties
        return [_call_message(empty, form, name) for form in sorted(arguments)]

    def _probe_arguments(self, empty: Any) -> frozenset[str]:
        return frozenset(
            form
            for form in ("text", "object")
            if any(self._shows_call(empty, form, tools) for tools in (None, [_TOOL]))
        )

    def _shows_call(self, empty: Any, form: str, tools: list[Mapping[str, Any]] | None) -> bool:
        """Whether a call is shown: nothing quoted, and nothing in Python's spelling."""
        text = self._try([self._ask, _call_message(empty, form, _MARK)], tools)
        if text is None or _MARK not in text:
            return False
        beside_text = self._try([self._ask, _call_message("x", form, _MARK)], tools) or ""
        if text.count("None") > beside_text.count("None"):
            return False
        if form == "text":
            return f'{{"zqkey": "{_SECOND}"}}' in text
        return _SECOND in text and "'zqkey'" not in text

    def _probe_role(self, role: str) -> bool:
        """Whether the template does more with a role than to paste its name, or drop it."""
        for around in self._around({"role": role, "content": _MARK}):
            shown = self._try(around)
            if shown is None or _MARK not in shown:
                continue
            pasted = [
                {**message, "role": _NONSENSE_ROLE} if message["role"] == role else message
                for message in around
            ]
            twin = self._try(pasted)
            if twin is None or twin.replace(_NONSENSE_ROLE, role) != shown:
                return True
        return False

    def _try(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str | None:
        try:
            return self._render(messages, tools)
        except Exception:
            # A template is a stranger's program: it may fail in any way on a form that it does not
            # know, and that is the answer.
            return None


def texts_of(content: Any) -> list[str] | None:
    """Return the texts of a content that is a list of nothing but texts; None for any other."""
    if not isinstance(content, list | tuple):
        return None
    texts = [
        part
        if isinstance(part, str)
        else part.get("text")
        if isinstance(part, Mapping) and part.get("type") in _TEXT_TYPES
        else None
        for part in content
    ]
    found = [text for text in texts if isinstance(text, str)]
    return found if len(found) == len(texts) else None


def name_calls(message: Mapping[str, Any]) -> Message:
    """Return a copy of a message with its call and its refusal where templates look for them.

    Before tools there was `function_call`; an assistant that refuses says so beside the content.
    """
    copy = dict(message)
    call = copy.get("function_call")
    if isinstance(call, Mapping) and not copy.get("tool_calls"):
        del copy["function_call"]
        copy["tool_calls"] = [{"type": "function", "function": dict(call)}]
    if isinstance(copy.get("refusal"), str) and not copy.get("content"):
        copy["content"] = copy["refusal"]
    return copy


def _call_message(empty: Any, form: str, name: str) -> Message:
    arguments: Any = {"zqkey": _SECOND}
    if form == "text":
        arguments = json.dumps(arguments)
    function = {"name": name, "arguments": arguments}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    message = {"role": "assistant", "content": empty, "tool_calls": [call]}
    if empty is _ABSENT:
        del message["content"]
    return message


def _joins_marks(text: str | None) -> bool:
    """Whether both marks are shown, and not as the spelling of a list."""
    if text is None:
        return False
    _, first, rest = text.partition(_MARK)
    between, second, _ = rest.partition(_SECOND)
    return bool(first and second) and "type" not in between


def _object_of(arguments: str) -> Any:
    """Return the object that a text of arguments is; the text if it is none."""
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
