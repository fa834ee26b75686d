"""Answers that keep a JSON schema or a regular expression, over OpenAI's API and natively."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from tests.fakes.openai_harness import BASE_MODEL, EXACT, MESSAGES, OpenAiRig

import tinsmith
from tinsmith_sampler.forms import grammars

PROMPT = [5, 6, 7, 8]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["tin", "lead", "zinc"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "parts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {"type": "string", "pattern": "^[a-z]{1,4}$"},
        },
        "is_old": {"type": "boolean"},
    },
    "required": ["kind", "count", "parts", "is_old"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "metal", "schema": SCHEMA}}


def chat(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": BASE_MODEL, "messages": MESSAGES, "temperature": 2, "max_tokens": 400}
    return client.chat.completions.create(**{**given, **options})


def test_a_schema_is_kept_by_a_thousand_random_answers(client: openai.OpenAI) -> None:
    answers = [
        choice
        for seed in range(20)
        for choice in chat(client, n=50, seed=seed, response_format=FORM).choices
    ]
    assert len(answers) == 1000
    for choice in answers:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert len({choice.message.content for choice in answers}) > 300


def test_a_seed_repeats_an_answer_alone_and_among_others(client: openai.OpenAI) -> None:
    def once(n: int, **more: Any) -> list[str]:
        choices = chat(client, n=n, seed=4, response_format=FORM, **more).choices
        return [choice.message.content for choice in choices]

    among = once(8)
    assert once(3) == among[:3]
    parts: dict[int, str] = {0: "", 1: ""}
    for chunk in chat(client, n=2, seed=4, response_format=FORM, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert [parts[0], parts[1]] == among[:2]


@pytest.mark.parametrize(
    "options",
    [
        {"guided_regex": r"[ab]{3}-[0-9]{2}"},
        {"structured_outputs": {"regex": r"[ab]{3}-[0-9]{2}"}},
    ],
)
def test_a_regular_expression_is_kept(client: openai.OpenAI, options: dict[str, Any]) -> None:
    for choice in chat(client, n=20, extra_body=options).choices:
        assert re.fullmatch(r"[ab]{3}-[0-9]{2}", choice.message.content)


def test_an_object_is_json(client: openai.OpenAI) -> None:
    choices = chat(client, n=20, response_format={"type": "json_object"}, max_tokens=600).choices
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:
        assert isinstance(json.loads(choice.message.content), dict)


def test_a_form_goes_on_without_the_end_of_a_turn(client: openai.OpenAI) -> None:
    (choice,) = chat(
        client, extra_body={"guided_regex": "ab?", "ignore_eos": True}, max_tokens=50
    ).choices
    assert choice.message.content in ("a", "ab")


def test_log_probabilities_are_those_of_all_tokens(rig: OpenAiRig) -> None:
    params = tinsmith.SamplingParams(max_tokens=200, seed=3, json_schema=SCHEMA)
    with tinsmith.Client(rig.pods.address, api_key=rig.key) as native:
        sampler = native.create_sampler(base_model=BASE_MODEL)
        (sequence,) = sampler.sample(PROMPT, sampling_params=params).result().sequences
        scores = sampler.compute_logprobs([*PROMPT, *sequence.tokens]).result()
        np.testing.assert_allclose(scores[len(PROMPT) :], sequence.logprobs, rtol=1e-4, atol=1e-4)
        text = sampler.get_tokenizer().decode(list(sequence.tokens)[:-1])
        jsonschema.validate(json.loads(text), SCHEMA)
        both = tinsmith.SamplingParams(json_schema=SCHEMA, regex="a")
        with pytest.raises(tinsmith.InvalidArgumentError, match="exclude"):
            sampler.sample(PROMPT, sampling_params=both).result()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: list[dict[str, Any]] = [
    {"guided_json": {"type": "nope"}},
    {"guided_json": "{"},
    {"guided_json": nested(300)},
    {"guided_json": {"$ref": "http://127.0.0.1:1/schema"}},
    {"guided_json": {"type": "string", "pattern": "(("}},
    {"guided_json": {"enum": ["x" * 70_000]}},
    {"guided_regex": "(("},
    {"guided_regex": ""},
    {"guided_regex": r"(?=a)b"},
    {"guided_regex": "[^\\s\\S]"},
]


@pytest.mark.parametrize("options", HOSTILE, ids=range(len(HOSTILE)))
def test_a_form_that_cannot_be_followed_is_refused(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body=options)
    assert refused.value.type == "invalid_request_error"
    assert chat(client, max_tokens=2).choices


@pytest.mark.parametrize(
    "regex", ["((a{1,1000}){1,1000}){1,1000}b", "(a|aa)*(a|aaa)*b", "(.*a){12}[0-9]"]
)
def test_what_other_engines_choke_on_is_followed(client: openai.OpenAI, regex: str) -> None:
    (choice,) = chat(client, extra_body={"guided_regex": regex}, max_tokens=40).choices
    assert choice.message.content


def test_an_answer_without_a_form_waits_for_no_mask(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    fill = grammars.fill_next_token_bitmask

    def fill_late(*args: Any) -> None:
        has_begun.set()
        assert may_end.wait(60.0)
        fill(*args)

    monkeypatch.setattr(grammars, "fill_next_token_bitmask", fill_late)
    with ThreadPoolExecutor(1) as aside:
        try:
            late = aside.submit(chat, client, n=8, extra_body={"guided_regex": "[ab]{3}"})
            assert has_begun.wait(60.0)
            assert chat(client, max_tokens=16).choices
            assert not late.done()
        finally:
            may_end.set()
        choices = late.result().choices
    assert all(re.fullmatch("[ab]{3}", choice.message.content) for choice in choices)


def test_many_forms_are_compiled_and_forgotten(client: openai.OpenAI) -> None:
    for number in range(300):
        (choice,) = chat(client, extra_body={"guided_regex": f"x{number}"}).choices
        assert choice.message.content == f"x{number}"
    assert chat(client, extra_body={**EXACT, "guided_regex": "x0"}).choices


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs"),
    ],
)
def test_a_form_that_is_not_offered_is_refused_by_name(
    client: openai.OpenAI, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body=options)
    assert str(refused.value.param).startswith(field)
