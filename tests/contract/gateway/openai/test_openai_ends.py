"""What vLLM's fields and routes do beside OpenAI's, and base URLs that are nearly right."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from tests.fakes.openai_harness import BASE_MODEL, MESSAGES, OpenAiRig, scripted
from tests.fakes.scripted_sampler import SCRIPTED_MODEL


def draw(client: openai.OpenAI, **extra: Any) -> Any:
    """Return the only choice of an answer of the real model, with its tokens."""
    answer = client.chat.completions.create(
        model=BASE_MODEL,
        messages=MESSAGES,
        max_tokens=12,
        temperature=0,
        stop=extra.pop("stop", None),
        extra_body={"return_token_ids": True, **extra},
    )
    return answer.choices[0]


def test_a_token_that_is_to_stop_the_sample_does(client: openai.OpenAI) -> None:
    whole = draw(client, ignore_eos=True)
    tokens = whole.model_extra["token_ids"]
    third = tokens[2]
    cut = draw(client, stop_token_ids=[third])
    assert cut.finish_reason == "stop"
    assert cut.model_extra["token_ids"] == tokens[: tokens.index(third) + 1]


@pytest.mark.parametrize("ignores", [False, True])
def test_stop_tokens_stand_beside_those_of_the_model(
    client: openai.OpenAI, rig: OpenAiRig, ignores: bool
) -> None:
    scripted(client, extra_body={"stop_token_ids": [3, 4], "ignore_eos": ignores})
    stop = rig.sampler.requests[-1].params.stop_tokens
    assert (list(stop.token_ids), stop.includes_those_of_model) == ([3, 4], not ignores)
    scripted(client)
    assert not rig.sampler.requests[-1].params.HasField("stop_tokens")


def test_nothing_ends_a_sample_that_is_too_short(client: openai.OpenAI) -> None:
    tokens = draw(client, ignore_eos=True).model_extra["token_ids"]
    held = draw(client, stop_token_ids=[tokens[0]], min_tokens=5)
    found = held.model_extra["token_ids"]
    assert len(found) >= 5
    assert tokens[0] not in found[:5]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_is_not_heeded_before_the_least_length(
    client: openai.OpenAI, is_streamed: bool
) -> None:
    text = draw(client, ignore_eos=True).message.content
    first = text[0]
    assert draw(client, ignore_eos=True, stop=[first]).message.content == ""
    # All letters stop: the first that may is behind the fourth token.
    every = sorted(set(text))
    held = draw(client, ignore_eos=True, stop=every, min_tokens=4)
    assert held.finish_reason == "stop"
    assert len(held.model_extra["token_ids"]) == 5
    assert held.message.content == text[: len(held.message.content)] != ""
    if is_streamed:
        stream = client.chat.completions.create(
            model=BASE_MODEL,
            messages=MESSAGES,
            max_tokens=12,
            temperature=0,
            stop=every,
            stream=True,
            extra_body={"min_tokens": 4, "ignore_eos": True},
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == held.message.content


def test_a_least_length_that_cannot_be_kept_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="min_tokens"):
        draw(client, min_tokens=13)
    with pytest.raises(openai.BadRequestError, match="min_tokens excludes a form"):
        draw(client, min_tokens=2, guided_choice=["a"])


@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
def test_an_answer_is_one_of_the_choices(client: openai.OpenAI, field: str) -> None:
    choices = ["a+b (c)", "[x] {y}|z^$", "#1 & ~2-3."]
    for choice in choices:
        extra: Any = [choice] if field == "guided_choice" else {"choice": [choice]}
        answer = client.chat.completions.create(
            model=BASE_MODEL, messages=MESSAGES, max_tokens=60, extra_body={field: extra}
        )
        assert answer.choices[0].message.content == choice
    answer = client.chat.completions.create(
        model=BASE_MODEL, messages=MESSAGES, max_tokens=60, extra_body={"guided_choice": choices}
    )
    assert answer.choices[0].message.content in choices


@pytest.mark.parametrize(
    ("base", "words"), [("", "has to end in /v1"), ("/v1/v1", "has a /v1 too many")]
)
def test_a_base_url_that_is_nearly_right_is_told_with_the_remedy(
    rig: OpenAiRig, base: str, words: str
) -> None:
    with openai.OpenAI(base_url=f"{rig.url}{base}", api_key=rig.key, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match=words) as refused:
            client.chat.completions.create(model=SCRIPTED_MODEL, messages=MESSAGES)
        assert refused.value.code == "unknown_url"
        with pytest.raises(openai.NotFoundError, match=words):
            client.responses.create(model=SCRIPTED_MODEL, input="hi")


def post(rig: OpenAiRig, path: str, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {rig.key}"}
    return httpx.post(f"{rig.url}{path}", json=body, headers=headers, timeout=30)


def test_a_text_becomes_tokens_and_comes_back(rig: OpenAiRig) -> None:
    found = post(rig, "/tokenize", model=BASE_MODEL, prompt="ab c", return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] > found["count"]
    assert "".join(found["token_strs"]) == "ab c"
    back = post(rig, "/detokenize", model=BASE_MODEL, tokens=found["tokens"]).json()
    assert back == {"prompt": "ab c"}


def test_a_conversation_becomes_the_tokens_that_a_chat_reads(
    client: openai.OpenAI, rig: OpenAiRig
) -> None:
    found = post(rig, "/tokenize", model=BASE_MODEL, messages=MESSAGES).json()
    answer = client.chat.completions.create(
        model=BASE_MODEL, messages=MESSAGES, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].model_extra["prompt_token_ids"] == found["tokens"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a", "novel": 1}, "novel"),
    ],
)
def test_what_is_no_text_to_tokenize_is_refused_by_name(
    rig: OpenAiRig, body: dict[str, Any], param: str
) -> None:
    answer = post(rig, "/tokenize", model=BASE_MODEL, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


PICTURE = [{"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}]


@pytest.mark.parametrize(
    ("route", "body", "status", "problem"),
    [
        pytest.param(
            "/tokenize",
            {"model": "nosuch", "prompt": "a"},
            404,
            ("not_found_error", "model_not_found", None),
            id="model",
        ),
        pytest.param(
            "/tokenize",
            {"model": BASE_MODEL, "messages": [{"role": "user", "content": PICTURE}]},
            400,
            ("invalid_request_error", "invalid_field", "messages.0.content"),
            id="message",
        ),
        pytest.param(
            "/detokenize",
            {"model": BASE_MODEL, "tokens": ["a"]},
            400,
            ("invalid_request_error", "invalid_field", "tokens.0"),
            id="token",
        ),
    ],
)
def test_mistakes_of_tokenizing_have_the_type_of_openai_s(
    rig: OpenAiRig,
    route: str,
    body: dict[str, Any],
    status: int,
    problem: tuple[str, str, str | None],
) -> None:
    answer = post(rig, route, **body)
    error = answer.json()["error"]
    assert (answer.status_code, (error["type"], error["code"], error["param"])) == (status, problem)
