"""What a sampler promises: seeds, stops, scores, versions, limits, and isolation of requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.fakes.sampler_harness import (
    BASE_MODEL,
    PROMPT,
    SamplerRig,
    as_floats,
    code_of,
    make_request,
    refusal,
    running_sampler,
    tokens_of,
    versions_of,
)
from tests.support.metrics import metric
from tests.support.wait import eventually

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import checkpoint_pb2, sampler_pb2, trajectories_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.rpc.auth import ApiKey
from tinsmith_trainer.execution.snapshot_format import OPTIMIZER_FILE

pytestmark = pytest.mark.asyncio(loop_scope="module")

STOP = trajectories_pb2.SampledSequence.STOP_REASON_STOP
LENGTH = trajectories_pb2.SampledSequence.STOP_REASON_LENGTH


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[SamplerRig]:
    async with running_sampler(tmp_path_factory.mktemp("sampler"), engine_host) as rig:
        yield rig


async def test_a_request_is_timed_from_its_arrival(rig: SamplerRig) -> None:
    name = "tinsmith_sampler_request_duration_seconds_sum"
    begin_s, before_s = time.perf_counter(), metric(name)
    await rig.sample(rig.session())
    assert 0 < metric(name) - before_s < time.perf_counter() - begin_s


# Seeds and samples.


async def test_a_seed_repeats_and_another_differs(rig: SamplerRig) -> None:
    session = rig.session()
    first = await rig.sample(session, num_samples=3)
    again = await rig.sample(session, num_samples=3)
    other = await rig.sample(session, num_samples=3, seed=2)
    again.num_cached_prompt_tokens = first.num_cached_prompt_tokens
    assert first == again
    assert first.seed == 1
    assert tokens_of(first) != tokens_of(other)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 3


async def test_a_seed_is_drawn_and_told(rig: SamplerRig) -> None:
    session = rig.session()
    request = make_request(session)
    request.params.ClearField("seed")
    drawn, other = [await rig.call("Sample", request) for _ in range(2)]
    assert drawn.seed != other.seed
    assert tokens_of(await rig.sample(session, seed=drawn.seed)) == tokens_of(drawn)


async def test_samples_are_in_the_order_of_their_streams(rig: SamplerRig) -> None:
    # Sample i has a stream of its own, so more samples never change the first ones, and samples
    # that end early stay in their place.
    session = rig.session()
    few = tokens_of(await rig.sample(session, num_samples=2))
    many = tokens_of(await rig.sample(session, num_samples=9))
    assert many[:2] == few
    stop = many[4][2]
    stopped = tokens_of(await rig.sample(session, num_samples=9, stop=[stop]))
    cut = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in many]
    assert stopped == cut
    assert len({len(tokens) for tokens in stopped}) > 1


async def test_greedy_ignores_the_seed(rig: SamplerRig) -> None:
    session = rig.session()
    first = await rig.sample(session, num_samples=2, temperature=0.0)
    other = await rig.sample(session, num_samples=2, temperature=0.0, seed=2)
    assert tokens_of(first) == tokens_of(other)
    assert tokens_of(first)[0] == tokens_of(first)[1]
    narrow = await rig.sample(session, top_k=1)
    assert tokens_of(narrow)[0] == tokens_of(first)[0]


async def test_logprobs_are_of_the_unmodified_distribution(rig: SamplerRig) -> None:
    session = rig.session(checkpoint=await rig.checkpoint("scored", seed=4))
    drawn = await rig.sample(session, temperature=0.5, top_p=0.9)
    (tokens,) = tokens_of(drawn)
    scores = await rig.logprobs(session, [*PROMPT, *tokens])
    # One token at a time over a cache and all at once: float32 sums of another shape, which
    # measures up to 4e-6 on log-probabilities around -5.
    np.testing.assert_allclose(
        as_floats(drawn.sequences[0].logprobs), scores[len(PROMPT) :], rtol=0, atol=1e-5
    )


# Stops.


async def test_stop_tokens(rig: SamplerRig) -> None:
    session = rig.session()
    free = await rig.sample(session, max_tokens=8)
    (tokens,) = tokens_of(free)
    assert free.sequences[0].stop_reason == LENGTH
    cut = await rig.sample(session, stop=[tokens[3]])
    assert tokens_of(cut)[0] == tokens[: tokens.index(tokens[3]) + 1]
    assert cut.sequences[0].stop_reason == STOP


async def test_a_stop_token_outside_the_vocabulary_ends_nothing(rig: SamplerRig) -> None:
    session = rig.session()
    free = await rig.sample(session, stop=())
    assert tokens_of(await rig.sample(session, stop=[2**31 - 1, -1], min_tokens=4)) == tokens_of(
        free
    )
    # Those of a run's own chat template are its author's words as well.
    rig.scheduler.sampling_sessions[session].stop_token_ids.extend([2**31 - 1, -1])
    ends = await rig.sample(session, stop=None, min_tokens=8)
    assert tokens_of(ends) == tokens_of(await rig.sample(rig.session(), stop=None, min_tokens=8))


async def test_absent_stop_tokens_mean_the_end_of_turn_and_empty_ones_nothing(
    rig: SamplerRig,
) -> None:
    request = sampler_pb2.SamplerServiceGetCapabilitiesRequest(base_model=BASE_MODEL)
    capabilities = await rig.call("GetCapabilities", request)
    ends = set(capabilities.models[0].stop_token_ids)
    assert ends
    session = rig.session()
    options: dict[str, Any] = {"num_samples": 8, "max_tokens": 200}
    free = await rig.sample(session, stop=(), **options)
    assert all(len(tokens) == 200 for tokens in tokens_of(free))
    assert any(ends & set(tokens) for tokens in tokens_of(free))
    turns = await rig.sample(session, stop=None, **options)
    for turn, tokens, sequence in zip(
        tokens_of(turns), tokens_of(free), turns.sequences, strict=True
    ):
        places = [place for place, token in enumerate(tokens) if token in ends]
        assert turn == tokens[: places[0] + 1 if places else None]
        assert sequence.stop_reason == (STOP if places else LENGTH)


async def test_stop_strings(rig: SamplerRig, engine_host: EngineHost) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine_host.directories[BASE_MODEL] / "tokenizer.json"))

    def text_of(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    session = rig.session()
    (tokens,) = tokens_of(await rig.sample(session, max_tokens=24, seed=5))
    text = text_of(tokens)
    # Two characters that no single token holds are found across tokens.
    stop = next(
        text[place : place + 2]
        for place in range(4, len(text) - 1)
        if "�" not in text[place : place + 2]
        and not any(text[place : place + 2] in text_of([token]) for token in tokens)
    )
    cut = await rig.sample(session, max_tokens=24, seed=5, stop_strings=["never", stop])
    (stopped,) = tokens_of(cut)
    assert stopped == tokens[: len(stopped)]
    assert stop in text_of(stopped)
    assert stop not in text_of(stopped[:-1])
    assert cut.sequences[0].stop_reason == STOP


async def test_the_context_ends_a_sample(rig: SamplerRig) -> None:
    request = make_request(rig.session(), [5] * 4090)
    request.params.ClearField("max_tokens")
    drawn = await rig.call("Sample", request)
    assert len(tokens_of(drawn)[0]) == 6
    assert drawn.sequences[0].stop_reason == LENGTH


# Scores of the prompt.


async def test_prompt_logprobs(rig: SamplerRig) -> None:
    session = rig.session()
    drawn = await rig.sample(session, prompt_logprobs=True, num_samples=2)
    scores = as_floats(drawn.prompt_logprobs)
    assert scores.shape == (len(PROMPT),)
    assert math.isnan(scores[0])
    assert np.all(scores[1:] < 0)
    np.testing.assert_array_equal(scores, await rig.logprobs(session))
    assert not drawn.HasField("topk_prompt_logprobs")
    assert not (await rig.sample(session)).HasField("prompt_logprobs")


async def test_topk_prompt_logprobs(rig: SamplerRig, engine_host: EngineHost) -> None:
    session, k = rig.session(), 64
    drawn = await rig.sample(session, prompt_logprobs=True, topk_prompt_logprobs=k)
    ids = decode_tensor(drawn.topk_prompt_logprobs.token_ids)
    values = as_floats(drawn.topk_prompt_logprobs.logprobs)
    assert ids.shape == values.shape == (len(PROMPT), k)
    assert np.all(ids[0] == -1)
    assert np.all(np.isnan(values[0]))
    assert np.all(np.diff(values[1:], axis=1) <= 0)
    scores = as_floats(drawn.prompt_logprobs)
    for position in range(1, len(PROMPT)):
        assert len(set(ids[position].tolist())) == k
        found = values[position][ids[position] == PROMPT[position]]
        assert found.size == 0 or found[0] == scores[position]
    only = await rig.sample(session, topk_prompt_logprobs=2)
    assert not only.HasField("prompt_logprobs")
    np.testing.assert_array_equal(decode_tensor(only.topk_prompt_logprobs.token_ids), ids[:, :2])


async def test_compute_logprobs_of_one_token_and_of_a_full_context(rig: SamplerRig) -> None:
    session = rig.session()
    (first,) = await rig.logprobs(session, [7])
    assert math.isnan(first)
    assert len(await rig.logprobs(session, [7] * 4096)) == 4096


# Versions.


async def test_live_weights_are_the_newest_and_tokens_carry_their_version(rig: SamplerRig) -> None:
    run = await rig.export("live", seed=1, version=1)
    session = rig.session(run=run)
    old = await rig.sample(session, min_version=1)
    assert versions_of(old) == {1}
    await rig.export("live", seed=2, version=2)
    new = await rig.sample(session, min_version=1)
    assert versions_of(new) == {2}
    assert tokens_of(new) != tokens_of(old)
    # The same version number with other weights, as after a run went back to a checkpoint.
    await rig.export("live", seed=1, version=2)
    assert tokens_of(await rig.sample(session)) == tokens_of(old)


async def test_a_version_that_is_not_there_can_be_asked_for_again(rig: SamplerRig) -> None:
    run = await rig.export("late", seed=1, version=1)
    session = rig.session(run=run)
    for call in (
        rig.sample(session, min_version=2),
        rig.call(
            "ComputeLogprobs",
            sampler_pb2.ComputeLogprobsRequest(
                sampling_session=session, input=make_request(session).prompt, min_version=2
            ),
        ),
    ):
        error = await refusal(call)
        assert (code_of(error), error.reason) == ("UNAVAILABLE", "VERSION_NOT_LOADED")
    await rig.export("late", seed=1, version=2)
    assert versions_of(await rig.sample(session, min_version=2)) == {2}


async def test_base_model_has_version_0(rig: SamplerRig) -> None:
    session = rig.session()
    assert versions_of(await rig.sample(session)) == {0}
    checkpoint = rig.session(checkpoint=await rig.checkpoint("of-7", seed=3, version=7))
    assert versions_of(await rig.sample(checkpoint)) == {7}


async def test_a_deleted_checkpoint_is_gone_although_it_is_in_memory(rig: SamplerRig) -> None:
    name = await rig.checkpoint("short-lived")
    session = rig.session(checkpoint=name)
    await rig.sample(session)
    del rig.trainer.checkpoints[name]
    error = await refusal(rig.sample(session))
    assert (code_of(error), error.reason) == ("NOT_FOUND", "CHECKPOINT_NOT_FOUND")


async def test_the_optimizer_of_a_checkpoint_is_not_read(rig: SamplerRig) -> None:
    name = await rig.checkpoint("with-optimizer")
    (rig.folder(name) / OPTIMIZER_FILE).unlink()
    assert await rig.sample(rig.session(checkpoint=name))


async def test_a_foreign_checkpoint_is_sampled_as_long_as_it_is_published(
    rig: SamplerRig,
) -> None:
    own = await rig.checkpoint("lent", seed=5)
    foreign = own.replace("projects/p/", "projects/lender/")
    found = checkpoint_pb2.Checkpoint()
    found.CopyFrom(rig.trainer.checkpoints[own])
    found.state = checkpoint_pb2.Checkpoint.STATE_PUBLISHED
    rig.trainer.checkpoints[foreign] = found
    session = rig.session(checkpoint=foreign)
    await rig.sample(session)
    found.state = checkpoint_pb2.Checkpoint.STATE_PRIVATE
    error = await refusal(rig.sample(session))
    assert (code_of(error), error.reason) == ("NOT_FOUND", "CHECKPOINT_NOT_FOUND")


async def test_concurrent_requests_give_the_tokens_of_each_alone(rig: SamplerRig) -> None:
    sources: list[dict[str, str]] = [{}, {}]
    sources += [{"checkpoint": await rig.checkpoint(f"c{seed}", seed=seed)} for seed in range(3)]
    sources += [
        {"run": await rig.export(f"r{seed}", seed=seed, version=seed)} for seed in range(4, 7)
    ]
    requests = [
        make_request(
            rig.session(**source),
            [3 + (7 * index + place) % 200 for place in range(1 + 5 * index)],
            num_samples=1 + index % 3,
            max_tokens=4 + 3 * index,
            temperature=index % 3 * 0.5,
            top_p=(1.0, 0.9)[index % 2],
            seed=index,
            prompt_logprobs=index % 2 == 0,
        )
        for index, source in enumerate(sources)
    ]
    alone = [await rig.call("Sample", request) for request in requests]
    together = await asyncio.gather(*(rig.call("Sample", request) for request in requests * 3))
    # Equal messages: tokens, log-probabilities, versions and scores, bit for bit; all but what was
    # known of the prompt before.
    for response in (*alone, *together):
        response.num_cached_prompt_tokens = 0
    for index, response in enumerate(together):
        wanted = alone[index % len(alone)]
        assert response.SerializeToString(deterministic=True) == wanted.SerializeToString(
            deterministic=True
        )


async def test_least_recently_used_weights_leave_memory(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with running_sampler(tmp_path, engine_host, max_loaded_weights=2) as rig:
        sessions = [
            rig.session(checkpoint=await rig.checkpoint(f"c{seed}", seed=seed)) for seed in range(4)
        ]
        first = [tokens_of(await rig.sample(session)) for session in sessions]
        request = sampler_pb2.ListLoadedWeightsRequest(parent="projects/p")
        loaded = (await rig.call("ListLoadedWeights", request)).weights
        assert [weights.source.rpartition("/")[2] for weights in loaded] == ["c2", "c3"]
        page = sampler_pb2.ListLoadedWeightsRequest(parent="projects/p", page_size=1)
        first_page = await rig.call("ListLoadedWeights", page)
        page.page_token = first_page.next_page_token
        last_page = await rig.call("ListLoadedWeights", page)
        assert [*first_page.weights, *last_page.weights] == list(loaded)
        assert not last_page.next_page_token
        again = await asyncio.gather(*(rig.sample(session) for session in sessions * 2))
        assert [tokens_of(response) for response in again] == first * 2
        other = rig.scheduler.new_key("q")
        request.parent = "projects/q"
        assert not (await rig.call("ListLoadedWeights", request, key=other)).weights


# Sessions and keys.


async def test_an_ended_session_is_noticed(tmp_path: Path, engine_host: EngineHost) -> None:
    async with running_sampler(tmp_path, engine_host, session_ttl_s=1e-9) as rig:
        session = rig.session()
        await rig.sample(session)
        del rig.scheduler.sampling_sessions[session]
        error = await refusal(rig.sample(session))
        assert (code_of(error), error.reason) == ("NOT_FOUND", "SAMPLING_SESSION_NOT_FOUND")


async def test_the_scheduler_may_be_away_for_known_sessions_and_keys(
    tmp_path: Path, engine_host: EngineHost
) -> None:
    async with running_sampler(tmp_path, engine_host, session_ttl_s=60.0) as rig:
        session, unknown = rig.session(), rig.session()
        alone = tokens_of(await rig.sample(session))
        await rig.scheduler.server.stop()
        assert tokens_of(await rig.sample(session)) == alone
        error = await refusal(rig.sample(unknown))
        assert (code_of(error), error.reason) == ("UNAVAILABLE", "WORKER_UNAVAILABLE")
        error = await refusal(rig.sample(session, key=str(ApiKey.generate())))
        assert (code_of(error), error.reason) == ("UNAVAILABLE", "WORKER_UNAVAILABLE")


async def test_capabilities(rig: SamplerRig) -> None:
    request = sampler_pb2.SamplerServiceGetCapabilitiesRequest()
    answer = await rig.call("GetCapabilities", request)
    assert [model.base_model for model in answer.models] == [BASE_MODEL]
    assert (answer.max_samples, answer.max_topk_logprobs) == (256, 64)
    assert answer.max_concurrent_sequences == 256
    await eventually(lambda: rig.scheduler.workers)
    assert rig.scheduler.workers["workers/sampler-0"].address == rig.pod.address
