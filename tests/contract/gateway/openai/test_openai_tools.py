"""Tools that have to be called, or whose schema has to be kept; for the `openai` package."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from tests.fakes.openai_harness import BASE_MODEL, PLAIN_MODEL

WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
ADDITION: Any = {
    "type": "object",
    "properties": {"terms": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    "required": ["terms"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "add": ADDITION}
MESSAGES: Any = [{"role": "user", "content": "How is the weather in Ulm?"}]


def tools(*, strict: bool = False) -> Any:
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": schema, "strict": strict},
        }
        for name, schema in SCHEMAS.items()
    ]


def complete(client: openai.OpenAI, **options: Any) -> Any:
    """Draw at a temperature at which the model keeps nothing by itself."""
    options = {"tools": tools(), "max_tokens": 400, "temperature": 2.0, **options}
    options.setdefault("model", BASE_MODEL)
    return client.chat.completions.create(messages=MESSAGES, **options)


def check_calls(choice: Any) -> list[str]:
    """Return the names of the calls of a choice, whose arguments keep their schemas."""
    if choice.finish_reason == "length":
        return []
    calls = choice.message.tool_calls
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in calls]


def test_a_required_call_is_a_call_and_keeps_its_schema(client: openai.OpenAI) -> None:
    answer = complete(client, tool_choice="required", parallel_tool_calls=False, n=16, seed=1)
    names = [check_calls(choice) for choice in answer.choices]
    whole = [found for found in names if found]
    assert len(whole) > 8
    assert all(len(found) == 1 for found in whole)
    assert {found[0] for found in whole} == set(SCHEMAS)
    reasons = {choice.finish_reason for choice in answer.choices}
    assert reasons <= {"tool_calls", "length"}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_named_function_is_called_once(client: openai.OpenAI, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    answer = complete(client, tool_choice=choice, n=4, seed=2)
    called = [check_calls(one) for one in answer.choices if one.finish_reason != "length"]
    assert called
    assert all(names == [name] for names in called)


def test_a_forced_call_that_is_cut_is_half_a_call_and_says_length(client: openai.OpenAI) -> None:
    """As OpenAI and vLLM tell it: nothing of it is text, and its arguments are no JSON."""
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    seen = 0
    for max_tokens in range(44, 68, 4):
        options: Any = {"tool_choice": choice, "max_tokens": max_tokens, "seed": 5}
        answer = complete(client, **options).choices[0]
        assert answer.finish_reason == "length"
        if not answer.message.tool_calls:
            continue
        [call] = answer.message.tool_calls
        assert (answer.message.content, call.function.name) == (None, "get_weather")
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.function.arguments)
        chunks = list(complete(client, stream=True, **options))
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
        assert [each.choices[0].finish_reason for each in chunks][-1] == "length"
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        seen += 1
    assert seen > 2


def test_a_cut_call_of_a_response_is_incomplete(client: openai.OpenAI) -> None:
    offered: Any = [{"type": "function", "name": "get_weather", "parameters": WEATHER}]
    response = client.responses.create(
        model=BASE_MODEL,
        input="How is the weather?",
        tools=offered,
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=56,
    )
    assert response.status == "incomplete"
    [item] = response.output
    assert (item.type, item.status) == ("function_call", "incomplete")


def test_allowed_tools_narrow_the_choice_and_leave_the_prompt(client: openai.OpenAI) -> None:
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "add"}}],
        },
    }
    narrow, wide = (
        complete(client, tool_choice=choice, parallel_tool_calls=False, n=4, seed=3)
        for choice in (allowed, "required")
    )
    assert narrow.usage.prompt_tokens == wide.usage.prompt_tokens
    assert {name for choice in narrow.choices for name in check_calls(choice)} == {"add"}


def test_a_stream_holds_the_forced_call(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=BASE_MODEL,
        messages=MESSAGES,
        tools=tools(strict=True),
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
        seed=4,
    ) as stream:
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert check_calls(choice)
    assert not choice.message.content


def test_a_strict_tool_may_be_left_alone(client: openai.OpenAI) -> None:
    """The model has learned nothing: free text stays possible, and no call breaks its schema."""
    answer = complete(client, tools=tools(strict=True), max_tokens=64, n=8, seed=5)
    assert all(choice.message.content for choice in answer.choices)


def test_the_answer_keeps_a_schema_or_is_a_call(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}
    answer = complete(
        client, response_format=form, tools=tools(strict=True), n=24, seed=6, max_tokens=300
    )
    kinds = set()
    for choice in answer.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
            kinds.add("answer")
        elif choice.finish_reason == "tool_calls":
            check_calls(choice)
            kinds.add("call")
    assert "answer" in kinds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"model": PLAIN_MODEL}, "no convention", id="no-convention"),
        pytest.param({"tool_choice": "any"}, "tool_choice", id="unknown"),
        pytest.param({"tool_choice": "required", "tools": []}, "needs tools", id="no-tools"),
        pytest.param(
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "'other', which is not in tools",
            id="other-name",
        ),
        pytest.param(
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"not": {}}, "strict": True},
                    }
                ]
            },
            "output_format",
            id="schema-not-followed",
        ),
    ],
)
def test_what_cannot_be_held_to_is_refused(client: openai.OpenAI, options: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        complete(client, **options)
