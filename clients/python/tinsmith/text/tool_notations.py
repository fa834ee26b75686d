"""Calls of tools in what a model wrote, by the convention of its own chat template.

| convention | a call                                                      | models                |
| ---------- | ----------------------------------------------------------- | --------------------- |
| hermes     | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`  | Qwen, Hermes          |
| mistral    | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or       | Mistral               |
|            | `[TOOL_CALLS]name[ARGS]{...}`                               |                       |
| llama      | the whole answer is `{"name": ..., "parameters": {...}}`    | Llama 3               |

A parser takes text as it comes. What is no well-formed call stays text, to the letter. Arguments
are the model's own characters, never re-encoded. A template that writes them back as they are
continues the conversation token by token.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from tinsmith.text.partial_marks import held_length
from tinsmith.text.tool_forms import CallNotation

_WHITESPACE = re.compile(r"\s*")
FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
"""What a function may be called; a call of any other name is text."""
_NAME = re.compile(FUNCTION_NAME)
_ID_LETTERS = string.ascii_letters + string.digits
_MISTRAL_ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        name: The tool.
        arguments: A JSON object, as the model wrote it.
        id: Names the call, so that an answer can say which one it answers; empty if nothing does.
    """

    name: str
    arguments: str
    id: str = ""

    def read_arguments(self) -> dict[str, Any]:
        """Return the arguments by name.

        Raises:
            ValueError: If they are no JSON object; a parser of this module returns no such call.
        """
        arguments = json.loads(self.arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {self.name} are no JSON object")
        return arguments


Piece = str | ToolCall


class ToolCallParser(ABC):
    """Splits what a model writes into text and calls."""

    @abstractmethod
    def push(self, text: str) -> list[Piece]:
        """Return what is certain now."""

    @abstractmethod
    def finish(self) -> list[Piece]:
        """Return what is left; the answer has ended."""


class HermesParser(ToolCallParser):
    """`<tool_call>` and `</tool_call>` around a JSON object with `name` and `arguments`."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    # Templates write a line break of their own between text and call: it is part of the mark.
    _MARKS = ("\n" + _OPEN, _OPEN)

    def __init__(self) -> None:
        self._held = ""
        self._opened = ""
        """The mark of the call that is being read; empty outside of one."""
        self._is_after_call = False

    def push(self, text: str) -> list[Piece]:
        """Return what is certain now."""
        self._held += text
        pieces: list[Piece] = []
        while True:
            found = self._read_call() if self._opened else self._read_text()
            if found is None:
                return pieces
            pieces += found

    def finish(self) -> list[Piece]:
        """Return what is left; a last call may lack its closing mark."""
        if not self._opened:
            return self._as_text(self._held)
        call = parse_call(self._held, "arguments")
        return [call] if call is not None else [self._opened + self._held]

    def _read_text(self) -> list[Piece] | None:
        begins = [(self._held.find(mark), mark) for mark in self._MARKS if mark in self._held]
        if begins:
            begin, mark = min(begins)
            text, self._held = self._held[:begin], self._held[begin + len(mark) :]
            self._opened = mark
            return self._as_text(text)
        keep = held_length(self._held, self._MARKS)
        if self._is_after_call and not self._held[: len(self._held) - keep].strip():
            # Space between two calls belongs to no text, and it is not known yet whether one
            # follows.
            keep = len(self._held)
        text, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return self._as_text(text) if text else None

    def _read_call(self) -> list[Piece] | None:
        body, close, rest = self._held.partition(self._CLOSE)
        if not close:
            return None
        call = parse_call(body, "arguments")
        opened, self._opened, self._held = self._opened, "", rest
        self._is_after_call = call is not None
        return [call] if call is not None else [opened + body + close]

    def _as_text(self, text: str) -> list[Piece]:
        if not text or (self._is_after_call and not text.strip()):
            return []
        self._is_after_call = False
        return [text]


class _WholeAnswerParser(ToolCallParser):
    """Begins with the answer as text, and keeps everything from a mark on until the end."""

    def __init__(self) -> None:
        self._held = ""
        self._is_kept = False

    def push(self, text: str) -> list[Piece]:
        """Return what is certain now."""
        self._held += text
        if self._is_kept:
            return []
        begin, self._is_kept = self._find()
        text, self._held = self._held[:begin], self._held[begin:]
        return [text] if text else []

    def finish(self) -> list[Piece]:
        """Return what is left."""
        if self._is_kept:
            calls = self._parse(self._held)
            if calls:
                return list(calls)
        return [self._held] if self._held else []

    @abstractmethod
    def _find(self) -> tuple[int, bool]:
        """Return how much of the text may leave, and whether the calls begin there."""

    @abstractmethod
    def _parse(self, text: str) -> list[ToolCall]:
        """Return the calls; none if the text is anything else."""


class MistralParser(_WholeAnswerParser):
    """`[TOOL_CALLS]` before a list of calls, or before each call."""

    _MARK, _ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"

    def _find(self) -> tuple[int, bool]:
        begin = self._held.find(self._MARK)
        if begin >= 0:
            return begin, True
        return len(self._held) - held_length(self._held, (self._MARK,)), False

    def _parse(self, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for part in text.split(self._MARK)[1:]:
            found = self._parse_list(part) if part.lstrip()[:1] == "[" else self._parse_named(part)
            if not found:
                return []
            calls += found
        return calls

    def _parse_list(self, text: str) -> list[ToolCall]:
        text = text.strip()
        if text[-1:] != "]":
            return []
        return parse_calls(text[1:-1], "arguments", separator=",")

    def _parse_named(self, text: str) -> list[ToolCall]:
        name, _, arguments = text.strip().partition("{")
        name, arguments = name.removesuffix(self._ARGUMENTS).strip(), "{" + arguments
        if is_function_name(name) and _is_object(arguments):
            return [ToolCall(name, arguments)]
        return []


class LlamaParser(_WholeAnswerParser):
    """The whole answer is one JSON object, or several with `;` between them.

    An answer in JSON is no call unless it names a tool that the request declares.
    """

    _MARK = "<|python_tag|>"

    def __init__(self, tools: Collection[str]) -> None:
        super().__init__()
        self._tools = tools
        self._is_text = False

    def _find(self) -> tuple[int, bool]:
        if self._is_text:
            return len(self._held), False
        text = self._held.lstrip()
        if text.startswith(("{", self._MARK)):
            return 0, True
        if self._MARK.startswith(text):
            return 0, False
        self._is_text = True
        return len(self._held), False

    def _parse(self, text: str) -> list[ToolCall]:
        text = text.strip().removeprefix(self._MARK)
        calls = parse_calls(text, "parameters", separator=";")
        return calls if all(call.name in self._tools for call in calls) else []


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model calls tools.

    Attributes:
        new_parser: Makes a parser for an answer, given the names of the declared tools.
        notation: How calls are written.
        kept_tokens: Special tokens that are part of the convention and must not be skipped.
        id_length: Length of the ids of calls, if templates insist on one.
    """

    new_parser: Callable[[Collection[str]], ToolCallParser]
    notation: CallNotation
    kept_tokens: tuple[str, ...] = ()
    id_length: int | None = None

    def new_id(self) -> str:
        """Return an id for a call."""
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(self.id_length))


HERMES = ToolFormat(
    lambda _: HermesParser(),
    CallNotation(
        begin='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
        trigger="<tool_call>",
    ),
    ("<tool_call>", "</tool_call>"),
)
_MISTRAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]")
MISTRAL_LIST = ToolFormat(
    lambda _: MistralParser(),
    CallNotation(
        opening="[TOOL_CALLS][",
        begin='{"name": "',
        middle='", "arguments": ',
        end="}",
        separator=", ",
        closing="]",
        trigger="[TOOL_CALLS]",
    ),
    _MISTRAL_TOKENS,
    id_length=_MISTRAL_ID_LENGTH,
)
MISTRAL_NAMED = ToolFormat(
    lambda _: MistralParser(),
    CallNotation(
        opening="[TOOL_CALLS]",
        begin="",
        middle="[ARGS]",
        end="",
        separator="[TOOL_CALLS]",
        trigger="[TOOL_CALLS]",
    ),
    _MISTRAL_TOKENS,
    id_length=_MISTRAL_ID_LENGTH,
)
LLAMA = ToolFormat(
    LlamaParser,
    CallNotation(begin='{"name": "', middle='", "parameters": ', end="}", separator="; "),
    ("<|python_tag|>",),
)


def is_function_name(name: object) -> bool:
    """Return whether a function may be called so."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def detect_format(template: str) -> ToolFormat | None:
    """Return the convention that a chat template tells its model; None if it is not known here.

    A template that puts XML inside of `<tool_call>` (Qwen3-Coder) follows another one.
    """
    if "tools" not in template:
        return None
    if "<tool_call>" in template:
        return None if "<function=" in template else HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL_LIST
    if '"parameters"' in template and '"name"' in template:
        return LLAMA
    return None


def parse_call(text: str, arguments_key: str) -> ToolCall | None:
    """Return the call that a text is; None if it is anything else."""
    calls = parse_calls(text, arguments_key, separator=",")
    return calls[0] if len(calls) == 1 else None


def parse_calls(text: str, arguments_key: str, *, separator: str) -> list[ToolCall]:
    """Return the calls that a text consists of; none if anything in it is something else."""
    calls: list[ToolCall] = []
    position = _skip_space(text, 0)
    while True:
        try:
            members, position = _scan_object(text, position)
            name = json.loads(members["name"])
            arguments = members[arguments_key]
        except (ValueError, KeyError, RecursionError):
            return []
        if not is_function_name(name) or arguments[:1] != "{":
            return []
        calls.append(ToolCall(name, arguments))
        position = _skip_space(text, position)
        if position == len(text):
            return calls
        if text[position] != separator:
            return []
        position = _skip_space(text, position + 1)


def _scan_object(text: str, begin: int) -> tuple[dict[str, str], int]:
    """Return the members of a JSON object, each as its own characters, and where it ends."""
    decoder = json.JSONDecoder()
    if text[begin : begin + 1] != "{":
        raise ValueError("no object")
    members: dict[str, str] = {}
    position = _skip_space(text, begin + 1)
    while True:
        if text[position : position + 1] != '"':
            raise ValueError("no key")
        key, position = decoder.raw_decode(text, position)
        position = _skip_space(text, position)
        if text[position : position + 1] != ":":
            raise ValueError("no value")
        position = _skip_space(text, position + 1)
        _, end = decoder.raw_decode(text, position)
        members[key] = text[position:end]
        position = _skip_space(text, end)
        mark = text[position : position + 1]
        if mark == "}":
            return members, position + 1
        if mark != ",":
            raise ValueError("no end")
        position = _skip_space(text, position + 1)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _skip_space(text: str, position: int) -> int:
    match = _WHITESPACE.match(text, position)
    return position if match is None else match.end()
