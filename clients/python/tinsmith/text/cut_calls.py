"""Calls of tools in an answer that had to be calls and was cut at its limit of tokens.

Such an answer keeps the notation of its model from its first letter on, so that its half is read as
exactly as its whole.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from tinsmith.text.tool_forms import CallNotation
from tinsmith.text.tool_notations import ToolCall


def read_cut_calls(text: str, notation: CallNotation, names: Collection[str]) -> list[ToolCall]:
    """Return the calls of an answer that had to be calls, and whose end is cut off.

    The last one has the arguments as far as they were written. It is left out if nothing of them
    was, or if its name is not one of `names`.
    """
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    rest = text.lstrip().removeprefix(notation.opening)
    while True:
        heads = [(name, f"{notation.begin}{name}{notation.middle}") for name in names]
        name, head = next(((n, h) for n, h in heads if rest.startswith(h)), ("", ""))
        rest = rest[len(head) :]
        if not head or not rest:
            return calls
        try:
            _, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return [*calls, ToolCall(name, rest)]
        calls.append(ToolCall(name, rest[:end]))
        behind = notation.end + notation.separator
        if not rest[end:].startswith(behind):
            return calls
        rest = rest[end + len(behind) :]
