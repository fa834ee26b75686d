"""Structural tags as grammars: texts, schemas and marks between them, in xgrammar's notation.

A structural tag is a JSON document that says where an answer is free and where it keeps a schema.
It becomes a grammar of llguidance. Marks that are special tokens of the model stand for those
tokens, as free text never holds them. Any other mark stands for its characters. Formats that are
not listed in `_Writer` are refused by name.

Source: https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith_sampler.forms.schema_bounds import check_multiples

_TEXT = "TEXT"


def to_lark(
    source: str, *, special_tokens: Mapping[str, int], json_options: Mapping[str, Any]
) -> str:
    """Return the grammar of a structural tag.

    Args:
        source: A JSON object with the type `structural_tag` and a `format`.
        special_tokens: Contents and ids of the model's special tokens.
        json_options: How JSON is written, for llguidance.

    Raises:
        ValueError: If it is no structural tag, or holds what is not offered.
    """
    try:
        document = json.loads(source)
        if document["type"] != "structural_tag":
            raise ValueError(f"the type is {document['type']!r}, not 'structural_tag'")
        return _Writer(special_tokens, json_options).write(document["format"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{error!r}: a part is missing or of a wrong type") from error


class _Writer:
    def __init__(self, special_tokens: Mapping[str, int], json_options: Mapping[str, Any]) -> None:
        self._special_tokens = special_tokens
        self._json_options = dict(json_options)
        # The longest first: one mark may begin with another.
        marks = sorted(special_tokens, key=len, reverse=True)
        self._mark = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None
        self._rules: list[str] = []

    def write(self, form: Mapping[str, Any]) -> str:
        """Return the whole grammar."""
        start = self._expression(form)
        return "\n".join(
            ["%llguidance {}", f"start: {start}", *self._rules, f"{_TEXT}: /(.|\\n)*/", ""]
        )

    def _expression(self, form: Mapping[str, Any]) -> str:
        kind = form["type"]
        if kind == "const_string":
            return self._literal(form["value"])
        if kind == "any_text":
            return _TEXT
        if kind == "regex":
            return self._rule("/" + _in_slashes(form["pattern"]) + "/")
        if kind == "json_schema":
            return self._schema(form["json_schema"])
        if kind == "sequence":
            return " ".join(self._expression(part) for part in form["elements"])
        if kind == "or":
            return self._either([self._expression(part) for part in form["elements"]])
        if kind == "tag":
            return self._tag(form)
        if kind == "tags_with_separator":
            return self._separated(form)
        if kind == "triggered_tags":
            return self._triggered(form)
        raise ValueError(f"the format {kind!r} is not offered")

    def _schema(self, schema: Any) -> str:
        check_multiples(json.dumps(schema))
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": self._json_options}
        elif schema is True:
            schema = {"x-guidance": self._json_options}
        return self._rule("%json " + json.dumps(schema))

    def _tag(self, tag: Mapping[str, Any], begin: str | None = None) -> str:
        """Return a tag, or what is left of it behind the beginning that was read."""
        parts = [
            self._literal(tag["begin"] if begin is None else begin),
            self._expression(tag["content"]),
            self._literal(tag["end"]),
        ]
        return self._rule(" ".join(part for part in parts if part))

    def _separated(self, form: Mapping[str, Any]) -> str:
        tag = self._rule(self._either([self._tag(one) for one in form["tags"]]))
        separator = self._literal(form["separator"])
        further = "" if form.get("stop_after_first") else f" ({separator} {tag})*"
        whole = self._rule(f"{tag}{further}")
        return whole if form.get("at_least_one") else f"({whole})?"

    def _triggered(self, form: Mapping[str, Any]) -> str:
        if form.get("at_least_one"):
            raise ValueError("'at_least_one' of 'triggered_tags' is not offered")
        ways = []
        for trigger in form["triggers"]:
            if not trigger:
                raise ValueError("a trigger is empty")
            opened = [tag for tag in form["tags"] if tag["begin"].startswith(trigger)]
            is_special = trigger in self._special_tokens
            # A mark of characters ends the text at once; else the text could swallow it.
            before = self._rule(f"{_TEXT} {self._literal(trigger)}", is_lazy=not is_special)
            rests = [self._tag(tag, tag["begin"].removeprefix(trigger)) for tag in opened]
            ways.append(f"{before} {self._either(rests)}")
        either = self._either(ways)
        if form.get("stop_after_first"):
            return self._either([_TEXT, either])
        return f"{either}* {_TEXT}"

    def _either(self, ways: Sequence[str]) -> str:
        if not ways:
            raise ValueError("a choice has no alternative")
        return "(" + " | ".join(ways) + ")"

    def _rule(self, body: str, *, is_lazy: bool = False) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}")
        return name

    def _literal(self, text: str) -> str:
        parts = [text] if self._mark is None else self._mark.split(text)
        return " ".join(
            f"<[{self._special_tokens[part]}]>"
            if part in self._special_tokens
            else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def _in_slashes(pattern: str) -> str:
    """Return a pattern as it stands between slashes, on one line: what follows is a rule."""
    return re.sub(r"(?s)\\.|[/\n\r]", lambda found: _ESCAPED.get(found[0], found[0]), pattern)


_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", "\r": r"\r", "\\\r": r"\r"}
