"""Turns that call tools, as actions: text and calls, by the notation of the model's template."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinsmith.environments.environment import Action
from tinsmith.rollouts.errors import ChatTemplateError
from tinsmith.text.tool_notations import ToolCall, detect_format

ParseAction = Callable[[str], "str | Action"]


def tool_call_parser(template: str | None, tools: Sequence[Mapping[str, Any]]) -> ParseAction:
    """Return what makes an action of the text of a turn.

    A call that is not well-formed stays text, to the letter; what that is worth is for the
    environment to say. Calls are numbered within their turn: `call_0`, `call_1` and so on.

    Args:
        template: The model's chat template.
        tools: Schemas of the tools of the episode.

    Raises:
        ChatTemplateError: If the template shows no tools, or in a notation that is not known.
    """
    notation = detect_format(template or "")
    if notation is None:
        raise ChatTemplateError(
            "the environment has tools, and the chat template of the model shows none, or calls "
            "them in a notation that is not known; give the runner a parse_action of its own"
        )
    names = frozenset(tool["function"]["name"] for tool in tools)

    def parse(text: str) -> Action:
        parser = notation.new_parser(names)
        pieces = [*parser.push(text), *parser.finish()]
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        return Action(
            text="".join(piece for piece in pieces if isinstance(piece, str)),
            tool_calls=tuple(
                dataclasses.replace(call, id=f"call_{index}") for index, call in enumerate(calls)
            ),
        )

    return parse
