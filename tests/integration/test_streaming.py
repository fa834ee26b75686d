"""Streams and in-flight weights, from the SDK to the engine and back."""

from __future__ import annotations

import asyncio

import pytest
from tests.integration.servers import BASE_MODEL, Deployment

import tinsmith

PROMPT = [5, 6, 7, 8]
ADAM = tinsmith.AdamParams(learning_rate=1e-2)
DATUM = tinsmith.Datum(
    tinsmith.ModelInput.from_ints(PROMPT),
    {"target_tokens": [6, 7, 8, 9], "weights": [1.0, 1.0, 1.0, 1.0]},
)
# Nothing ends it but the context.
ENDLESS = tinsmith.SamplingParams(max_tokens=1000, seed=3, stop=[])


@pytest.fixture(params=["embedded", "processes"])
def deployment(request: pytest.FixtureRequest) -> Deployment:
    found: Deployment = request.getfixturevalue(request.param)
    return found


def step(run: tinsmith.TrainingRun) -> int:
    run.forward_backward([DATUM])
    return run.optim_step(ADAM).result().version


def test_a_stream_gives_what_sample_gives(deployment: Deployment) -> None:
    params = tinsmith.SamplingParams(max_tokens=24, seed=3)
    with deployment.client() as client:
        sampler = client.create_sampler(base_model=BASE_MODEL)
        wanted = sampler.sample(
            PROMPT, sampling_params=params, num_samples=3, include_prompt_logprobs=True
        ).result()

        async def read() -> list[tinsmith.SampleChunk]:
            stream = sampler.stream(
                PROMPT, sampling_params=params, num_samples=3, include_prompt_logprobs=True
            )
            pieces = [piece async for piece in stream]
            assert stream.result is not None
            assert stream.result.sequences == wanted.sequences
            return pieces

        pieces = asyncio.run(read())
        assert len(pieces) > 3
        again = sampler.sample(PROMPT, sampling_params=params, num_samples=3).result()
        assert again.sequences == wanted.sequences
        assert again.prompt_cache_hit_tokens == len(PROMPT)


def test_steps_reach_a_stream_of_a_live_run_and_not_a_pinned_one(embedded: Deployment) -> None:
    with embedded.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=8, seed=2)
        assert step(run) == 1
        sampler = run.sampler()
        wanted = sampler.sample(
            PROMPT, sampling_params=tinsmith.SamplingParams(max_tokens=40, seed=3, stop=[])
        ).result()
        with (
            sampler.stream(PROMPT, sampling_params=ENDLESS) as pinned,
            # So many that they decode for seconds; a step takes a few hundredths of one.
            sampler.stream(
                PROMPT, sampling_params=ENDLESS, num_samples=32, weight_updates="in_flight"
            ) as followed,
        ):
            assert next(pinned).versions[0] == next(followed).versions[0] == 1
            assert step(run) == 2
            while 2 not in next(followed).versions:
                pass
            assert pinned.result is not None
            tokens = list(pinned.result.sequences[0].tokens)
            while len(tokens) < 40:
                piece = next(pinned)
                assert set(piece.versions) == {1}
                tokens += piece.tokens
            assert tokens[:40] == wanted.sequences[0].tokens
            found = followed.result
            assert found is not None
            assert found.version == 2
            for sequence in found.sequences:
                assert sequence.versions == sorted(sequence.versions)
