"""The contract of a sampler with vLLM in it: seeds, stops, streams, refusals, crashes."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc
import numpy as np
import pytest

from tests.fakes.sampler_harness import BASE_MODEL, PROMPT, SamplerRig, refusal, tokens_of
from tests.support.wait import eventually
from tinsmith.tensors import decode_tensor, encode_tensor
from tinsmith.v1 import sampler_pb2, trajectories_pb2
from tinsmith_engine import LoraConfig
from tinsmith_sampler.vllm.engine import VllmEngine
from tinsmith_sampler.vllm.source import VllmEngines

pytestmark = pytest.mark.asyncio(loop_scope="session")

STOP = trajectories_pb2.SampledSequence.STOP_REASON_STOP
RUN = "projects/p/trainingRuns/live"
TARGETS = encode_tensor(np.zeros((len(PROMPT) - 1, 1), dtype=np.int64))


@pytest.fixture
def engine(vllm: VllmEngines) -> VllmEngine:
    return vllm.started[BASE_MODEL]


async def test_capabilities_name_the_engine_and_what_it_refuses(rig: SamplerRig) -> None:
    request = sampler_pb2.SamplerServiceGetCapabilitiesRequest()
    capabilities = await rig.call("GetCapabilities", request)
    assert (capabilities.engine, capabilities.engine_version[:2]) == ("vllm", "0.")
    assert {"weight_updates", "target_prompt_tokens", "num_prompt_alternatives", "images"} <= set(
        capabilities.refused_fields
    )
    fingerprint = capabilities.models[0].numerics_fingerprint
    assert f"engine=vllm version={capabilities.engine_version}" in fingerprint


async def test_a_seed_repeats_another_differs_and_samples_differ(rig: SamplerRig) -> None:
    session = rig.session()
    first = await rig.sample(session, num_samples=3)
    again = await rig.sample(session, num_samples=3)
    other = await rig.sample(session, num_samples=3, seed=2)
    assert tokens_of(first) == tokens_of(again)
    assert tokens_of(first) != tokens_of(other)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 3


async def test_a_stop_token_ends_a_completion_of_which_it_is_the_last(rig: SamplerRig) -> None:
    session = rig.session()
    [tokens] = tokens_of(await rig.sample(session))
    response = await rig.sample(session, stop=[tokens[3]])
    assert tokens_of(response) == [tokens[: tokens.index(tokens[3]) + 1]]
    assert response.sequences[0].stop_reason == STOP


async def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(
    rig: SamplerRig,
) -> None:
    session = rig.session()
    response = await rig.sample(session, max_tokens=200, stop_strings=["a", "e", "i"])
    [tokens] = tokens_of(response)
    [whole] = tokens_of(await rig.sample(session, max_tokens=200))
    assert response.sequences[0].stop_reason == STOP
    assert tokens == whole[: len(tokens)]
    assert len(tokens) < 200


async def test_a_stream_brings_the_tokens_of_the_whole_answer(rig: SamplerRig) -> None:
    session = rig.session()
    whole = tokens_of(await rig.sample(session, num_samples=3, max_tokens=20))
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    num_messages = 0
    async for message in rig.stream(session, num_samples=3, max_tokens=20):
        assert message.token_index == len(found[message.sample_index])
        found[message.sample_index] += decode_tensor(message.piece.tokens).tolist()
        num_messages += 1
    assert [found[index] for index in range(3)] == whole
    assert num_messages > 3


async def test_likeliest_tokens_and_scores_of_the_end_of_a_prompt(rig: SamplerRig) -> None:
    response = await rig.sample(
        rig.session(),
        temperature=0.0,
        prompt_logprobs=True,
        topk_prompt_logprobs=3,
        extras={"topk_sample_logprobs": 2, "prompt_logprobs_last_n": 2},
    )
    sequence = response.sequences[0]
    likeliest = decode_tensor(sequence.topk_logprobs.token_ids)
    assert likeliest[:, 0].tolist() == tokens_of(response)[0]
    scored = decode_tensor(response.prompt_logprobs)
    assert np.isnan(scored).tolist() == [True, True, False, False]
    assert decode_tensor(response.topk_prompt_logprobs.token_ids).shape == (len(PROMPT), 3)


async def test_a_prompt_is_scored_without_a_token(rig: SamplerRig) -> None:
    scores = await rig.logprobs(rig.session())
    response = await rig.sample(rig.session(), prompt_logprobs=True)
    expected = decode_tensor(response.prompt_logprobs).tolist()
    assert scores[1:] == pytest.approx(expected[1:], abs=1e-5)


@pytest.mark.parametrize(
    ("extras", "field"),
    [
        pytest.param(
            {"weight_updates": sampler_pb2.WEIGHT_UPDATES_IN_FLIGHT}, "weight_updates", id="flight"
        ),
        pytest.param({"target_prompt_tokens": TARGETS}, "target_prompt_tokens", id="targets"),
        pytest.param({"num_prompt_alternatives": 2}, "num_prompt_alternatives", id="alternatives"),
    ],
)
async def test_what_vllm_cannot_do_is_refused_by_name_before_weights_are_looked_for(
    rig: SamplerRig, extras: dict[str, Any], field: str
) -> None:
    await rig.export("live", seed=1, version=1)
    error = await refusal(rig.sample(rig.session(run=RUN), extras=extras))
    assert (error.code.name, error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert field in error.message
    assert "engine vllm" in error.message
    assert rig.trainer.num_exports == 0


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LoraConfig(rank=32, seed=1), id="rank"),
        pytest.param(LoraConfig(rank=4, seed=1, train_unembedding=True), id="unembedding"),
    ],
)
async def test_an_adapter_that_vllm_cannot_take_is_refused(
    rig: SamplerRig, config: LoraConfig
) -> None:
    checkpoint = await rig.saved("refused", config, await rig.random_adapter(config))
    error = await refusal(rig.sample(rig.session(checkpoint=checkpoint)))
    assert error.reason == "CHECKPOINT_INCOMPATIBLE"
    assert "engine vllm" in error.message


async def test_a_reader_that_goes_away_ends_its_request(
    rig: SamplerRig, engine: VllmEngine
) -> None:
    stream = rig.stream(rig.session(), num_samples=8, max_tokens=1000)
    await anext(aiter(stream))
    stream.cancel()
    await eventually(lambda: engine.statistics().num_requests == 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stalled"])
async def test_a_process_that_ends_or_stalls_is_started_again_with_its_adapters(
    rig: SamplerRig, engine: VllmEngine, number: signal.Signals
) -> None:
    session = rig.session(checkpoint=await rig.checkpoint("kept", seed=1))
    before = tokens_of(await rig.sample(session))
    num_restarts = engine.statistics().num_restarts
    # As patient as the sampler is with an engine that makes no progress.
    stream = rig.stream(session, num_samples=8, max_tokens=1000, timeout_s=300)
    await anext(aiter(stream))
    os.kill(engine.pid, number)
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        async for _ in stream:
            pass
    assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
    await eventually(lambda: engine.statistics().num_restarts > num_restarts, timeout_s=300)
    after, of_base = await asyncio.gather(rig.sample(session), rig.sample(rig.session()))
    assert tokens_of(after) == before
    assert tokens_of(of_base) != before
    assert engine.statistics().num_requests == 0
