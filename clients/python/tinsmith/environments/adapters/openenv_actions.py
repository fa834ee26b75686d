"""What an action of OpenEnv is made of, read from its JSON schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_TOOL_FIELDS = frozenset({"tool_name", "arguments"})
_BESIDE = "metadata"


class InvalidTextError(ValueError):
    """The server takes no such action; the session goes on."""


@dataclass(frozen=True, slots=True)
class ActionForm:
    """How a turn becomes an action."""

    has_tools: bool = False
    """Whether an action is the call of a tool."""
    text_field: str = ""
    """The field that takes a text; empty where no field is the only one."""
    fields: str = ""
    """All fields with their types, for messages."""
    make_typed: Callable[..., Any] | None = None
    """The class of the client's actions; None where they are objects of JSON."""

    @classmethod
    def of_schema(
        cls, schema: Mapping[str, Any], make_typed: Callable[..., Any] | None = None
    ) -> ActionForm:
        """Return the form of the actions that a JSON schema describes."""
        properties = schema.get("properties") or {}
        fields = {name: spec for name, spec in properties.items() if name != _BESIDE}
        told = ", ".join(f"{name} ({_kind(spec)})" for name, spec in fields.items()) or "none"
        if fields.keys() >= _TOOL_FIELDS:
            return cls(has_tools=True, fields=told, make_typed=make_typed)
        required = [name for name in fields if name in (schema.get("required") or ())]
        # A field with a constant value tells kinds of actions apart.
        texts = [
            name
            for name in required or fields
            if _is_text(fields[name]) and "const" not in fields[name]
        ]
        field = texts[0] if len(texts) == 1 and len(required) <= 1 else ""
        return cls(text_field=field, fields=told, make_typed=make_typed)

    def make(self, text: str) -> Any:
        """Return the action whose one text is given."""
        values = {self.text_field: text}
        return values if self.make_typed is None else self.make_typed(**values)


def _is_text(spec: Mapping[str, Any]) -> bool:
    if spec.get("type") == "string":
        return True
    return any(_is_text(each) for each in spec.get("anyOf") or ())


def _kind(spec: Mapping[str, Any]) -> str:
    if "type" in spec:
        return str(spec["type"])
    return " or ".join(_kind(each) for each in spec.get("anyOf") or ()) or "object"
