"""The unmodified `openai` package against a gateway, real pods, and pods that follow a script."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from tests.fakes.openai_harness import (
    ALIAS,
    BASE_MODEL,
    EXACT,
    MESSAGES,
    TIMEOUT_S,
    OpenAiRig,
    scripted,
    text_of_stream,
)
from tests.fakes.scheduler import bearer
from tests.fakes.scripted_sampler import (
    SCRIPTED_MODEL,
    logprob_of,
)
from transformers import PreTrainedTokenizerFast

import tinsmith
from tinsmith.tensors import decode_tensor, encode_tokens
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc, scheduler_pb2
from tinsmith_gateway.openai.text.completion_text import Answer
from tinsmith_runtime.errors import (
    FailedPreconditionError,
    QueueFullError,
    SamplingSessionNotFoundError,
    WorkerUnavailableError,
)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(tiny_model)


def native_sample(
    rig: OpenAiRig, tokens: list[int], *, num_samples: int = 1, max_tokens: int = 8, **params: Any
) -> sampler_pb2.SampleResponse:
    """Sample from the base model by the native API."""
    session = rig.sampling_session(base_model=BASE_MODEL)
    with rig.scheduler() as (stub, metadata):
        found = stub.GetSamplingSession(
            scheduler_pb2.GetSamplingSessionRequest(name=session),
            metadata=metadata,
            timeout=TIMEOUT_S,
        )
    request = sampler_pb2.SampleRequest(
        sampling_session=session, num_samples=num_samples, prompt_logprobs=True
    )
    request.prompt.chunks.add(tokens=encode_tokens(tokens))
    request.params.max_tokens = max_tokens
    for name, value in params.items():
        setattr(request.params, name, value)
    with grpc.insecure_channel(found.sampler_addresses[0]) as channel:
        sampler: Any = sampler_pb2_grpc.SamplerServiceStub(channel)
        answer: sampler_pb2.SampleResponse = sampler.Sample(
            request, metadata=bearer(rig.key), timeout=TIMEOUT_S
        )
        return answer


def tokens_of(response: sampler_pb2.SampleResponse) -> list[list[int]]:
    return [decode_tensor(sequence.tokens).tolist() for sequence in response.sequences]


# Completions are what the native sampler draws.


def test_a_chat_completion_is_the_template_and_the_sampler(
    rig: OpenAiRig, client: openai.OpenAI, reference: Any
) -> None:
    prompt = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    native = native_sample(rig, prompt, num_samples=2, seed=5, temperature=0.75)
    answer: Any = client.chat.completions.create(
        model=BASE_MODEL,
        messages=MESSAGES,
        n=2,
        seed=5,
        temperature=0.75,
        max_tokens=8,
        logprobs=True,
        extra_body=EXACT,
    )
    assert answer.prompt_token_ids == prompt
    assert [choice.token_ids for choice in answer.choices] == tokens_of(native)
    for choice, sequence in zip(answer.choices, native.sequences, strict=True):
        text = reference.decode(decode_tensor(sequence.tokens).tolist(), skip_special_tokens=True)
        assert choice.message.content == text
        scores = [entry.logprob for entry in choice.logprobs.content]
        np.testing.assert_array_equal(
            np.asarray(scores, np.float32), decode_tensor(sequence.logprobs)
        )
        assert choice.versions == [0] * len(choice.token_ids)
    num_sampled = sum(len(tokens) for tokens in tokens_of(native))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(prompt),
        num_sampled,
    )
    assert answer.usage.total_tokens == len(prompt) + num_sampled


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "tokens"])
def test_a_completion_continues_text_or_tokens(
    rig: OpenAiRig, client: openai.OpenAI, reference: Any, is_text: bool
) -> None:
    prompt = reference.encode("hello there")
    native = native_sample(rig, prompt, seed=3)
    answer: Any = client.completions.create(
        model=BASE_MODEL,
        prompt="hello there" if is_text else prompt,
        seed=3,
        max_tokens=8,
        echo=True,
        logprobs=0,
        extra_body=EXACT,
    )
    (choice,) = answer.choices
    (tokens,) = tokens_of(native)
    assert choice.prompt_token_ids == prompt
    assert choice.token_ids == tokens
    assert choice.text == "hello there" + reference.decode(tokens, skip_special_tokens=True)
    assert choice.logprobs.token_logprobs[0] is None
    expected = [
        *decode_tensor(native.prompt_logprobs)[1:],
        *decode_tensor(native.sequences[0].logprobs),
    ]
    np.testing.assert_array_equal(
        np.asarray(choice.logprobs.token_logprobs[1:], np.float32), expected
    )
    assert choice.logprobs.tokens[: len(prompt)] == [reference.decode([one]) for one in prompt]
    assert choice.logprobs.text_offset[0] == 0


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_whole_answers_are_not_written_on_the_event_loop(
    client: openai.OpenAI, rig: OpenAiRig, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A hundred samples with the alternatives of each token take seconds."""
    threads: list[str] = []

    def note(answer: Answer, piece: Any, push: Any = Answer.push) -> Any:
        threads.append(threading.current_thread().name)
        return push(answer, piece)

    monkeypatch.setattr(Answer, "push", note)
    if kind == "chat":
        client.chat.completions.create(model=BASE_MODEL, messages=MESSAGES, n=2, max_tokens=4)
    else:
        client.completions.create(model=BASE_MODEL, prompt=["a", "b"], max_tokens=4)
    assert len(threads) == 2
    assert "openai-rig" not in threads


def test_several_prompts_are_completed_as_each_alone(client: openai.OpenAI) -> None:
    def texts(prompt: Any, **options: Any) -> list[str]:
        answer = client.completions.create(
            model=BASE_MODEL, prompt=prompt, seed=1, max_tokens=4, **options
        )
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    assert texts(["a", "bc"], n=2) == texts("a", n=2) + texts("bc", n=2)
    assert texts([[5, 6], [7]]) == texts([5, 6]) + texts([7])


def test_a_prompt_alone_is_scored(rig: OpenAiRig, client: openai.OpenAI, reference: Any) -> None:
    answer = client.completions.create(
        model=BASE_MODEL, prompt="hello there", echo=True, logprobs=0, max_tokens=0
    )
    native = native_sample(rig, reference.encode("hello there"))
    assert answer.choices[0].text == "hello there"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    scores: Any = logprobs.token_logprobs
    np.testing.assert_array_equal(
        np.asarray(scores[1:], np.float32), decode_tensor(native.prompt_logprobs)[1:]
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


# What `model` may name.


def test_models_are_listed_and_found(rig: OpenAiRig, client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert {BASE_MODEL, SCRIPTED_MODEL, ALIAS} <= set(listed)
    assert client.models.retrieve(ALIAS).id == ALIAS
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("absent/model")
    assert refused.value.code == "model_not_found"


def test_runs_and_checkpoints_are_models(rig: OpenAiRig, client: openai.OpenAI) -> None:
    with tinsmith.Client(rig.pods.address, rig.key) as native:
        run = native.create_lora_training_run(BASE_MODEL, rank=4)
        datum = tinsmith.Datum(
            tinsmith.ModelInput.from_ints([5, 6, 7]),
            {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
        )
        run.forward_backward([datum])
        run.optim_step(tinsmith.AdamParams(learning_rate=0.1)).result()
        checkpoint = run.save_state("c").result().name
        run.save_weights_for_sampler("w").result()
        run_id = run.name.rpartition("/")[2]
        listed = {model.id for model in client.models.list()}
        assert {f"{run_id}@latest", f"{run_id}/c"} <= listed
        texts = set()
        for model in (
            run_id,
            f"{run_id}@latest",
            run.name,
            checkpoint,
            f"{run_id}/c",
            f"tinker://{run_id}/weights/c",
            f"tinker://{run_id}/sampler_weights/w",
        ):
            assert client.models.retrieve(model).id == model
            answer: Any = client.chat.completions.create(
                model=model, messages=MESSAGES, seed=1, max_tokens=6, extra_body=EXACT
            )
            assert answer.model == model
            assert set(answer.choices[0].versions) == {1}
            texts.add(tuple(answer.choices[0].token_ids))
        assert len(texts) == 1


@pytest.mark.parametrize(
    "model",
    ["absent", "absent@latest", "tinker://r/weights/c", "projects/p/trainingRuns/r", "", "  "],
)
def test_an_unknown_model_is_not_found(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model=model, messages=MESSAGES)
    assert refused.value.code == "model_not_found"


# Streams.


def test_a_stream_says_what_the_whole_says(client: openai.OpenAI, rig: OpenAiRig) -> None:
    rig.sampler.replies = ["naïve 日本 👩‍👩‍👧", "second"]
    whole = scripted(client, n=2, logprobs=True, top_logprobs=2, extra_body=EXACT)
    chunks = list(
        scripted(
            client,
            n=2,
            logprobs=True,
            top_logprobs=2,
            extra_body=EXACT,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for index, choice in enumerate(whole.choices):
        parts = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert text_of_stream(chunks, index) == choice.message.content == rig.sampler.replies[index]
        assert parts[0].delta.role == "assistant"
        assert [one for part in parts for one in getattr(part, "token_ids", [])] == choice.token_ids
        scores = [one for part in parts if part.logprobs for one in part.logprobs.content]
        assert scores == choice.logprobs.content
        assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
        # No chunk is for nothing: without text it brings the scores of what is held back.
        assert all(part.delta.content or part.logprobs for part in parts[1:-1])
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 2
    # Samples come beside each other: the second begins before the first has ended.
    order = [choice.index for chunk in chunks for choice in chunk.choices]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)
    entry = whole.choices[0].logprobs.content[2]
    assert entry.logprob == pytest.approx(logprob_of(whole.choices[0].token_ids[2]))
    assert (entry.token, entry.bytes) == ("bytes:\\xc3", [0xC3])
    assert [other.token for other in entry.top_logprobs] == ["bytes:\\xc3", "<|endoftext|>"]


def test_scores_of_text_that_is_held_back_are_streamed(
    client: openai.OpenAI, rig: OpenAiRig
) -> None:
    rig.sampler.replies = ["日本"]
    whole = scripted(client, logprobs=True).choices[0].logprobs.content
    parts = [one for chunk in scripted(client, logprobs=True, stream=True) for one in chunk.choices]
    assert [score for part in parts if part.logprobs for score in part.logprobs.content] == whole


def test_the_real_sampler_streams_what_it_draws(client: openai.OpenAI) -> None:
    options: Any = {
        "model": BASE_MODEL,
        "messages": MESSAGES,
        "n": 2,
        "seed": 11,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 3,
        "extra_body": EXACT,
    }
    whole: Any = client.chat.completions.create(**options)
    chunks: list[Any] = list(client.chat.completions.create(**options, stream=True))
    for index, choice in enumerate(whole.choices):
        parts = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert text_of_stream(chunks, index) == choice.message.content
        assert [one for part in parts for one in getattr(part, "token_ids", [])] == choice.token_ids
        entries = [one for part in parts if part.logprobs for one in part.logprobs.content]
        assert entries == choice.logprobs.content
        assert {len(entry.top_logprobs) for entry in entries} == {3}


def test_a_stream_has_events_and_an_end(rig: OpenAiRig) -> None:
    body = {"model": SCRIPTED_MODEL, "messages": MESSAGES, "stream": True}
    with httpx.Client(base_url=rig.url, headers={"authorization": f"Bearer {rig.key}"}) as raw:
        answer = raw.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"].startswith("req_")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_strings_are_cut_and_the_tokens_stay(
    client: openai.OpenAI, rig: OpenAiRig, is_streamed: bool
) -> None:
    rig.sampler.replies = ["one two STOP three"]
    options: Any = {"stop": ["STOP", "never"], "extra_body": EXACT, "stream": is_streamed}
    answer = scripted(client, **options)
    if is_streamed:
        chunks = list(answer)
        text = text_of_stream(chunks)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert not any("S" in (choice.delta.content or "") for choice in choices)
        tokens = [token for choice in choices for token in getattr(choice, "token_ids", [])]
    else:
        choices = answer.choices
        text, tokens = choices[0].message.content, choices[0].token_ids
    assert text == "one two "
    assert rig.sampler.tokenizer.decode(tokens) == "one two STOP"
    assert choices[-1].finish_reason == "stop"


def test_the_length_ends_a_sample(client: openai.OpenAI) -> None:
    answer = scripted(client, max_completion_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hel", "length")


def test_streamed_completions_of_several_prompts(client: openai.OpenAI, rig: OpenAiRig) -> None:
    rig.sampler.replies = ["ab", "日"]
    chunks = list(
        client.completions.create(
            model=SCRIPTED_MODEL,
            prompt=["x", "yy"],
            n=2,
            logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == ["ab", "日", "ab", "日"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 3


async def test_async_clients_stream_beside_each_other(rig: OpenAiRig) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream: Any = await client.chat.completions.create(
            model=SCRIPTED_MODEL, messages=MESSAGES, stream=True
        )
        return text_of_stream([chunk async for chunk in stream])

    async with rig.async_client() as client:
        assert await asyncio.gather(*(one(client) for _ in range(8))) == ["hello"] * 8


# Streams that break off.


def test_a_stream_is_taken_up_where_it_was(client: openai.OpenAI, rig: OpenAiRig) -> None:
    rig.sampler.failure, rig.sampler.fail_after = WorkerUnavailableError("gone"), 3
    assert text_of_stream(scripted(client, n=2, stream=True)) == "hello"
    first, second = rig.sampler.streams
    assert list(second.received_tokens) == [2, 1]
    assert first.request == second.request


def test_an_error_before_the_first_token_has_a_status(
    client: openai.OpenAI, rig: OpenAiRig
) -> None:
    rig.sampler.failure = QueueFullError("too many wait", retry_after_s=2.0)
    with pytest.raises(openai.RateLimitError) as refused:
        scripted(client, stream=True)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after"] == "2"


def test_an_error_in_the_middle_is_an_event(client: openai.OpenAI, rig: OpenAiRig) -> None:
    rig.sampler.failure, rig.sampler.fail_after = FailedPreconditionError("no more"), 3
    with pytest.raises(openai.APIError, match="no more"):
        list(scripted(client, stream=True))


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_ends_the_work(rig: OpenAiRig, is_streamed: bool) -> None:
    rig.sampler.hold_after = 2 if is_streamed else 0
    async with rig.async_client() as client:
        if is_streamed:
            stream: Any = await client.chat.completions.create(
                model=SCRIPTED_MODEL, messages=MESSAGES, stream=True
            )
            await anext(stream)
            await stream.close()
        else:
            work = asyncio.create_task(
                client.chat.completions.create(model=SCRIPTED_MODEL, messages=MESSAGES)
            )
            await asyncio.to_thread(rig.run, rig.sampler.held.wait())
            work.cancel()
    await asyncio.to_thread(rig.run, rig.sampler.cancelled.wait())


def test_a_session_that_is_gone_is_made_anew(client: openai.OpenAI, rig: OpenAiRig) -> None:
    scripted(client)
    for is_streamed in (False, True):
        rig.sampler.failure = SamplingSessionNotFoundError("gone")
        answer = scripted(client, stream=is_streamed)
        text = text_of_stream(answer) if is_streamed else answer.choices[0].message.content
        assert text == "hello"


def test_a_finished_session_is_made_anew(client: openai.OpenAI, rig: OpenAiRig) -> None:
    # The sampler does not know that the session has ended; a new model needs it.
    scripted(client)
    with rig.scheduler() as (stub, metadata):
        listed = stub.ListSessions(
            scheduler_pb2.ListSessionsRequest(parent="projects/default"),
            metadata=metadata,
            timeout=TIMEOUT_S,
        )
        for session in listed.sessions:
            stub.FinishSession(
                scheduler_pb2.FinishSessionRequest(session=session.name),
                metadata=metadata,
                timeout=TIMEOUT_S,
            )
    assert client.chat.completions.create(model=ALIAS, messages=MESSAGES, max_tokens=2).choices
    assert client.chat.completions.create(model=BASE_MODEL, messages=MESSAGES, max_tokens=2).choices
