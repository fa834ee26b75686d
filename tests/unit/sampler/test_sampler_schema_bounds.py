"""Forms whose compilation the compiler does not bound, and patterns that are no rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tinsmith_sampler.forms.schema_bounds import MAX_MULTIPLE, check_multiples
from tinsmith_sampler.forms.structural_tags import to_lark

_MANY = [{"multipleOf": number} for number in (97, 101, 103)]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"allOf": _MANY},
        {"properties": {"a": {"items": {"multipleOf": MAX_MULTIPLE + 1}}}},
        {"$defs": {"a": _MANY[0], "b": _MANY[1], "c": _MANY[2]}, "$ref": "#/$defs/a"},
        {"multipleOf": 0.000_001, "anyOf": [{"multipleOf": 7}]},
        {"multipleOf": 1e300},
    ],
)
def test_what_would_compile_for_ever_is_refused(schema: dict[str, Any]) -> None:
    source = json.dumps(schema)
    with pytest.raises(ValueError, match="multipleOf"):
        check_multiples(source)
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(ValueError, match="multipleOf"):
        to_lark(json.dumps(tag), special_tokens={}, json_options={})


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "number", "multipleOf": 0.01},
        {"type": "integer", "multipleOf": MAX_MULTIPLE},
        {"properties": {"a": _MANY[0], "b": _MANY[1], "c": _MANY[2]}},
        {"properties": {"multipleOf": {"type": "string"}}},
        {"allOf": [{"multipleOf": 4}, {"multipleOf": 6}]},
    ],
)
def test_what_people_write_is_taken(schema: Any) -> None:
    check_multiples(json.dumps(schema))


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        ("a/b", r"/a\/b/"),
        (r"a\/b", r"/a\/b/"),
        ("a\nstart: /x", r"/a\nstart: \/x/"),
        ("a\\\nb", r"/a\nb/"),
        ("a\\\rb\rc", r"/a\rb\rc/"),
        ("\\\\/", r"/\\\//"),
    ],
)
def test_a_pattern_of_a_tag_stays_a_pattern(pattern: str, written: str) -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
    lark = to_lark(json.dumps(tag), special_tokens={}, json_options={})
    assert written in lark
    assert len(lark.splitlines()) == len(_lark_of("a").splitlines())


def _lark_of(pattern: str) -> str:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
    return to_lark(json.dumps(tag), special_tokens={}, json_options={})
