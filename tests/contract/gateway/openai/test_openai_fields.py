"""What clients of OpenAI's API send beside what they ask for: fields, origins, lengths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.fakes.openai_harness import BASE_MODEL, OpenAiRig, scripted
from tests.fakes.scripted_sampler import MAX_CONTEXT, SCRIPTED_MODEL

from tinsmith_gateway.openai.unused_fields import HARMLESS_FIELDS, NEUTRAL_VALUES

REPOSITORY = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temprature", 0.5),
        ("reasoning_effort", "high"),
        ("store", 0),
        ("truncate_prompt_tokens", False),
        ("modalities", ["text", "audio"]),
        ("stream_options.usage", True),
    ],
)
def test_a_field_that_is_not_known_or_not_offered_is_refused_by_name(
    client: openai.OpenAI, field: str, value: Any
) -> None:
    name, _, inner = field.partition(".")
    with pytest.raises(openai.BadRequestError) as refused:
        scripted(client, extra_body={name: {inner: value} if inner else value})
    assert (refused.value.param, refused.value.type) == (field, "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(
            model=SCRIPTED_MODEL,
            prompt="a",
            extra_body={name: {inner: value} if inner else value},
        )
    assert refused.value.param == field


def test_fields_that_change_no_token_are_taken(client: openai.OpenAI) -> None:
    harmless = dict.fromkeys(HARMLESS_FIELDS, "x")
    neutral = {name: values[-1] for name, values in NEUTRAL_VALUES.items()}
    assert scripted(client, extra_body={**harmless, **neutral}).choices
    answer = client.completions.create(
        model=SCRIPTED_MODEL, prompt="a", extra_body={**harmless, **neutral}
    )
    assert answer.choices


def test_fields_that_change_no_token_are_documented() -> None:
    page = (REPOSITORY / "docs" / "openai.md").read_text()
    named = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert named == set(NEUTRAL_VALUES) | HARMLESS_FIELDS


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_libraries_look_for(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=SCRIPTED_MODEL, prompt=[5] * MAX_CONTEXT)
    assert f"maximum context length is {MAX_CONTEXT} tokens" in refused.value.message
    # Greedy, since a sampled end of text would end it before its limit.
    limit = client.completions.create(model=BASE_MODEL, prompt=[5] * 8, max_tokens=2, temperature=0)
    assert limit.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is \d+ tokens"):
        client.completions.create(model=BASE_MODEL, prompt=[5] * 20_000)


@pytest.mark.parametrize("origins", ["https://app.example.org", "*", ""])
def test_pages_of_listed_origins_alone_may_read_answers(
    tmp_path: Path, tiny_model: Path, origins: str
) -> None:
    with OpenAiRig(tmp_path, tiny_model, cors_origins=origins) as rig:
        asked = {
            "origin": "https://app.example.org",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        }
        answer = httpx.options(f"{rig.url}/v1/chat/completions", headers=asked)
        allowed = answer.headers.get("access-control-allow-origin")
        assert (answer.status_code, allowed) == ((200, origins) if origins else (405, None))
        models = httpx.get(
            f"{rig.url}/v1/models",
            headers={"origin": "https://app.example.org", "authorization": f"Bearer {rig.key}"},
        )
        assert models.status_code == 200
        assert models.headers.get("access-control-allow-origin") == (origins or None)
        if origins == "https://app.example.org":
            other = httpx.options(
                f"{rig.url}/v1/models", headers={**asked, "origin": "https://else.example.org"}
            )
            assert "access-control-allow-origin" not in other.headers
