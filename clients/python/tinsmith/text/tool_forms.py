"""What an answer keeps so that its calls of tools are well-formed: a structural tag.

A model writes calls as its chat template taught it. The same notation, with the names and schemas
of the tools in place, is the form of the answer. Arguments keep the schema of a strict tool, and of
every tool that has to be called. Those of other tools are any object. A model that has to call a
tool begins with the call: it has no room to think before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# The answer is text unless its first letter begins an object.
_TEXT_WITHOUT_CALL = r"(\s*[^{\s](.|\n)*)?"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallNotation:
    """How a call is written.

    Attributes:
        begin: Before the name.
        middle: Between the name and the arguments.
        end: Behind the arguments.
        separator: Between two calls.
        opening: Before all calls; then no text follows them.
        closing: Behind all calls.
        trigger: What no text of the answer holds, as it begins calls. Empty where an answer is
            either text or calls.
    """

    begin: str
    middle: str
    end: str
    separator: str
    opening: str = ""
    closing: str = ""
    trigger: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolRules:
    """What a request demands of calls.

    Attributes:
        schemas: Of the tools that may be called, by name; None for a schema that is not kept.
        must_call: Whether the answer has to be a call.
        is_parallel: Whether it may be several.
    """

    schemas: Mapping[str, Mapping[str, Any] | None]
    must_call: bool
    is_parallel: bool

    @property
    def is_free(self) -> bool:
        """Whether any answer keeps them."""
        return (
            not self.must_call
            and self.is_parallel
            and all(schema is None for schema in self.schemas.values())
        )


def structural_tag(
    notation: CallNotation, rules: ToolRules, answer: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the form of an answer.

    Args:
        notation: Of the model.
        rules: What calls keep.
        answer: The format of an answer that calls nothing; None for any text.
    """
    tags = [
        {
            "type": "tag",
            "begin": f"{notation.begin}{name}{notation.middle}",
            "content": {"type": "json_schema", "json_schema": schema or _ANY_OBJECT},
            "end": notation.end,
        }
        for name, schema in rules.schemas.items()
    ]
    calls = _calls(notation, tags, is_parallel=rules.is_parallel)
    if rules.must_call:
        form = calls
    elif answer is not None:
        form = {"type": "or", "elements": [answer, calls]}
    elif not notation.trigger:
        text = {"type": "regex", "pattern": _TEXT_WITHOUT_CALL}
        form = {"type": "or", "elements": [text, calls]}
    elif notation.opening:
        form = _triggered(notation, [calls], is_parallel=False)
    else:
        form = _triggered(notation, tags, is_parallel=rules.is_parallel)
    return {"type": "structural_tag", "format": form}


def _calls(
    notation: CallNotation, tags: Sequence[dict[str, Any]], *, is_parallel: bool
) -> dict[str, Any]:
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": notation.separator,
        "at_least_one": True,
        "stop_after_first": not is_parallel,
    }
    if not notation.opening:
        return calls
    return {"type": "tag", "begin": notation.opening, "content": calls, "end": notation.closing}


def _triggered(
    notation: CallNotation, tags: Sequence[dict[str, Any]], *, is_parallel: bool
) -> dict[str, Any]:
    return {
        "type": "triggered_tags",
        "triggers": [notation.trigger],
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not is_parallel,
    }
