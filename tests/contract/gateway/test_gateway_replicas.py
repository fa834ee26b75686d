"""A sampling session uses all replicas that may serve it, through the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.gateway_harness import SAMPLING_SESSION, GatewayRig, running_gateway
from tests.support.wait import eventually

from tinsmith.tensors import encode_tokens
from tinsmith.v1 import sampler_pb2
from tinsmith_runtime.errors import DrainingError


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[GatewayRig]:
    async with running_gateway(tmp_path) as rig:
        session = rig.scheduler.sampling_sessions[SAMPLING_SESSION]
        session.sampler_addresses[:] = [rig.pod.server.address, rig.other.server.address]
        yield rig


def sample(rig: GatewayRig, tokens: list[int]) -> Any:
    request = sampler_pb2.SampleRequest(sampling_session=SAMPLING_SESSION)
    request.prompt.chunks.add(tokens=encode_tokens(tokens))
    return rig.call("/tinsmith.v1.SamplerService/Sample", request, sampler_pb2.SampleResponse)


async def test_samples_of_one_session_go_to_all_its_samplers(rig: GatewayRig) -> None:
    for pod in (rig.pod, rig.other):
        pod.hold.clear()
    calls = [asyncio.ensure_future(sample(rig, [1, 2, 3])) for _ in range(20)]
    pods = (rig.pod, rig.other)
    await eventually(lambda: sum(len(pod.requests) for pod in pods) == 20)
    # One prompt alone: the sampler that it prefers has at most a quarter more than its part.
    assert min(len(pod.requests) for pod in pods) >= 6
    for pod in pods:
        pod.hold.set()
    await asyncio.gather(*calls)


async def test_a_prompt_finds_the_sampler_that_knows_it(rig: GatewayRig) -> None:
    for _ in range(6):
        await sample(rig, [1, 2, 3])
    assert sorted([len(rig.pod.requests), len(rig.other.requests)]) == [0, 6]
    for number in range(40):
        await sample(rig, [number] * 8)
    assert min(len(rig.pod.requests), len(rig.other.requests)) >= 8


async def test_a_sampler_that_goes_leaves_its_prompts_to_the_others(rig: GatewayRig) -> None:
    rig.pod.fail += [DrainingError("going") for _ in range(100)]
    results = [
        await asyncio.gather(sample(rig, [number] * 8), return_exceptions=True)
        for number in range(20)
    ]
    refused = [one for (one,) in results if isinstance(one, BaseException)]
    assert len(refused) <= 1
    assert len(rig.other.requests) >= 19
