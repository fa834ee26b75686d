"""Schemas whose objects have the properties that they name, and no others.

JSON Schema leaves objects open unless they say otherwise, and a model then invents keys. Engines
that hold answers to a schema close them, and so do OpenAI's strict forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAY_OTHERWISE = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if"})
_MAPS = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def close_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema in which objects that do not say otherwise take no further keys.

    What is put together of parts (`allOf`, or properties beside `anyOf`) stays open: a closed part
    would forbid the keys of the others.
    """
    return dict(schema) if _holds_all_of(schema) else _close(schema)


def _close(schema: Mapping[str, Any]) -> dict[str, Any]:
    closed = dict(schema)
    has_own = "properties" in schema
    for name in _MAPS:
        if isinstance(schema.get(name), Mapping):
            closed[name] = {key: _close_any(part) for key, part in schema[name].items()}
    for name in _LISTS:
        if isinstance(schema.get(name), list) and not has_own:
            closed[name] = [_close_any(part) for part in schema[name]]
    for name in _SINGLE:
        if name in schema:
            closed[name] = _close_any(schema[name])
    if has_own and not (_SAY_OTHERWISE | _COMPOSED) & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _close_any(part: Any) -> Any:
    return _close(part) if isinstance(part, Mapping) else part


def _holds_all_of(value: Any) -> bool:
    if isinstance(value, Mapping):
        is_here = isinstance(value.get("allOf"), list)
        return is_here or any(_holds_all_of(part) for part in value.values())
    return isinstance(value, list) and any(_holds_all_of(part) for part in value)
