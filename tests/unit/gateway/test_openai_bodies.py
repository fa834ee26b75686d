"""Bodies of the OpenAI API: what they leave to defaults, what they mean, what is not offered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tinsmith_gateway.openai.bodies import ChatBody, CompletionBody, Message
from tinsmith_runtime.errors import InvalidFieldError

OBJECT = {"type": "object"}
FORM = {"type": "json_schema", "json_schema": {"schema": {**OBJECT, "properties": {"a": {}}}}}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def chat(**fields: Any) -> ChatBody:
    """Return a body that is offered."""
    given = {"messages": [{"role": "user", "content": "hi"}], **fields}
    body = ChatBody.model_validate(given)
    body.check_offered()
    return body


def test_defaults_are_those_of_the_api() -> None:
    body = chat()
    assert (body.num_samples, body.stops, body.wants_usage) == (1, [], False)
    assert (body.output_format, body.tool_rules, body.shown_tools) == (None, None, None)
    shaping = body.shaping
    assert (shaping.repetition_penalty, shaping.frequency_penalty) == (1.0, 0.0)
    assert (shaping.presence_penalty, shaping.logit_bias) == (0.0, {})
    assert (body.ignore_eos, body.skip_special_tokens, body.return_token_ids) == (
        False,
        True,
        False,
    )
    assert body.continue_final_message is False
    completion = CompletionBody.model_validate({"prompt": "a"})
    assert (completion.echo, completion.add_special_tokens) == (False, True)


def test_what_is_asked_for_is_taken() -> None:
    body = chat(
        n=3,
        stop="x",
        stream=True,
        stream_options={"include_usage": True},
        repetition_penalty=0.5,
        frequency_penalty=0.25,
        presence_penalty=-0.25,
        logit_bias={"7": 2.0},
    )
    assert (body.num_samples, body.stops, body.wants_usage) == (3, ["x"], True)
    shaping = body.shaping
    assert (shaping.repetition_penalty, shaping.frequency_penalty) == (0.5, 0.25)
    assert (shaping.presence_penalty, shaping.logit_bias) == (-0.25, {7: 2.0})
    assert chat(stop=["x", "y"]).stops == ["x", "y"]
    assert not chat(stream=True, stream_options={"include_usage": False}).wants_usage


@pytest.mark.parametrize(
    ("fields", "regex", "schema"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, None, OBJECT),
        ({"response_format": FORM}, None, {"additionalProperties": False}),
        ({"guided_json": OBJECT}, None, OBJECT),
        ({"guided_json": json.dumps(OBJECT)}, None, OBJECT),
        ({"structured_outputs": {"json": OBJECT}}, None, OBJECT),
        ({"structured_outputs": {"json_object": True}}, None, OBJECT),
        ({"structured_outputs": {"json_object": False}}, None, None),
        ({"guided_regex": "a+"}, "a+", None),
        ({"structured_outputs": {"regex": "a+"}}, "a+", None),
        ({"guided_choice": ["a", "b.c"]}, r"(?:a|b\.c)", None),
        ({"structured_outputs": {"choice": ["a"]}}, "(?:a)", None),
    ],
)
def test_every_spelling_of_a_form_is_one(
    fields: dict[str, Any], regex: str | None, schema: dict[str, Any] | None
) -> None:
    form = chat(**fields).output_format
    assert (form is None) is (regex is None and schema is None)
    if regex is not None:
        assert form is not None
        assert form.regex == regex
    if schema is not None:
        assert form is not None
        assert schema.items() <= json.loads(form.json_schema).items()


@pytest.mark.parametrize("text", ["{", "[1]", "7"])
def test_a_schema_that_is_none_is_left_to_the_sampler(text: str) -> None:
    form = chat(guided_json=text).output_format
    assert form is not None
    assert form.json_schema == text


TOOLS = [tool("add", parameters=OBJECT), tool("sub", strict=True), tool("plain")]


@pytest.mark.parametrize(
    ("fields", "must_call", "schemas", "is_parallel"),
    [
        ({}, False, {"add": False, "sub": True, "plain": False}, True),
        ({"tool_choice": "auto"}, False, {"add": False, "sub": True, "plain": False}, True),
        ({"tool_choice": "required"}, True, {"add": True, "sub": True, "plain": True}, True),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            True,
            {"add": True, "sub": True, "plain": True},
            False,
        ),
        ({"tool_choice": tool("add")}, True, {"add": True}, False),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [tool("add"), tool("sub")]},
                }
            },
            False,
            {"add": False, "sub": True},
            True,
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [tool("plain")]},
                }
            },
            True,
            {"plain": True},
            True,
        ),
    ],
)
def test_a_choice_of_tools_says_which_may_be_called_and_how(
    fields: dict[str, Any], must_call: bool, schemas: dict[str, bool], is_parallel: bool
) -> None:
    body = chat(tools=TOOLS, **fields)
    rules = body.tool_rules
    assert rules is not None
    assert (rules.must_call, rules.is_parallel) == (must_call, is_parallel)
    assert {name: schema is not None for name, schema in rules.schemas.items()} == schemas
    # The model is told of all of them, as they were sent.
    assert body.shown_tools == TOOLS


def test_tools_that_are_not_to_be_called_are_not_told() -> None:
    body = chat(tools=TOOLS, tool_choice="none")
    assert (body.tool_rules, body.shown_tools) == (None, None)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "response_format"),
        ({"min_tokens": 1, "guided_regex": "a"}, "min_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": tool("missing")}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]},
                },
            },
            "tool_choice",
        ),
        ({"tools": [*TOOLS, tool("add")]}, "tools"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"novel_field": 1}, "novel_field"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_kept_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as refusal:
        chat(**fields)
    assert refusal.value.metadata["field"] == field


def test_what_can_be_kept_is_not_refused() -> None:
    chat(min_tokens=0, guided_regex="a")
    chat(top_logprobs=0)
    chat(top_logprobs=20, logprobs=True)
    chat(max_tokens=2, max_completion_tokens=2)
    chat(max_tokens=1)
    chat(continue_final_message=True, add_generation_prompt=False)
    chat(tool_choice="auto")


def test_pictures_of_a_message_are_counted_apart_from_its_text() -> None:
    message = Message.model_validate(
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:1234"}},
                {"type": "image_url", "image_url": "data:12"},
                {"type": "image_url", "image_url": {"url": 7}},
                {"type": "image_url"},
            ],
            "name": "a",
        }
    )
    assert message.num_of_pictures == 9 + 7
    assert message.to_mapping()["name"] == "a"
    plain = Message.model_validate({"role": "user", "content": "data:1234"})
    assert (plain.num_of_pictures, plain.to_mapping()) == (
        0,
        {"role": "user", "content": "data:1234"},
    )


@pytest.mark.parametrize(
    ("prompt", "prompts", "num_text"),
    [
        ("abc", ["abc"], 3),
        ([1, 2], [[1, 2]], 0),
        (["abc", "d"], ["abc", "d"], 4),
        ([[1, 2], [3]], [[1, 2], [3]], 0),
    ],
)
def test_every_form_of_prompts_is_a_list_of_them(
    prompt: Any, prompts: list[Any], num_text: int
) -> None:
    body = CompletionBody.model_validate({"prompt": prompt})
    assert (body.prompts, body.num_text) == (prompts, num_text)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "stream": True}, "echo"),
        ({"n": 2, "best_of": 2}, None),
        ({"max_tokens": 0, "echo": True}, None),
        ({"max_tokens": 1, "stream": True}, None),
    ],
)
def test_a_completion_that_is_not_offered_is_refused(
    fields: dict[str, Any], field: str | None
) -> None:
    body = CompletionBody.model_validate({"prompt": "a", **fields})
    if field is None:
        body.check_offered()
        return
    with pytest.raises(InvalidFieldError) as refusal:
        body.check_offered()
    assert refusal.value.metadata["field"] == field
