"""The `anthropic` package as it is, on a live run and a checkpoint, and on the list of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from tests.integration.servers import Deployment

import tinsmith
from tinsmith.names import shorten

ASKED: Any = [{"role": "user", "content": "ping"}]
TOOL: Any = {
    "name": "add",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
    },
}


@pytest.fixture(scope="module")
def models(embedded: Deployment) -> Iterator[dict[str, str]]:
    """A live run that says `pong`, and a checkpoint of it, by name."""
    with embedded.client() as client:
        run = client.create_lora_training_run("tiny", 8, seed=1)
        tokenizer = run.get_tokenizer()
        prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)
        tokens = [*prompt, *tokenizer.encode("pong<|im_end|>", add_special_tokens=False)]
        weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
        datum = tinsmith.Datum(
            tinsmith.ModelInput.from_ints(tokens[:-1]),
            {"target_tokens": tokens[1:], "weights": weights},
        )
        for _ in range(15):
            run.forward_backward([datum])
            run.optim_step(tinsmith.AdamParams(learning_rate=2e-2)).result()
        saved = run.save_weights_for_sampler("said").result()
        yield {
            "run": run.name,
            "latest": f"{run.name.rpartition('/')[2]}@latest",
            "saved": saved.name,
        }


@pytest.fixture
def client(embedded: Deployment) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=f"http://{embedded.address}", api_key=embedded.api_key, max_retries=0
    ) as client:
        yield client


@pytest.mark.parametrize("name", ["run", "latest", "saved"])
def test_what_was_trained_answers_whole_streamed_and_counted(
    client: anthropic.Anthropic, models: dict[str, str], name: str
) -> None:
    asked: Any = {
        "model": models[name],
        "messages": ASKED,
        "max_tokens": 16,
        "extra_body": {"temperature": 0.0},
    }
    answer = client.messages.create(**asked)
    [block] = answer.content
    assert (block.type, getattr(block, "text", "")) == ("text", "pong")
    assert (answer.stop_reason, answer.model) == ("end_turn", models[name])
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "pong"
        assert stream.get_final_message().stop_reason == "end_turn"
    counted = client.messages.count_tokens(model=models[name], messages=ASKED)
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("name", ["run", "saved"])
def test_what_was_trained_is_held_to_a_tool(
    client: anthropic.Anthropic, models: dict[str, str], name: str
) -> None:
    answer = client.messages.create(
        model=models[name],
        messages=ASKED,
        max_tokens=200,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "add"},
    )
    [block] = answer.content
    assert block.type == "tool_use"
    assert list(block.input) == ["a"]


def test_models_are_listed_in_pages_and_by_name(
    client: anthropic.Anthropic, models: dict[str, str]
) -> None:
    whole = [model.id for model in client.models.list(limit=1000)]
    assert {"tiny", shorten(models["saved"])} <= set(whole)
    assert [model.id for model in client.models.list(limit=1)] == whole
    page = client.models.list(limit=1, before_id=whole[-1])
    assert [model.id for model in page.data] == [whole[-2]]
    found = client.models.retrieve("tiny")
    assert (found.type, found.id, found.display_name) == ("model", "tiny", "tiny")
    assert found.max_input_tokens
    assert client.models.retrieve(models["saved"]).created_at.year > 2000
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.models.retrieve("nosuch")
    assert refused.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": refused.value.body["error"]["message"]},
    }


@pytest.mark.parametrize(
    ("query", "problem"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("after_id=nosuch", "after_id")],
)
def test_a_page_that_is_none_is_refused_by_name(
    embedded: Deployment, query: str, problem: str
) -> None:
    answer = httpx.get(
        f"http://{embedded.address}/v1/models?{query}",
        headers={"x-api-key": embedded.api_key, "anthropic-version": "2023-06-01"},
    )
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def test_without_the_header_the_list_is_openai_s(embedded: Deployment) -> None:
    answer = httpx.get(
        f"http://{embedded.address}/v1/models", headers={"x-api-key": embedded.api_key}
    )
    assert answer.json()["object"] == "list"
