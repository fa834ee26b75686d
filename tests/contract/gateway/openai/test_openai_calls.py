"""The OpenAI API: tools, parameters, episodes, wrong bodies, and paths."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fakes.openai_harness import (
    BASE_MODEL,
    EXACT,
    MESSAGES,
    OpenAiRig,
    scripted,
    text_of_stream,
)
from tests.fakes.scripted_sampler import (
    MAX_CONTEXT,
    SCRIPTED_MODEL,
    TURN_END,
    VERSION,
    LeaseLostError,
    logprob_of,
)

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import sampler_pb2
from tinsmith_runtime.errors import (
    FailedPreconditionError,
)

TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
]


CALL = '<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'


# Tools.


@pytest.mark.parametrize("is_streamed", [False, True])
def test_calls_of_tools_are_parsed(
    client: openai.OpenAI, rig: OpenAiRig, is_streamed: bool
) -> None:
    rig.sampler.replies = [f"Let me see.\n{CALL}\n{CALL}"]
    answer = scripted(client, tools=TOOLS, stream=is_streamed)
    if is_streamed:
        chunks = list(answer)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        text = text_of_stream(chunks)
        calls = [one for choice in choices for one in choice.delta.tool_calls or ()]
        assert [call.index for call in calls] == [0, 1]
    else:
        choices = answer.choices
        text, calls = choices[0].message.content, choices[0].message.tool_calls
    assert text == "Let me see."
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("add", '{"a":  1}')
    ] * 2
    assert len({call.id for call in calls}) == 2
    assert choices[-1].finish_reason == "tool_calls"


def test_a_conversation_with_tools_goes_on_token_by_token(
    client: openai.OpenAI, rig: OpenAiRig
) -> None:
    rig.sampler.replies = [f"Well.\n{CALL}"]
    first = scripted(client, tools=TOOLS, extra_body=EXACT)
    message = first.choices[0].message
    again = scripted(
        client,
        messages=[
            *MESSAGES,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"},
        ],
        tools=TOOLS,
        extra_body=EXACT,
    )
    spoken = first.prompt_token_ids + first.choices[0].token_ids
    assert again.prompt_token_ids[: len(spoken)] == spoken


def test_tools_that_are_not_to_be_called_are_not_shown(
    client: openai.OpenAI, rig: OpenAiRig
) -> None:
    rig.sampler.replies = [CALL]
    answer = scripted(client, tools=TOOLS, tool_choice="none", extra_body=EXACT)
    assert answer.choices[0].message.content == CALL
    assert answer.prompt_token_ids == scripted(client, extra_body=EXACT).prompt_token_ids


def test_nothing_is_added_to_a_prompt(client: openai.OpenAI, rig: OpenAiRig) -> None:
    answer = scripted(client, extra_body=EXACT)
    assert rig.sampler.tokenizer.decode(answer.prompt_token_ids) == (
        f"<|im_start|>user\nPig Latin: hello{TURN_END}\n<|im_start|>assistant\n"
    )


# Parameters.


def test_parameters_reach_the_sampler(client: openai.OpenAI, rig: OpenAiRig) -> None:
    scripted(
        client,
        n=3,
        seed=-1,
        temperature=0.5,
        top_p=0.25,
        max_tokens=9,
        stop="x",
        extra_body={"top_k": 7, "ignore_eos": True},
    )
    (request,) = rig.sampler.requests
    params = request.params
    assert (request.num_samples, params.seed, params.temperature) == (3, 2**64 - 1, 0.5)
    assert (params.top_p, params.max_tokens, params.top_k) == (0.25, 9, 7)
    assert list(params.stop_strings) == ["x"]
    assert params.HasField("stop_tokens")
    assert request.weight_updates == sampler_pb2.WEIGHT_UPDATES_PINNED


def test_defaults_are_left_to_the_sampler(client: openai.OpenAI, rig: OpenAiRig) -> None:
    scripted(client)
    scripted(client)
    first, second = (request.params for request in rig.sampler.requests)
    assert [field.name for field, _ in first.ListFields()] == ["seed"]
    assert first.seed != second.seed


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("min_p", 1.5),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"a": 1}),
        ("response_format", {"type": "grammar"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("n", 0),
        ("temperature", -1),
        ("top_p", 0),
        ("top_logprobs", 5),
        ("stop", ""),
        ("max_tokens", 0),
        ("messages", []),
        ("seed", 2**64),
    ],
)
def test_what_is_not_offered_or_wrong_is_refused(
    client: openai.OpenAI, parameter: str, value: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        scripted(client, extra_body={parameter: value})
    assert refused.value.type == "invalid_request_error"
    assert str(refused.value.param).startswith(parameter)


def test_what_changes_nothing_is_taken(client: openai.OpenAI) -> None:
    assert scripted(
        client, presence_penalty=0, logit_bias={}, user="me", response_format={"type": "text"}
    ).choices


def test_a_prompt_may_be_too_long(client: openai.OpenAI) -> None:
    for is_streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(
                model=SCRIPTED_MODEL, prompt=[5] * MAX_CONTEXT, stream=is_streamed
            )
        assert refused.value.code == "context_length_exceeded"


def test_a_key_is_needed(rig: OpenAiRig) -> None:
    with (
        rig.client("tsk_unknown") as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"
    assert refused.value.request_id is not None


# Episodes.


@pytest.fixture
def episode_key(rig: OpenAiRig) -> str:
    return rig.episode_key(rig.sampling_session(base_model=SCRIPTED_MODEL))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("model", ["policy", ""])
def test_calls_of_an_episode_are_recorded_exactly(
    rig: OpenAiRig, episode_key: str, model: str, is_streamed: bool
) -> None:
    rig.sampler.replies = ["one STOP two", "other"]
    rig.coordinator.records.clear()
    with rig.client(episode_key) as agent:
        answer: Any = agent.chat.completions.create(
            model=model,
            messages=MESSAGES,
            n=2,
            seed=9,
            temperature=0.5,
            stop="STOP",
            stream=is_streamed,
            extra_body=EXACT,
        )
        if is_streamed:
            choices = [choice for chunk in answer for choice in chunk.choices]
            prompt = choices[0].prompt_token_ids
        else:
            prompt = answer.prompt_token_ids
    (record,) = rig.coordinator.records
    episode = rig.coordinator.episodes[episode_key]
    assert (record.name, record.api_key) == (episode.name, episode_key)
    assert uuid.UUID(record.request_id)
    assert decode_tensor(record.prompt.chunks[0].tokens).tolist() == prompt
    texts = []
    for sequence in record.sequences:
        tokens = decode_tensor(sequence.tokens).tolist()
        texts.append(rig.sampler.tokenizer.decode(tokens))
        expected = np.asarray([logprob_of(token) for token in tokens], np.float32)
        np.testing.assert_array_equal(decode_tensor(sequence.logprobs), expected)
        assert set(decode_tensor(sequence.versions).tolist()) == {VERSION}
        assert sequence.stop_reason == sequence.STOP_REASON_STOP
    assert texts == ["one STOP", f"other{TURN_END}"]
    assert (record.params.seed, record.params.temperature) == (9, 0.5)
    assert rig.sampler.requests[0].params == record.params


def test_each_prompt_of_an_episode_is_a_call(rig: OpenAiRig, episode_key: str) -> None:
    rig.coordinator.records.clear()
    with rig.client(episode_key) as agent:
        agent.completions.create(model="policy", prompt=["a", "b"])
        list(agent.completions.create(model="policy", prompt=["a", "b"], stream=True))
    assert len({record.request_id for record in rig.coordinator.records}) == 4


def test_the_key_of_an_episode_is_for_its_model_alone(rig: OpenAiRig, episode_key: str) -> None:
    with rig.client(episode_key) as agent:
        assert [model.id for model in agent.models.list()] == ["policy"]
        assert agent.models.retrieve("policy").id == "policy"
        with pytest.raises(openai.NotFoundError, match="'policy'") as refused:
            agent.chat.completions.create(model=SCRIPTED_MODEL, messages=MESSAGES)
        assert refused.value.code == "model_not_found"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_can_not_be_recorded_has_no_good_end(
    rig: OpenAiRig, episode_key: str, is_streamed: bool
) -> None:
    finish_reasons: list[Any] = []

    def lose(*_: Any) -> Any:
        raise LeaseLostError("the lease ran out; claim another episode")

    def reasons(agent: openai.OpenAI) -> Iterator[Any]:
        answer: Any = agent.chat.completions.create(
            model="policy", messages=MESSAGES, stream=is_streamed
        )
        for chunk in answer:
            yield from (choice.finish_reason for choice in chunk.choices)

    with rig.client(episode_key) as agent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.coordinator, "records", type("Lost", (), {"append": lose})())
        with pytest.raises(openai.APIError, match="lease ran out") as refused:
            finish_reasons.extend(reasons(agent))
    assert not any(finish_reasons)
    if not is_streamed:
        assert isinstance(refused.value, openai.BadRequestError)
        assert refused.value.code == "lease_lost"


def test_an_ended_episode_is_refused(rig: OpenAiRig, episode_key: str) -> None:
    ended = FailedPreconditionError("the episode has ended")
    ended.reason = "EPISODE_ENDED"
    rig.coordinator.ended[episode_key] = ended
    with rig.client(episode_key) as agent, pytest.raises(openai.BadRequestError) as refused:
        agent.chat.completions.create(model="policy", messages=MESSAGES)
    assert refused.value.code == "episode_ended"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_long_call_keeps_the_lease(
    rig: OpenAiRig, episode_key: str, is_streamed: bool
) -> None:
    rig.coordinator.lease_s = 1.0
    rig.coordinator.num_renewals = 0
    rig.coordinator.renewed.clear()
    rig.sampler.hold_after = 0
    async with rig.async_client(episode_key) as agent:
        work = asyncio.create_task(
            agent.chat.completions.create(model="policy", messages=MESSAGES, stream=is_streamed)
        )
        await asyncio.to_thread(rig.run, rig.coordinator.renewed.wait())
        assert not work.done()
        if is_streamed:
            work.cancel()
        else:
            # Once the lease is lost the call ends by itself.
            rig.coordinator.ended[episode_key] = LeaseLostError("the lease ran out")
            with pytest.raises(openai.BadRequestError, match="lease ran out"):
                await work
    await asyncio.to_thread(rig.run, rig.sampler.cancelled.wait())


def test_a_repeated_request_is_recorded_under_one_id(rig: OpenAiRig, episode_key: str) -> None:
    rig.coordinator.records.clear()
    with rig.client(episode_key) as agent:
        for key in ("same", "same", "other"):
            agent.chat.completions.create(
                model="policy", messages=MESSAGES, extra_headers={"Idempotency-Key": key}
            )
    first, again, other = rig.coordinator.records
    assert first == again
    assert first.request_id != other.request_id
    assert first.params.seed != other.params.seed


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


_FIELDS = st.sampled_from(
    (
        *("model", "messages", "prompt", "n", "seed", "stop", "max_tokens", "temperature"),
        *("top_p", "top_k", "logprobs", "top_logprobs", "echo", "stream", "stream_options"),
        *("tools", "tool_choice", "response_format", "logit_bias", "chat_template_kwargs"),
        *("continue_final_message", "add_generation_prompt", "best_of", "ignore_eos"),
    )
)


_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "x"])},
    optional={"content": _JSON, "tool_calls": _JSON, "name": _JSON},
)


_BODY = st.dictionaries(_FIELDS, _JSON | st.integers(-2, 20), max_size=5)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_BODY, st.lists(_MESSAGE, max_size=3), st.sampled_from([BASE_MODEL, SCRIPTED_MODEL, "r"]))
def test_no_body_breaks_the_server(
    client: openai.OpenAI, body: dict[str, Any], messages: list[Any], model: str
) -> None:
    raw = client.with_options(default_headers={"content-type": "application/json"})
    for path, fixed in (
        ("/chat/completions", {"model": model, "messages": messages, "max_tokens": 3}),
        ("/completions", {"model": model, "prompt": "ab", "max_tokens": 3}),
    ):
        content = json.dumps({**fixed, **body}).encode()
        answer = raw._client.post(
            f"{raw.base_url}{path.lstrip('/')}",
            content=content,
            headers={"authorization": f"Bearer {client.api_key}"},
        )
        assert answer.status_code < 500, (path, content, answer.text)
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "internal error" not in answer.text


@given(st.binary(max_size=64))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_break_the_server(client: openai.OpenAI, content: bytes) -> None:
    answer = client._client.post(
        f"{client.base_url}chat/completions",
        content=content,
        headers={"authorization": f"Bearer {client.api_key}"},
    )
    assert answer.status_code == 400


def test_errors_name_routes_and_no_methods_of_another_protocol(
    rig: OpenAiRig, client: openai.OpenAI
) -> None:
    for name in ("gpt-4o", "no-such-run@latest"):
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model=name, messages=MESSAGES)
        assert "GET /v1/models lists" in missing.value.message
        assert "GetCapabilities" not in missing.value.message
        assert "ListTrainingRuns" not in missing.value.message
    with (
        rig.client("tsk_abcdef_unknown") as stranger,
        pytest.raises(openai.AuthenticationError, match="key of this server") as refused,
    ):
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        pytest.param("responses/resp_1/cancel", "nothing is kept on the server", id="responses"),
        pytest.param("embeddings", "none of them gives embeddings", id="embeddings"),
        pytest.param("moderations", "served are /v1/models", id="moderations"),
    ],
)
def test_a_path_that_is_not_served_is_an_error_of_this_api(
    client: openai.OpenAI, path: str, says: str
) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.post(f"/{path}", body={"model": "m", "input": "x"}, cast_to=object)
    assert (refused.value.code, refused.value.type) == ("unknown_url", "not_found_error")
    assert says in refused.value.message


def test_a_method_that_is_not_served_names_those_that_are(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.get("/chat/completions", cast_to=object)
    assert refused.value.status_code == 405
    assert refused.value.code == "method_not_allowed"
    assert "POST" in refused.value.response.headers["allow"]


def test_both_spellings_of_health_are_served_without_a_key(rig: OpenAiRig) -> None:
    base = rig.url.removesuffix("/v1")
    for path in ("/health", "/healthz"):
        answer = httpx.get(f"{base}{path}")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    answer = httpx.get(f"{base}/nothing")
    assert answer.status_code == 404
    assert isinstance(answer.json()["error"], str)
