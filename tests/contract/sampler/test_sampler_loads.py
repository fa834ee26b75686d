"""Samplers say with each heartbeat what they have to do, and sampling sessions pass it on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.fakes.scheduler_fake_trainer import (
    BASE_MODEL,
    Rig,
    expect_rpc_error,
    new_id,
    running_rig,
)
from tests.support.pod_keys import pod

from tinsmith.rpc.durations import decode_duration
from tinsmith.v1 import scheduler_pb2, workers_pb2


@pytest.fixture
async def rig(tmp_path: Path, database_url: str) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path, database_url=database_url) as rig:
        await rig.register_sampler(name="sampler-0", address="s:0")
        await rig.register_sampler(name="sampler-1", address="s:1")
        yield rig


async def heartbeat(rig: Rig, name: str, **load: int) -> None:
    request = workers_pb2.HeartbeatWorkerRequest(
        name=f"workers/{name}", load=scheduler_pb2.SamplerLoad()
    )
    for field, value in load.items():
        setattr(request.load, field, value)
    await rig.worker_stub.HeartbeatWorker(request, metadata=pod("sampler"), timeout=60)


async def session_of(rig: Rig) -> str:
    request = scheduler_pb2.CreateSamplingSessionRequest(
        parent=await rig.session(rig.admin), request_id=new_id(), base_model=BASE_MODEL
    )
    handle = await rig.stub.CreateSamplingSession(request, metadata=rig.admin, timeout=60)
    return str(handle.name)


async def loads(rig: Rig, name: str) -> dict[str, tuple[int, int, int, float]]:
    request = scheduler_pb2.GetSamplingSessionRequest(name=name)
    found = await rig.stub.GetSamplingSession(request, metadata=rig.admin, timeout=60)
    return {
        load.address: (
            load.num_requests,
            load.num_sequences,
            load.num_tokens,
            decode_duration(load.age),
        )
        for load in found.sampler_loads
    }


async def test_a_session_says_what_its_samplers_have_to_do(rig: Rig) -> None:
    name = await session_of(rig)
    assert await loads(rig, name) == {}
    await heartbeat(rig, "sampler-1", num_requests=3, num_sequences=24, num_tokens=9000)
    assert await loads(rig, name) == {"s:1": (3, 24, 9000, 0.0)}
    rig.clock.now_s += 4
    await heartbeat(rig, "sampler-0", num_requests=0)
    assert await loads(rig, name) == {"s:0": (0, 0, 0, 0.0), "s:1": (3, 24, 9000, 4.0)}
    # The one that says no more is left out before long, with its load.
    rig.clock.now_s += 12
    assert await loads(rig, name) == {"s:0": (0, 0, 0, 12.0)}
    # A process that has just begun has said nothing.
    await rig.register_sampler(name="sampler-1", address="s:1")
    assert set(await loads(rig, name)) == {"s:0"}


async def test_a_load_that_cannot_be_is_refused(rig: Rig) -> None:
    with expect_rpc_error(grpc.StatusCode.INVALID_ARGUMENT, reason="INVALID_FIELD"):
        await heartbeat(rig, "sampler-0", num_tokens=-1)
