"""`/v1/responses` for the unmodified `openai` package: whole, streamed, parsed, with tools."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from tests.fakes.openai_harness import OpenAiRig
from tests.fakes.scripted_sampler import SCRIPTED_MODEL

from tinsmith.tensors import decode_tensor
from tinsmith_runtime.errors import FailedPreconditionError

TINY_MODEL = "tiny"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS: Any = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]
SHORT_TOOLS: Any = [{"type": "function", "name": "add", "parameters": {}}]
"""The context of the scripted model is short."""
_EVENT: Any = pydantic.TypeAdapter(ResponseStreamEvent)


class Verdict(pydantic.BaseModel):
    """What an answer is parsed as."""

    model_config = pydantic.ConfigDict(extra="forbid")

    ok: bool
    word: Literal["yes", "no"]


class Addition(pydantic.BaseModel):
    """Arguments of a call."""

    a: int
    b: int


def prompt_of(rig: OpenAiRig) -> str:
    """Return the prompt of the newest request, as the scripted model reads it."""
    chunks = rig.sampler.requests[-1].prompt.chunks
    tokens = [int(token) for chunk in chunks for token in decode_tensor(chunk.tokens)]
    return rig.sampler.tokenizer.decode(tokens)


def test_a_text_is_answered(client: openai.OpenAI, rig: OpenAiRig) -> None:
    answer = client.responses.create(
        model=SCRIPTED_MODEL, input="hi", instructions="Be kind.", store=True
    )
    Response.model_validate(answer.model_dump(), strict=True)
    assert answer.output_text == "hello"
    assert answer.status == "completed"
    assert answer.to_dict()["store"] is False
    assert prompt_of(rig) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 2


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=SCRIPTED_MODEL, input="hi", max_output_tokens=2)
    assert (answer.status, answer.output_text) == ("incomplete", "he")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_loop_of_tools_sends_back_what_it_got(client: openai.OpenAI, rig: OpenAiRig) -> None:
    rig.sampler.replies = ["I add." + "\n" + CALL + "\n" + CALL]
    items: Any = [{"role": "user", "content": "1 + 2?"}]
    first = client.responses.create(model=SCRIPTED_MODEL, input=items, tools=SHORT_TOOLS)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 1, "b": 2}] * 2
    assert len({call.call_id for call in calls}) == 2
    rig.sampler.replies = ["3"]
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls
    ]
    items = [*items, *first.output, *outputs]
    second = client.responses.create(model=SCRIPTED_MODEL, input=items, tools=SHORT_TOOLS)
    assert second.output_text == "3"
    told = prompt_of(rig)
    assert told.endswith(
        "<|im_start|>assistant\nI add.\n" + CALL + "\n" + CALL + "<|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_parts_roles_and_schemas_reach_the_model(client: openai.OpenAI, rig: OpenAiRig) -> None:
    client.responses.create(
        model=SCRIPTED_MODEL,
        input=[
            {"role": "developer", "content": "Short."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": "b"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "c"}]},
        ],
        text={
            "format": {
                "type": "json_schema",
                "name": "v",
                "schema": Verdict.model_json_schema(),
                "strict": True,
            }
        },
        temperature=0.5,
        extra_body={"seed": 3, "top_k": 4},
    )
    request = rig.sampler.requests[-1]
    assert json.loads(request.params.output_format.json_schema) == Verdict.model_json_schema()
    assert (request.params.seed, request.params.top_k) == (3, 4)
    assert request.params.temperature == 0.5
    assert prompt_of(rig) == (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("reply", "items"),
    [
        pytest.param("hello", ["message"], id="text"),
        pytest.param("", ["message"], id="nothing"),
        pytest.param(CALL, ["function_call"], id="call"),
        pytest.param("So: " + CALL + "\nDone.", ["message", "function_call", "message"], id="both"),
    ],
)
def test_each_event_of_a_stream_is_one_of_the_package(
    client: openai.OpenAI, rig: OpenAiRig, reply: str, items: list[str]
) -> None:
    rig.sampler.replies = [reply]
    with client.responses.create(
        model=SCRIPTED_MODEL, input="hi", tools=TOOLS, stream=True
    ) as stream:
        events = list(stream)
    for event in events:
        _EVENT.validate_python(event.model_dump(), strict=True)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    last: Any = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == items
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.model_dump() for item in done] == [
        item.model_dump() for item in last.response.output
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text
    assert kinds.count("response.output_item.added") == len(items)


def test_the_stream_helper_reads_a_stream(client: openai.OpenAI, rig: OpenAiRig) -> None:
    rig.sampler.replies = ["So: " + CALL]
    with client.responses.stream(model=SCRIPTED_MODEL, input="hi", tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.done", "response.function_call_arguments.done"} <= kinds
    assert final.output_text == "So: "
    call = final.output[-1]
    assert call.type == "function_call"
    assert call.parsed_arguments == {"a": 1, "b": 2}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_an_answer_is_parsed_as_its_schema(client: openai.OpenAI, is_streamed: bool) -> None:
    options: Any = {
        "model": TINY_MODEL,
        "input": "ok?",
        "text_format": Verdict,
        "max_output_tokens": 200,
        "temperature": 2,
        "extra_body": {"seed": 1},
    }
    if is_streamed:
        with client.responses.stream(**options) as stream:
            parsed = stream.until_done().get_final_response().output_parsed
    else:
        parsed = client.responses.parse(**options).output_parsed
    assert isinstance(parsed, Verdict)


def test_a_forced_call_is_parsed(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "add"}
    (item,) = client.responses.parse(
        model=TINY_MODEL,
        input="1 + 2?",
        tools=TOOLS,
        tool_choice=choice,
        extra_body={"seed": 2},
    ).output
    assert item.type == "function_call"
    assert Addition.model_validate(item.parsed_arguments)


async def test_the_asynchronous_client_reads_both(rig: OpenAiRig) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{rig.url}/v1", api_key=rig.key, max_retries=0
    ) as client:
        answer = await client.responses.create(model=SCRIPTED_MODEL, input="hi")
        assert answer.output_text == "hello"
        async with client.responses.stream(model=SCRIPTED_MODEL, input="hi") as stream:
            assert (await stream.get_final_response()).output_text == "hello"


def test_log_probabilities_are_those_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=SCRIPTED_MODEL,
        input="hi",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    chat = client.chat.completions.create(
        model=SCRIPTED_MODEL,
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=2,
    )
    message: Any = answer.output[0]
    scored: Any = chat.choices[0].logprobs
    assert [one.logprob for one in message.content[0].logprobs] == [
        one.logprob for one in scored.content
    ]
    assert [len(one.top_logprobs) for one in message.content[0].logprobs] == [
        len(one.top_logprobs) for one in scored.content
    ]


def test_a_stream_that_breaks_ends_as_failed(client: openai.OpenAI, rig: OpenAiRig) -> None:
    rig.sampler.failure = FailedPreconditionError("the script ends here")
    rig.sampler.fail_after = 2
    with client.responses.create(model=SCRIPTED_MODEL, input="hi", stream=True) as stream:
        last: Any = list(stream)[-1]
    assert last.type == "response.failed"
    assert last.response.error.code == "server_error"


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        pytest.param({"previous_response_id": "resp_1"}, "previous_response_id", "kept", id="prev"),
        pytest.param({"background": True}, "background", "kept on the server", id="background"),
        pytest.param({"conversation": "conv_1"}, "conversation", "kept", id="conversation"),
        pytest.param({"reasoning": {"effort": "low"}}, "reasoning", "not offered", id="reasoning"),
        pytest.param({"truncation": "auto"}, "truncation", "not offered", id="truncation"),
        pytest.param({"include": ["file_search_call.results"]}, "include", "file", id="include"),
        pytest.param({"tools": [{"type": "web_search"}]}, None, "function", id="tool"),
        pytest.param({"extra_body": {"novel": 1}}, "novel", "not known", id="unknown"),
        pytest.param(
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
            "input.0.type",
            "store: false",
            id="reference",
        ),
        pytest.param({"input": []}, "input", "1 to", id="nothing"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(
    client: openai.OpenAI, options: Any, param: str | None, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        client.responses.create(**{"model": SCRIPTED_MODEL, "input": "hi", **options})
    assert param is None or refused.value.param == param


def test_embeddings_and_kept_responses_are_refused_with_the_reason(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="none of them gives embeddings"):
        client.embeddings.create(model=TINY_MODEL, input="hi")
    with pytest.raises(openai.NotFoundError, match="nothing is kept on the server"):
        client.responses.retrieve("resp_1")


def test_events_have_their_names_and_no_end_mark(rig: OpenAiRig) -> None:
    answer = httpx.post(
        f"{rig.url}/v1/responses",
        json={"model": SCRIPTED_MODEL, "input": "hi", "stream": True},
        headers={"authorization": f"Bearer {rig.key}"},
        timeout=30,
    )
    events = answer.text.strip().split("\n\n")
    for event in events:
        name, data = event.split("\n", 1)
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert events[-1].startswith("event: response.completed")
