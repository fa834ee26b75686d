"""Answers of OpenAI's API say which sampler it was, and why."""

from __future__ import annotations

from typing import Any

import openai
import pytest

BASE_MODEL = "tiny"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ["chat", "completions", "prompts", "responses"])
def test_an_answer_names_its_sampler(client: openai.OpenAI, route: str, is_streamed: bool) -> None:
    routes: dict[str, tuple[Any, dict[str, Any]]] = {
        "chat": (client.chat.completions, {"messages": MESSAGES, "max_tokens": 4}),
        "completions": (client.completions, {"prompt": "hello", "max_tokens": 4}),
        "prompts": (client.completions, {"prompt": ["hello", "there"], "max_tokens": 4}),
        "responses": (client.responses, {"input": "hello", "max_output_tokens": 16}),
    }
    resource, arguments = routes[route]
    create = resource.with_streaming_response.create
    with create(model=BASE_MODEL, stream=is_streamed, **arguments) as answer:
        assert answer.headers["x-tinsmith-sampler"].startswith("workers/")
        assert answer.headers["x-tinsmith-sampler-choice"] == "only_one"
        assert answer.read()


def test_a_refusal_names_no_sampler(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="none", messages=MESSAGES)
    assert "x-tinsmith-sampler" not in refused.value.response.headers
