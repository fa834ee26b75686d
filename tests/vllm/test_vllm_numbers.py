"""What vLLM samples are the tokens of the weights that were asked for, and of no others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch

from tests.fakes.sampler_harness import PROMPT, SamplerRig, as_floats, tokens_of, versions_of
from tests.vllm.conftest import Reference, logprobs_of
from tinsmith.v1 import sampler_pb2
from tinsmith_engine import LoraConfig

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    # PEFT reads an attribute that transformers is about to rename.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]

# float32 on both sides; what is left are other orders of summation.
TOLERANCE = 1e-4
LONG_PROMPT = tuple(5 + (index * 7) % 200 for index in range(500))


def largest_difference(
    response: sampler_pb2.SampleResponse, model: torch.nn.Module, prompt: Sequence[int] = PROMPT
) -> float:
    """Return how far the log-probabilities of a response are from those of a model."""
    return max(
        float(abs(as_floats(one.logprobs) - logprobs_of(model, prompt, tokens)).max())
        for one, tokens in zip(response.sequences, tokens_of(response), strict=True)
    )


async def test_logprobs_of_the_base_model_are_those_of_transformers(
    rig: SamplerRig, reference: Reference
) -> None:
    response = await rig.sample(rig.session(), num_samples=4, max_tokens=32, prompt_logprobs=True)
    assert [len(one) for one in tokens_of(response)] == [32] * 4
    model = reference.base()
    assert largest_difference(response, model) < TOLERANCE
    scored = as_floats(response.prompt_logprobs)[1:]
    assert abs(scored - logprobs_of(model, PROMPT[:1], PROMPT[1:])).max() < TOLERANCE


async def test_two_adapters_decode_beside_each_other_as_peft_computes_them(
    rig: SamplerRig, reference: Reference
) -> None:
    models, sessions = [], []
    for seed in (1, 2):
        config = LoraConfig(rank=4, seed=seed)
        tensors = await rig.random_adapter(config)
        checkpoint = await rig.saved(f"c{seed}", config, tensors, version=seed)
        sessions.append(rig.session(checkpoint=checkpoint))
        models.append(reference.adapted(tensors, rank=4, alpha=config.alpha))
    one, two, base = await asyncio.gather(
        *(
            rig.sample(session, num_samples=4, max_tokens=48)
            for session in (*sessions, rig.session())
        )
    )
    assert largest_difference(one, models[0]) < TOLERANCE
    assert largest_difference(two, models[1]) < TOLERANCE
    assert largest_difference(base, reference.base()) < TOLERANCE
    assert largest_difference(one, models[1]) > 0.1
    assert [versions_of(one), versions_of(two), versions_of(base)] == [{1}, {2}, {0}]


async def test_a_known_prompt_is_not_used_for_another_version(
    rig: SamplerRig, reference: Reference
) -> None:
    async def exported(version: int) -> torch.nn.Module:
        await rig.export("live", seed=version, version=version)
        config = LoraConfig(rank=4, seed=version)
        tensors = await rig.random_adapter(config)
        return reference.adapted(tensors, rank=4, alpha=config.alpha)

    first_model = await exported(1)
    session = rig.session(run="projects/p/trainingRuns/live")
    first = await rig.sample(session, LONG_PROMPT)
    again = await rig.sample(session, LONG_PROMPT, seed=2)
    assert (first.num_cached_prompt_tokens, again.num_cached_prompt_tokens > 0) == (0, True)
    second_model = await exported(2)
    second = await rig.sample(session, LONG_PROMPT)
    assert (second.version, second.num_cached_prompt_tokens) == (2, 0)
    assert largest_difference(first, first_model, LONG_PROMPT) < TOLERANCE
    assert largest_difference(again, first_model, LONG_PROMPT) < TOLERANCE
    assert largest_difference(second, second_model, LONG_PROMPT) < TOLERANCE


async def test_more_adapters_than_fit_a_batch_are_all_served(
    rig: SamplerRig, reference: Reference
) -> None:
    """vLLM was started for 8 in a batch; the pod keeps 4 checkpoints, so that versions go."""
    sessions = []
    for seed in range(1, 13):
        checkpoint = await rig.checkpoint(f"m{seed}", seed=seed, version=seed)
        sessions.append(rig.session(checkpoint=checkpoint))
    responses = await asyncio.gather(*(rig.sample(session) for session in sessions))
    for seed, response in enumerate(responses, start=1):
        tensors = await rig.random_adapter(LoraConfig(rank=4, seed=seed))
        model = reference.adapted(tensors, rank=4, alpha=LoraConfig().alpha)
        assert versions_of(response) == {seed}
        assert largest_difference(response, model) < TOLERANCE
