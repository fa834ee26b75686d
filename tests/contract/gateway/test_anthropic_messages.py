"""`/v1/messages` for the unmodified `anthropic` package: whole, streamed, with tools, counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from tests.fakes.openai_harness import BASE_MODEL, OpenAiRig
from tests.fakes.scripted_sampler import SCRIPTED_MODEL

from tinsmith.tensors import decode_tensor
from tinsmith_gateway.anthropic.conversation import messages_of
from tinsmith_runtime.errors import FailedPreconditionError

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
SHORT_TOOLS: Any = [{"name": "add", "input_schema": {}}]
"""The context of the scripted model is short."""
ASKED: Any = [{"role": "user", "content": "hi"}]
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
_EVENT: Any = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[OpenAiRig]:
    with OpenAiRig(tmp_path_factory.mktemp("anthropic"), tiny_model) as rig:
        yield rig


@pytest.fixture(autouse=True)
def _forget(rig: OpenAiRig) -> None:
    rig.sampler.reset()


def client_of(rig: OpenAiRig, key: str = "", **options: Any) -> anthropic.Anthropic:
    options = {"api_key": key or rig.key, **options}
    return anthropic.Anthropic(base_url=rig.url, max_retries=0, timeout=30, **options)


@pytest.fixture(scope="module")
def client(rig: OpenAiRig) -> Iterator[anthropic.Anthropic]:
    with client_of(rig) as client:
        yield client


def ask(client: anthropic.Anthropic, **options: Any) -> Message:
    options = {"model": SCRIPTED_MODEL, "max_tokens": 200, "messages": ASKED, **options}
    answer: Message = client.messages.create(**options)
    Message.model_validate(answer.model_dump(), strict=True)
    return answer


def prompt_of(rig: OpenAiRig) -> str:
    """Return the prompt of the newest request, as the scripted model reads it."""
    chunks = rig.sampler.requests[-1].prompt.chunks
    tokens = [int(token) for chunk in chunks for token in decode_tensor(chunk.tokens)]
    return rig.sampler.tokenizer.decode(tokens)


def texts(answer: Message) -> list[str]:
    return [block.text for block in answer.content if block.type == "text"]


def test_a_text_is_answered(client: anthropic.Anthropic, rig: OpenAiRig) -> None:
    answer = ask(client, system="Be kind.")
    assert texts(answer) == ["hello"]
    assert (answer.role, answer.model, answer.type) == ("assistant", SCRIPTED_MODEL, "message")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    told = prompt_of(rig)
    assert told == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    usage = answer.usage
    assert usage.cache_read_input_tokens == 2
    prompt = rig.sampler.tokenizer.encode(told, add_special_tokens=False)
    assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt)
    assert usage.output_tokens == len("hello") + 1


def test_an_answer_is_known_by_the_id_that_the_package_reads(client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(
        model=SCRIPTED_MODEL, max_tokens=200, messages=ASKED
    )
    assert raw.headers["request-id"].startswith("req_")


def test_blocks_say_what_their_text_says(client: anthropic.Anthropic, rig: OpenAiRig) -> None:
    cached: Any = {"type": "ephemeral"}
    ask(
        client,
        system=[{"type": "text", "text": "Be ", "cache_control": cached}, _text("kind.")],
        messages=[{"role": "user", "content": [_text("h"), _text("i")]}],
        metadata={"user_id": "a"},
    )
    parts = prompt_of(rig)
    ask(client, system="Be kind.")
    assert parts == prompt_of(rig)


def test_how_an_answer_is_drawn_reaches_the_sampler(
    client: anthropic.Anthropic, rig: OpenAiRig
) -> None:
    # The package has no names for those that newer models do not take.
    drawn = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 3}
    ask(client, stop_sequences=["zz"], extra_body=drawn)
    params = rig.sampler.requests[-1].params
    assert (params.temperature, params.top_k, params.seed) == (0.5, 4, 3)
    assert params.top_p == pytest.approx(0.9)
    assert (params.max_tokens, list(params.stop_strings)) == (200, ["zz"])


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("options", "text", "reason", "stop"),
    [
        ({"max_tokens": 2}, "he", "max_tokens", None),
        ({"stop_sequences": ["x", "ll"]}, "he", "stop_sequence", "ll"),
        ({"stop_sequences": ["x"]}, "hello", "end_turn", None),
    ],
)
def test_why_an_answer_ended_is_said(
    client: anthropic.Anthropic,
    options: dict[str, Any],
    text: str,
    reason: str,
    stop: str | None,
    is_streamed: bool,
) -> None:
    answer = streamed(client, **options)[1] if is_streamed else ask(client, **options)
    assert texts(answer) == [text]
    assert (answer.stop_reason, answer.stop_sequence) == (reason, stop)


def streamed(client: anthropic.Anthropic, **options: Any) -> tuple[list[Any], Message]:
    """Return the raw events of a stream, and the message that the package makes of another."""
    options = {"model": SCRIPTED_MODEL, "max_tokens": 200, "messages": ASKED, **options}
    events: list[Any] = list(client.messages.create(stream=True, **options))
    for event in events:
        _EVENT.validate_python(event.model_dump(), strict=True)
    with client.messages.stream(**options) as stream:
        final: Message = stream.get_final_message()
    return events, final


@pytest.mark.parametrize(
    ("reply", "kinds"),
    [
        pytest.param("hello", ["text"], id="text"),
        pytest.param("", [], id="nothing"),
        pytest.param(CALL, ["tool_use"], id="call"),
        pytest.param("So: " + CALL + "\nDone.", ["text", "tool_use", "text"], id="both"),
        pytest.param(CALL + "\n" + CALL, ["tool_use", "tool_use"], id="two-calls"),
    ],
)
def test_a_stream_is_the_message_in_events(
    client: anthropic.Anthropic, rig: OpenAiRig, reply: str, kinds: list[str]
) -> None:
    rig.sampler.replies = [reply]
    events, final = streamed(client, tools=TOOLS)
    whole = ask(client, tools=TOOLS)
    assert [block.type for block in final.content] == kinds
    assert "".join(texts(final)) == "".join(texts(whole))
    calls = [
        [block.input for block in one.content if block.type == "tool_use"] for one in (final, whole)
    ]
    assert calls[0] == calls[1] == [{"a": 1, "b": 2}] * kinds.count("tool_use")
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens == whole.usage.input_tokens
    names = [event.type for event in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert names.count("content_block_start") == names.count("content_block_stop") == len(kinds)
    assert events[0].message.usage.input_tokens == whole.usage.input_tokens


def test_a_loop_of_tools_sends_back_what_it_got(
    client: anthropic.Anthropic, rig: OpenAiRig
) -> None:
    rig.sampler.replies = ["I add.\n" + CALL + "\n" + CALL]
    first = ask(client, tools=SHORT_TOOLS)
    assert first.stop_reason == "tool_use"
    calls = [block for block in first.content if block.type == "tool_use"]
    assert len({call.id for call in calls}) == 2
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "3"},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": [_text("4")]},
        _text("So?"),
    ]
    messages: Any = [
        *ASKED,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    rig.sampler.replies = ["3"]
    assert texts(ask(client, tools=SHORT_TOOLS, messages=messages)) == ["3"]
    assert prompt_of(rig).endswith(
        "<|im_start|>assistant\nI add.\n" + CALL + "\n" + CALL + "<|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}]
)
def test_a_forced_call_keeps_its_schema(client: anthropic.Anthropic, choice: Any) -> None:
    answer = ask(
        client,
        model=BASE_MODEL,
        max_tokens=100,
        tools=TOOLS,
        tool_choice=choice,
        extra_body={"seed": 2},
    )
    call = answer.content[0]
    assert call.type == "tool_use"
    assert set(call.input) == {"a", "b"}


def test_tools_that_are_not_to_be_called_are_not_shown(
    client: anthropic.Anthropic, rig: OpenAiRig
) -> None:
    ask(client, tools=TOOLS, tool_choice={"type": "none"})
    assert "add" not in prompt_of(rig)


def test_an_answer_keeps_the_schema_of_its_output_config(
    client: anthropic.Anthropic, rig: OpenAiRig
) -> None:
    ask(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    form = json.loads(rig.sampler.requests[-1].params.output_format.json_schema)
    assert form["required"] == ["a", "b"]


def test_an_answer_that_is_begun_goes_on(client: anthropic.Anthropic, rig: OpenAiRig) -> None:
    for begun in ("The answer", [_text("The answer")]):
        ask(client, messages=[*ASKED, {"role": "assistant", "content": begun}])
        assert prompt_of(rig).endswith("<|im_start|>assistant\nThe answer")


def test_an_image_is_a_part_of_its_message(client: anthropic.Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    content: Any = [_text("see"), {"type": "image", "source": source}]
    messages: Any = [{"role": "user", "content": content}]
    [message] = messages_of(messages, None).messages
    url = f"data:image/png;base64,{PIXEL}"
    assert message["content"][1] == {"type": "image_url", "image_url": {"url": url}}
    with_image = client.messages.count_tokens(model=SCRIPTED_MODEL, messages=messages)
    messages[0]["content"] = content[:1]
    without = client.messages.count_tokens(model=SCRIPTED_MODEL, messages=messages)
    assert with_image.input_tokens > without.input_tokens


def test_tokens_are_counted_as_they_are_read(client: anthropic.Anthropic, rig: OpenAiRig) -> None:
    options: Any = {"system": "Be kind.", "tools": TOOLS, "messages": ASKED}
    counted = client.messages.count_tokens(model=SCRIPTED_MODEL, **options)
    assert not rig.sampler.requests
    usage = ask(client, **options).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_call_of_an_episode_is_recorded(rig: OpenAiRig) -> None:
    session = rig.sampling_session(base_model=SCRIPTED_MODEL)
    key = rig.episode_key(session)
    for is_streamed in (False, True):
        with client_of(rig, key) as client:
            before = len(rig.coordinator.records)
            if is_streamed:
                streamed(client, model="policy")
            else:
                ask(client, model="policy")
        [record, *_] = rig.coordinator.records[before:]
        assert record.api_key == key
        told = [int(token) for c in record.prompt.chunks for token in decode_tensor(c.tokens)]
        assert rig.sampler.tokenizer.decode(told).endswith("<|im_start|>assistant\n")


async def test_the_asynchronous_client_reads_both(rig: OpenAiRig) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=rig.url, auth_token=rig.key, api_key=None, max_retries=0
    ) as client:
        options: Any = {"model": SCRIPTED_MODEL, "max_tokens": 200, "messages": ASKED}
        assert texts(await client.messages.create(**options)) == ["hello"]
        async with client.messages.stream(**options) as stream:
            assert [text async for text in stream.text_stream] == list("hello")


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _said(*blocks: Any) -> dict[str, Any]:
    return {"messages": [*ASKED, {"role": "assistant", "content": list(blocks)}, *ASKED]}


USE = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "thinking": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking is not"),
    "mcp": ({"extra_body": {"mcp_servers": [{"name": "a"}]}}, "the server runs no tools"),
    "container": ({"container": "c"}, "nothing is kept on the server"),
    "unknown": ({"extra_body": {"novel": 1}}, "novel is not known"),
    "effort": ({"output_config": {"effort": "low"}}, "output_config.effort"),
    "server-tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
    "no-such-tool": ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "'sub'"),
    "role": ({"messages": [{"role": "critic", "content": "a"}]}, r"messages.0.role must be one"),
    "empty": ({"messages": [{"role": "user", "content": []}]}, "messages.0.content must be"),
    "document": (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        r"messages.0.content.0.type 'document' is not offered",
    ),
    "image-url": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
        "the server fetches nothing",
    ),
    "text-behind-a-call": (_said(USE, _text("b")), r"messages.1.content.1 follows a tool_use"),
    "redacted": (_said({"type": "redacted_thinking", "data": "a"}), "'redacted_thinking'"),
    "error-without-text": (
        {
            "messages": [
                *ASKED,
                {"role": "assistant", "content": [USE]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "is_error": True}],
                },
            ]
        },
        r"messages.2.content.0.is_error needs a content",
    ),
    "ends-with-a-call": (
        {"messages": [*ASKED, {"role": "assistant", "content": [USE]}]},
        "messages.1 is an answer that ends with a call",
    ),
    "number-beside-a-system": (
        {
            "system": "Be kind.",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a", "citations": {}}]}
            ],
        },
        "messages.0.content.0.citations",
    ),
    "too-long": ({"messages": [{"role": "user", "content": "a" * 5000}]}, "prompt is too long"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_offered_is_refused_by_name(client: anthropic.Anthropic, case: str) -> None:
    options, words = REFUSED[case]
    with pytest.raises(anthropic.BadRequestError, match=words) as refused:
        ask(client, **options)
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_a_message_that_the_template_passes_over_is_named_as_the_request_has_it(
    client: anthropic.Anthropic,
) -> None:
    said = _said({"type": "thinking", "thinking": "DEEP", "signature": ""}, _text("b"))
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.1\b"):
        ask(client, system="Be kind.", **said)


def test_errors_are_those_that_the_package_knows(
    client: anthropic.Anthropic, rig: OpenAiRig
) -> None:
    with client_of(rig, "tsk_none") as stranger, pytest.raises(anthropic.AuthenticationError):
        ask(stranger)
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="nosuch")
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.NotFoundError, match="nothing is kept on the server"):
        client.messages.batches.list()
    answer = httpx.get(f"{rig.url}/v1/messages", timeout=30)
    assert (answer.status_code, answer.json()["type"]) == (405, "error")


def test_a_stream_that_breaks_ends_with_an_error(
    client: anthropic.Anthropic, rig: OpenAiRig
) -> None:
    rig.sampler.failure = FailedPreconditionError("the script ends here")
    rig.sampler.fail_after = 2
    with pytest.raises(anthropic.APIStatusError, match="the script ends here"):
        list(
            client.messages.create(
                model=SCRIPTED_MODEL, max_tokens=200, messages=ASKED, stream=True
            )
        )
