"""Objects of forms and tools take the keys that they name, and no others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tinsmith_gateway.openai.bodies import ChatBody, CompletionBody
from tinsmith_gateway.openai.closed_schemas import close_objects

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CLOSED = {**CITY, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        pytest.param(CITY, CLOSED, id="object"),
        pytest.param({"type": "object"}, {"type": "object"}, id="any-object"),
        pytest.param(
            {**CITY, "additionalProperties": True},
            {**CITY, "additionalProperties": True},
            id="open",
        ),
        pytest.param(
            {"type": "array", "items": CITY}, {"type": "array", "items": CLOSED}, id="items"
        ),
        pytest.param(
            {"anyOf": [CITY, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}, id="any"
        ),
        pytest.param(
            {"$defs": {"c": CITY}, "properties": {"a": {"$ref": "#/$defs/c"}}},
            {
                "$defs": {"c": CLOSED},
                "properties": {"a": {"$ref": "#/$defs/c"}},
                "additionalProperties": False,
            },
            id="definitions",
        ),
        pytest.param({"allOf": [CITY, CITY]}, {"allOf": [CITY, CITY]}, id="parts"),
        pytest.param({**CITY, "anyOf": [CITY]}, {**CITY, "anyOf": [CITY]}, id="beside-parts"),
    ],
)
def test_objects_that_do_not_say_otherwise_are_closed(
    schema: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == expected
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": CITY, "strict": True},
            }
        },
        {"guided_json": CITY},
        {"guided_json": json.dumps(CITY)},
        {"structured_outputs": {"json": CITY}},
    ],
)
def test_every_spelling_of_a_form_is_closed(fields: dict[str, Any]) -> None:
    body = CompletionBody.model_validate({"prompt": "x", **fields})
    assert body.output_format is not None
    assert json.loads(body.output_format.json_schema) == CLOSED


def test_the_arguments_of_strict_tools_are_closed() -> None:
    function = {"name": "weather", "parameters": CITY, "strict": True}
    body = ChatBody.model_validate(
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": function}],
        }
    )
    assert body.tool_rules is not None
    assert body.tool_rules.schemas == {"weather": CLOSED}
    # The model is shown what was sent.
    assert body.shown_tools == [{"type": "function", "function": function}]
