"""Streams of tokens: what they hold, how they resume and end, and readers that are slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from tests.fakes.sampler_harness import (
    PROMPT,
    SamplerRig,
    as_floats,
    code_of,
    make_request,
    refusal,
    running_sampler,
    tokens_of,
)
from tests.support.metrics import metric
from tests.support.wait import eventually

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import sampler_pb2, trajectories_pb2
from tinsmith_engine import Sampler
from tinsmith_engine.host import EngineHost

pytestmark = pytest.mark.asyncio(loop_scope="module")

Message = sampler_pb2.StreamSampleResponse
UNSPECIFIED = trajectories_pb2.SampledSequence.STOP_REASON_UNSPECIFIED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[SamplerRig]:
    async with running_sampler(tmp_path_factory.mktemp("sampler"), engine_host) as rig:
        yield rig


def open_streams() -> float:
    return metric("tinsmith_sampler_open_streams")


@pytest.fixture
def samplers(monkeypatch: pytest.MonkeyPatch) -> list[Sampler]:
    """The engine's samplers that stepped during a test."""
    found: list[Sampler] = []
    step = Sampler.step

    def noted(sampler: Sampler) -> Any:
        if sampler not in found:
            found.append(sampler)
        return step(sampler)

    monkeypatch.setattr(Sampler, "step", noted)
    return found


def num_active(samplers: list[Sampler]) -> int:
    return sum(sampler.num_active for sampler in samplers)


async def all_of(call: Any) -> list[Message]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


def joined(messages: list[Message], num_samples: int, received: tuple[int, ...] = ()) -> list[Any]:
    """Put a stream together, and check that each message goes on where the last one ended."""
    tokens: list[list[int]] = [[] for _ in range(num_samples)]
    logprobs: list[list[float]] = [[] for _ in range(num_samples)]
    reasons = [UNSPECIFIED] * num_samples
    starts = received or (0,) * num_samples
    for message in messages:
        index, piece = message.sample_index, message.piece
        assert reasons[index] == UNSPECIFIED, "a sample went on after its end"
        drawn = decode_tensor(piece.tokens).tolist()
        if drawn:
            assert message.token_index == starts[index] + len(tokens[index])
        assert len(drawn) == len(decode_tensor(piece.versions))
        tokens[index] += drawn
        logprobs[index] += decode_tensor(piece.logprobs).tolist()
        reasons[index] = piece.stop_reason
    return [tokens, logprobs, reasons]


def whole(response: sampler_pb2.SampleResponse) -> list[Any]:
    return [
        tokens_of(response),
        [decode_tensor(sequence.logprobs).tolist() for sequence in response.sequences],
        [sequence.stop_reason for sequence in response.sequences],
    ]


async def test_a_stream_holds_what_sample_returns(rig: SamplerRig) -> None:
    session = rig.session(checkpoint=await rig.checkpoint("a", seed=3))
    stop = tokens_of(await rig.sample(session, num_samples=5, max_tokens=40))[2][7]
    options: dict[str, Any] = {"num_samples": 5, "max_tokens": 40, "stop": [stop]}
    wanted = await rig.sample(session, **options)
    messages = await all_of(rig.stream(session, **options))
    assert joined(messages, 5) == whole(wanted)
    assert len({message.sample_index for message in messages}) == 5
    # In pieces, not in one.
    assert len(messages) > 5
    assert messages[0].HasField("prompt")
    assert not any(message.HasField("prompt") for message in messages[1:])


async def test_the_first_message_tells_of_the_prompt(rig: SamplerRig) -> None:
    run = await rig.export("streamed", seed=2, version=6)
    session = rig.session(run=run)
    options: dict[str, Any] = {
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "extras": {"num_prompt_alternatives": 3, "topk_sample_logprobs": 4},
    }
    wanted = await rig.sample(session, **options)
    messages = await all_of(rig.stream(session, **options))
    topk = [decode_tensor(message.piece.topk_logprobs.token_ids) for message in messages]
    np.testing.assert_array_equal(
        np.concatenate(topk), decode_tensor(wanted.sequences[0].topk_logprobs.token_ids)
    )
    del wanted.sequences[:]
    assert messages[0].prompt == wanted
    assert (wanted.seed, wanted.version) == (1, 6)


async def test_a_seed_that_was_drawn_begins_the_stream_again(rig: SamplerRig) -> None:
    session = rig.session()
    request = sampler_pb2.StreamSampleRequest(
        sampling_session=session, request=make_request(session)
    )
    request.request.params.ClearField("seed")
    first = await all_of(rig.call("StreamSample", request))
    seed = first[0].prompt.seed
    assert joined(await all_of(rig.stream(session, seed=seed)), 1) == joined(first, 1)


@pytest.mark.parametrize("received", [(0, 0), (3, 0), (2, 7), (8, 8), (8, 1), (30, 0)], ids=str)
async def test_what_was_received_is_left_out(rig: SamplerRig, received: tuple[int, int]) -> None:
    session = rig.session()
    tokens, logprobs, reasons = whole(await rig.sample(session, num_samples=2))
    messages = await all_of(rig.stream(session, num_samples=2, received=received))
    assert joined(messages, 2, received) == [
        [one[count:] for one, count in zip(tokens, received, strict=True)],
        [one[count:] for one, count in zip(logprobs, received, strict=True)],
        reasons,
    ]
    # Even a sample that was received whole is told of, once: why it ended.
    assert {message.sample_index for message in messages} == {0, 1}
    assert messages[0].HasField("prompt")


async def test_more_samples_than_rows_are_streamed(tmp_path: Path, engine_host: EngineHost) -> None:
    async with running_sampler(tmp_path, engine_host, max_concurrent_sequences=3) as narrow:
        session = narrow.session()
        wanted = await narrow.sample(session, num_samples=10)
        messages = await all_of(narrow.stream(session, num_samples=10))
    assert joined(messages, 10) == whole(wanted)


async def test_streams_among_others_give_the_tokens_of_each_alone(rig: SamplerRig) -> None:
    session = rig.session(checkpoint=await rig.checkpoint("b", seed=5))
    alone = [whole(await rig.sample(session, num_samples=2, seed=seed)) for seed in range(6)]
    streams = [all_of(rig.stream(session, num_samples=2, seed=seed)) for seed in range(6)]
    found = await asyncio.gather(*streams, *(rig.sample(session, seed=9) for _ in range(4)))
    assert [joined(messages, 2) for messages in found[:6]] == alone


async def test_tokens_arrive_while_the_rest_is_drawn(
    rig: SamplerRig, samplers: list[Sampler]
) -> None:
    call = rig.stream(rig.session(), max_tokens=4000)
    first = await call.read()
    assert first.token_index == 0
    with rig.engine_held():
        # The engine waits in the middle of the sample.
        assert num_active(samplers) == 1
    call.cancel()
    await eventually(lambda: open_streams() == 0)


@pytest.mark.parametrize("is_reading", [True, False], ids=["reading", "not-reading"])
async def test_cancel_frees_the_rows_of_a_stream(
    tmp_path: Path, engine_host: EngineHost, samplers: list[Sampler], is_reading: bool
) -> None:
    async with running_sampler(tmp_path, engine_host, max_concurrent_sequences=3) as rig:
        session = rig.session(checkpoint=await rig.checkpoint("a"))
        # Messages of over 1 KiB: more than the windows of a channel hold without a reader.
        call = rig.stream(
            session, num_samples=3, max_tokens=4000, extras={"topk_sample_logprobs": 64}
        )
        await call.read()
        reading = asyncio.ensure_future(call.read()) if is_reading else None
        await eventually(lambda: num_active(samplers) == 3)
        call.cancel()
        await eventually(lambda: num_active(samplers) == 0)
        assert open_streams() == 0
        assert await rig.num_active() == 0
        if reading is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await reading
        assert len(tokens_of(await rig.sample(session, num_samples=3))) == 3


async def test_cancel_of_sample_frees_the_rows(
    tmp_path: Path, engine_host: EngineHost, samplers: list[Sampler]
) -> None:
    async with running_sampler(tmp_path, engine_host) as rig:
        call = rig.sample(rig.session(), num_samples=4, max_tokens=4000)
        sampling = asyncio.ensure_future(call)
        await eventually(lambda: num_active(samplers) == 4)
        sampling.cancel()
        await eventually(lambda: num_active(samplers) == 0)


async def test_a_slow_reader_holds_up_nobody(rig: SamplerRig, samplers: list[Sampler]) -> None:
    session = rig.session()
    options: dict[str, Any] = {"num_samples": 2, "max_tokens": 600}
    extras = {"topk_sample_logprobs": 64}
    wanted = await rig.sample(session, **options)
    call = rig.stream(session, **options, extras=extras)
    first = await call.read()
    # It reads no more until the engine is done, with more than the channel's windows hold.
    await eventually(lambda: num_active(samplers) == 0)
    assert tokens_of(await rig.sample(session))
    messages = [first, *await all_of(call)]
    assert joined(messages, 2)[0] == tokens_of(wanted)
    # What it did not take in time came together.
    assert len(messages) < 2 * 600


async def test_a_stream_of_weights_that_are_not_finite_ends_typed(
    rig: SamplerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = rig.session()
    take, num_taken = Sampler._take, 0

    def failing(sampler: Any, row: Any, sampled: Any) -> Any:
        nonlocal num_taken
        num_taken += 1
        if num_taken == 4:
            sampled = sampled._replace(logprob=float("nan"))
        return take(sampler, row, sampled)

    monkeypatch.setattr(Sampler, "_take", failing)
    error = await refusal(all_of(rig.stream(session)))
    assert error.reason == "NON_FINITE_LOSS"
    assert tokens_of(await rig.sample(session))


async def test_a_failure_of_the_engine_ends_a_stream(
    rig: SamplerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = rig.session()
    alone = whole(await rig.sample(session))
    call = rig.stream(session, max_tokens=4000)
    await call.read()

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(Sampler, "_take", broken)
        error = await refusal(all_of(call))
    assert (code_of(error), error.reason) == ("INTERNAL", "INTERNAL")
    assert whole(await rig.sample(session)) == alone


# What else a request may ask for.


async def test_targets_alternatives_and_topk_of_samples(rig: SamplerRig) -> None:
    from tinsmith.tensors import encode_tensor

    session = rig.session(checkpoint=await rig.checkpoint("c", seed=6))
    targets = np.array([[6, -1], [7, 3], [-1, 8]], dtype=np.int64)
    drawn = await rig.sample(
        session,
        num_samples=2,
        prompt_logprobs=True,
        extras={
            "target_prompt_tokens": encode_tensor(targets),
            "num_prompt_alternatives": 5,
            "topk_sample_logprobs": 64,
        },
    )
    scores = as_floats(drawn.prompt_logprobs)
    found = as_floats(drawn.target_prompt_logprobs)
    assert found.shape == (3, 2)
    assert (found[0, 0], found[1, 0], found[2, 1]) == (scores[1], scores[2], scores[3])
    assert (found[0, 1], found[2, 0]) == (0, 0)
    alternatives = decode_tensor(drawn.prompt_alternatives.tokens)
    assert (alternatives.dtype, alternatives.shape) == (np.dtype(np.int64), (3, 5))
    assert as_floats(drawn.prompt_alternatives.logprobs).shape == (3, 5)
    for sequence in drawn.sequences:
        ids = decode_tensor(sequence.topk_logprobs.token_ids)
        values = as_floats(sequence.topk_logprobs.logprobs)
        assert ids.shape == values.shape == (8, 64)
        for token, logprob, row, row_values in zip(
            decode_tensor(sequence.tokens), as_floats(sequence.logprobs), ids, values, strict=True
        ):
            place = np.flatnonzero(row == token)
            assert not place.size or row_values[place[0]] == logprob
    plain = await rig.sample(session, num_samples=2)
    assert tokens_of(plain) == tokens_of(drawn)
    for name in ("target_prompt_logprobs", "prompt_alternatives", "prompt_logprobs"):
        assert not plain.HasField(name)
    assert not plain.sequences[0].HasField("topk_logprobs")


async def test_the_last_prompt_logprobs(rig: SamplerRig) -> None:
    session = rig.session()
    every = await rig.sample(session, prompt_logprobs=True, topk_prompt_logprobs=2)
    last = await rig.sample(
        session,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        extras={"prompt_logprobs_last_n": 2},
    )
    found = as_floats(last.prompt_logprobs)
    assert np.isnan(found[:2]).all()
    np.testing.assert_array_equal(found[2:], as_floats(every.prompt_logprobs)[2:])
    ids = decode_tensor(last.topk_prompt_logprobs.token_ids)
    assert ids[:2].tolist() == [[-1, -1]] * 2
    np.testing.assert_array_equal(ids[2:], decode_tensor(every.topk_prompt_logprobs.token_ids)[2:])


async def test_a_known_prompt_is_told_of(rig: SamplerRig) -> None:
    session = rig.session(checkpoint=await rig.checkpoint("d", seed=7))
    prompt = [*PROMPT, 50, 51]
    first, again = [await rig.sample(session, prompt, num_samples=2) for _ in range(2)]
    assert (first.num_cached_prompt_tokens, again.num_cached_prompt_tokens) == (0, 6)
    assert whole(first) == whole(again)
    (message, *_) = await all_of(rig.stream(session, prompt))
    assert message.prompt.num_cached_prompt_tokens == 6
