"""Callers that go away in the middle: what the ledger says and what is in memory still agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.trainer_harness import TrainerRig, running_trainer
from tests.support.pod_keys import pod

from tinsmith.v1 import trainer_control_pb2
from tinsmith_engine.host import EngineHost

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    data_dir: Path = tmp_path_factory.mktemp("trainer")
    async with running_trainer(data_dir, engine_host) as rig:
        yield rig


async def test_a_submit_whose_caller_left_during_the_write_is_executed(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run("left-submit")
    ledger = rig.pod._ledger
    submit, began, may_write = ledger.submit, asyncio.Event(), asyncio.Event()

    async def held_submit(operation: object) -> object:
        began.set()
        await may_write.wait()
        return await submit(operation)

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "submit", held_submit)
        call = asyncio.create_task(run.forward_backward())
        await began.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        may_write.set()
        while not (await run.status()).num_pending_operations and (
            (await run.status()).next_sequence_number == 1
        ):
            await asyncio.sleep(0)
    assert not (await run.wait(1)).HasField("error")
    run.next_number = (await run.status()).next_sequence_number
    assert run.next_number == 2
    assert not (await run.wait(await run.optim_step())).HasField("error")


async def test_a_deletion_whose_caller_left_is_finished_and_may_be_repeated(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run("left-delete")
    await run.step()
    residency = rig.pod._residency
    evict, began, may_evict = residency.evict, asyncio.Event(), asyncio.Event()

    async def held_evict(live: object) -> None:
        began.set()
        await may_evict.wait()
        await evict(live)

    request = trainer_control_pb2.ReleaseRunRequest(
        run=run.name, epoch=1, mode=trainer_control_pb2.ReleaseRunRequest.MODE_DELETE
    )
    with monkeypatch.context() as patch:
        patch.setattr(residency, "evict", held_evict)
        call = asyncio.create_task(run.call("ReleaseRun", request, metadata=pod("scheduler")))
        await began.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        may_evict.set()
        while residency._host.engine("tiny").has_run(run.name):
            await asyncio.sleep(0)
    assert rig.fenced == []
    other = await rig.new_run("after-delete")
    assert await other.step() == 1
