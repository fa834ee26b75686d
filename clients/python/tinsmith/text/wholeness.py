"""Whether a rendered conversation holds all that was written in its messages and tools.

A template may pass over a role, a field or a part of a text. The model then reads something else
than its author wrote. Two things are looked for. Every place of a text shows a mark that is
put there instead of it. And every content stands in the rendered text, for templates cut texts at
marks of their own, such as the end of a thought.

Some templates show a thought while its turn is the last, and hide it once the conversation goes
on. That is their own rule, and the model was trained so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith.text.template_forms import Message

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages have a thought."""

Tools = Sequence[Mapping[str, Any]] | None
Render = Callable[[Sequence[Message], Tools], str]

_MARK = re.compile(r"zq(\d+)qz")
_THOUGHT_END = "</think>"
_THOUGHT_MARKS = re.compile(r"</?think>")


@dataclass(frozen=True, slots=True)
class _Place:
    """A text: the number of its message, -1 for tools, and its name."""

    index: int
    name: str

    def __str__(self) -> str:
        return self.name if self.index < 0 else f"messages.{self.index}.{self.name}"


@dataclass(slots=True)
class _Marks:
    """Puts marks in the places of texts; names of functions are texts as well."""

    has_names: bool = True
    places: list[_Place] = field(default_factory=list)

    def mark(self, place: _Place) -> str:
        self.places.append(place)
        return f"zq{len(self.places) - 1}qz"

    def mark_name(self, function: Mapping[str, Any], place: _Place) -> dict[str, Any]:
        return {**function, "name": self.mark(place)} if self.has_names else dict(function)


def find_lost(
    rendered: str, messages: Sequence[Message], tools: Tools, render: Render
) -> str | None:
    """Return the name of the first text that left no trace; None if all did.

    Args:
        rendered: What was made of the messages.
        messages: In the forms that were rendered.
        tools: That were rendered with them.
        render: Renders others in the same way.
    """
    hidden = _hidden(messages, tools, render)
    lost = next((one for one in hidden if not _is_hidden_later(one, messages, tools, render)), None)
    lost = lost or next(_cut_contents(rendered, messages, render), None)
    return None if lost is None else str(lost)


def _hidden(messages: Sequence[Message], tools: Tools, render: Render) -> list[_Place]:
    """Return the places in which a mark is not shown."""
    # Some templates refuse calls of names that they do not know.
    for marks in (_Marks(), _Marks(has_names=False)):
        marked = [_mark_message(index, message, marks) for index, message in enumerate(messages)]
        marked_tools = None if tools is None else _mark_tools(tools, marks)
        try:
            shown = {int(number) for number in _MARK.findall(render(marked, marked_tools))}
        except Exception:
            continue
        return [place for number, place in enumerate(marks.places) if number not in shown]
    # A template that refuses texts which it does not expect: the texts have to be found themselves.
    return []


def _is_hidden_later(
    place: _Place, messages: Sequence[Message], tools: Tools, render: Render
) -> bool:
    """Whether a text of a former turn is shown while its turn is the last."""
    index = place.index
    if index < 0 or index == len(messages) - 1 or messages[index].get("role") != "assistant":
        return False
    former = messages[: index + 1]
    return place not in _hidden(former, tools, render)


def _cut_contents(rendered: str, messages: Sequence[Message], render: Render) -> Iterator[_Place]:
    """Yield the contents of which a part is missing."""
    position = 0
    for index, message in enumerate(messages):
        is_former_turn = message.get("role") == "assistant" and index < len(messages) - 1
        for text in _pieces(message, is_former_turn=is_former_turn):
            found = rendered.find(text, position)
            if found >= 0:
                position = found + len(text)
            elif not _occurs(text, rendered) and not _is_framed(index, text, messages, render):
                yield _Place(index, "content")
                break


def _pieces(message: Message, *, is_former_turn: bool) -> Iterator[str]:
    """Yield the texts of a content that have to be found, without the space around them."""
    content = message.get("content")
    parts = [content] if isinstance(content, str) else content if isinstance(content, list) else []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            continue
        pieces = [text]
        if message.get("role") == "assistant" and _THOUGHT_END in text:
            # Templates write thoughts anew, with line breaks of their own, and hide former ones.
            whole = _THOUGHT_MARKS.split(text)
            pieces = text.split(_THOUGHT_END)[-1:] if is_former_turn else whole
        yield from filter(None, (piece.strip() for piece in pieces))


def _occurs(text: str, rendered: str) -> bool:
    """Whether a text occurs anywhere, also as a string of JSON."""
    return text in rendered or any(
        json.dumps(text, ensure_ascii=is_ascii)[1:-1] in rendered for is_ascii in (False, True)
    )


def _is_framed(index: int, text: str, messages: Sequence[Message], render: Render) -> bool:
    """Whether marks before and behind a text are both shown: it is spelled otherwise, but whole."""
    message = dict(messages[index])
    framed = f"zq0qz {text} zq1qz"
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content.replace(text, framed, 1)
    else:
        message["content"] = [
            {**part, "text": part["text"].replace(text, framed, 1)}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    try:
        rendered = render([*messages[:index], message, *messages[index + 1 :]], None)
    except Exception:
        return False
    return {"0", "1"} <= set(_MARK.findall(rendered))


def _mark_message(index: int, message: Message, marks: _Marks) -> Message:
    marked = dict(message)
    place = _Place(index, "content")
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        marked["content"] = marks.mark(place)
    elif isinstance(content, list):
        marked["content"] = [_mark_part(part, place, marks) for part in content]
    name = next((name for name in REASONING_FIELDS if _is_text(message.get(name))), None)
    if name is not None:
        thought = marks.mark(_Place(index, name))
        marked |= {other: thought for other in REASONING_FIELDS if other in message}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        marked["tool_calls"] = [
            _mark_call(call, _Place(index, f"tool_calls.{number}"), marks)
            for number, call in enumerate(calls)
        ]
    return marked


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _mark_part(part: Any, place: _Place, marks: _Marks) -> Any:
    if isinstance(part, str):
        return marks.mark(place) if part.strip() else part
    if isinstance(part, Mapping) and _is_text(part.get("text")):
        return {**part, "text": marks.mark(place)}
    return part


def _mark_call(call: Any, place: _Place, marks: _Marks) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    marked = marks.mark_name(function, place)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.dumps(_mark_values(json.loads(arguments), place, marks))
        except (ValueError, RecursionError):
            arguments = marks.mark(place)
    else:
        arguments = _mark_values(arguments, place, marks)
    if "arguments" in function:
        marked["arguments"] = arguments
    return {**call, "function": marked}


def _mark_values(value: Any, place: _Place, marks: _Marks) -> Any:
    if isinstance(value, Mapping):
        return {key: _mark_values(item, place, marks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mark_values(item, place, marks) for item in value]
    return value if value is None else marks.mark(place)


def _mark_tools(tools: Sequence[Any], marks: _Marks) -> list[Any]:
    marked = []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            marked.append(tool)
            continue
        place = _Place(-1, f"tools.{number}")
        inside = _mark_descriptions(function, place, marks)
        marked.append({**tool, "function": marks.mark_name(inside, place)})
    return marked


def _mark_descriptions(value: Any, place: _Place, marks: _Marks) -> Any:
    if isinstance(value, Mapping):
        return {
            key: marks.mark(place)
            if key == "description" and _is_text(item)
            else _mark_descriptions(item, place, marks)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mark_descriptions(item, place, marks) for item in value]
    return value
