"""A database that does not answer: callers are told by their deadline, and a stop is not held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.fakes.postgres import PostgresServer
from tests.fakes.trainer_harness import (
    TrainerRig,
    make_datum,
    new_id,
    refusal,
    response_of,
    running_trainer,
)
from tests.faults.proxy import Fault, FaultProxy
from tests.support.wait import eventually

from tinsmith.v1 import trainer_pb2
from tinsmith_engine.host import EngineHost

_STOP_S = 90.0
"""For a machine that is busy; without a bound the stop would never end."""


@pytest.fixture
def proxy(postgres: PostgresServer) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", postgres.port, timeout_s=600.0) as proxy:
        yield proxy


@pytest.fixture
async def rig(
    tmp_path: Path,
    engine_host: EngineHost,
    postgres: PostgresServer,
    postgres_url: str,
    proxy: FaultProxy,
) -> AsyncIterator[TrainerRig]:
    url = postgres_url.replace(f":{postgres.port}/", f":{proxy.port}/")
    settings = {"database_url": url, "lease_ttl_s": 600.0}
    async with running_trainer(tmp_path / "data", engine_host, **settings) as rig:
        yield rig


async def test_a_call_whose_outcome_is_unknown_ends_by_its_deadline(
    rig: TrainerRig, proxy: FaultProxy
) -> None:
    run = await rig.new_run()
    request = trainer_pb2.ForwardBackwardRequest(
        run=run.name,
        data=[make_datum()],
        loss=trainer_pb2.Loss(name="cross_entropy"),
        sequence_number=1,
        request_id=new_id(),
    )
    with proxy.fault(Fault(stall=True)):
        error = await refusal(run.call("ForwardBackward", request, timeout=4.0))
    assert error.reason == "OUTCOME_UNKNOWN"
    again = await run.call("ForwardBackward", request)
    response_of(await run.wait(again), trainer_pb2.ForwardBackwardResponse())
    assert (await run.status()).next_sequence_number == 2


@pytest.mark.parametrize("fault", [Fault(stall=True), Fault(refuse=True)], ids=["silent", "away"])
async def test_a_stop_does_not_wait_for_a_database_that_is_away(
    rig: TrainerRig, proxy: FaultProxy, fault: Fault
) -> None:
    run = await rig.new_run()
    await run.step()
    with proxy.fault(fault):
        call = asyncio.ensure_future(run.forward_backward(make_datum(), number=3))
        connections = proxy.num_connections
        # The request is on its way to the database.
        await eventually(lambda: proxy.num_connections > connections)
        async with asyncio.timeout(_STOP_S):
            await rig.pod.stop()
    await asyncio.gather(call, return_exceptions=True)
    await rig.restart()
    await rig.adopt(run.name, epoch=2)
    assert (await run.status()).version == 1
