"""A trainer that gives runs up and takes them back on a shared ledger, work under way included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.trainer_harness import (
    RunClient,
    TrainerRig,
    bearer,
    make_datum,
    new_id,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.pod_keys import pod

from tinsmith.v1 import checkpoint_pb2, trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost
from tinsmith_runtime.errors import (
    CapacityExhaustedError,
    InternalError,
    OutcomeUnknownError,
    RunMovedError,
    StorageUnavailableError,
)
from tinsmith_runtime.ledger import Holder, PostgresLedger, RunRecord

TTL_S = 60.0


@pytest.fixture
async def rig(
    tmp_path: Path, engine_host: EngineHost, postgres_url: str
) -> AsyncIterator[TrainerRig]:
    async with running_trainer(tmp_path / "data", engine_host, database_url=postgres_url) as rig:
        yield rig


@pytest.fixture
async def other(rig: TrainerRig, postgres_url: str) -> AsyncIterator[PostgresLedger]:
    """The ledger as another trainer has it."""
    ledger = PostgresLedger(postgres_url, holder=Holder("other", "1"))
    await ledger.open()
    await ledger.renew(TTL_S)
    yield ledger
    await ledger.close()


async def take_over(other: PostgresLedger, run: RunClient, epoch: int) -> None:
    record = next(r for r in await other.list_runs() if r.name == run.name)
    await other.adopt_run(
        RunRecord(name=run.name, base_model=record.base_model, adapter=record.adapter, epoch=epoch)
    )


async def release(rig: TrainerRig, run: RunClient, mode: Any, epoch: int = 1) -> None:
    request = trainer_control_pb2.ReleaseRunRequest(run=run.name, epoch=epoch, mode=mode)
    await rig.stub.ReleaseRun(request, metadata=pod("scheduler"), timeout=20)


class Held:
    """Holds up the first call of a method until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        method = getattr(owner, name)
        self.begun = asyncio.Event()
        self.let_go = asyncio.Event()

        async def held(*args: Any, **options: Any) -> Any:
            if not self.begun.is_set():
                self.begun.set()
                await self.let_go.wait()
            return await method(*args, **options)

        monkeypatch.setattr(owner, name, held)


async def copied(run: RunClient, source: str, checkpoint_id: str) -> Any:
    request = checkpoint_pb2.CopyCheckpointRequest(
        parent=run.name, checkpoint_id=checkpoint_id, source_checkpoint=source, request_id=new_id()
    )
    operation = await run.call("CopyCheckpoint", request)
    return await run.wait(operation)


async def test_a_request_on_its_way_while_its_run_is_handed_over_ends_no_process(
    rig: TrainerRig, other: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run()
    held = Held(monkeypatch, rig.pod._ledger, "submit")
    request = asyncio.ensure_future(refusal(run.forward_backward(make_datum())))
    await held.begun.wait()
    await release(rig, run, trainer_control_pb2.ReleaseRunRequest.MODE_HAND_OVER)
    await take_over(other, run, 2)
    held.let_go.set()
    assert (await request).reason == RunMovedError.reason
    assert rig.fenced == []


async def test_checkpoints_of_a_run_that_nobody_holds_are_listed_for_its_project_alone(
    rig: TrainerRig,
) -> None:
    run = await rig.new_run()
    saved = await run.saved("a")
    await release(rig, run, trainer_control_pb2.ReleaseRunRequest.MODE_HAND_OVER)

    request = checkpoint_pb2.ListCheckpointsRequest(parent=run.name)
    listed = await run.call("ListCheckpoints", request)
    stranger = bearer(rig.scheduler.new_key("q"))
    unknown = checkpoint_pb2.ListCheckpointsRequest(parent=f"{run.name}-2")

    assert [checkpoint.name for checkpoint in listed.checkpoints] == [saved.name]
    for call in (
        run.call("ListCheckpoints", request, metadata=stranger),
        run.call("ListCheckpoints", unknown),
    ):
        assert (await refusal(call)).reason == "RUN_NOT_FOUND"


async def test_a_commit_on_its_way_while_the_epoch_is_raised_ends_no_process(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run()
    held = Held(monkeypatch, rig.pod._ledger, "finish_all")
    first = await run.forward_backward(make_datum())
    await held.begun.wait()
    adoption = asyncio.ensure_future(rig.adopt(run.name, epoch=2))
    old = rig.pod._registry.held(run.name)
    assert old is not None
    while not (old.is_leaving or adoption.done()):
        await asyncio.sleep(0.01)
    held.let_go.set()
    await adoption
    response_of(await run.wait(first), trainer_pb2.ForwardBackwardResponse())
    assert await run.step() == 1
    assert rig.fenced == []


async def test_checkpoints_of_a_run_without_operations_stay_when_it_moves(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await (await rig.new_run("source")).saved("a")
    run = await rig.new_run("copies")
    made = response_of(await copied(run, source.name, "b"), checkpoint_pb2.Checkpoint())
    await rig.restart()

    async def full(*_: Any, **__: Any) -> None:
        raise CapacityExhaustedError("all places are busy")

    with monkeypatch.context() as patched:
        patched.setattr(rig.pod._residency, "ensure", full)
        await rig.adopt(run.name, epoch=2)
    request = checkpoint_pb2.GetCheckpointRequest(name=made.name)
    assert (await run.call("GetCheckpoint", request)).name == made.name


async def test_an_adoption_that_broke_off_at_its_end_is_completed_by_the_next_try(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run()
    # The cycle is not told, so the operation is left to the next process.
    monkeypatch.setattr(rig.pod._registry._has_work, "set", lambda: None)
    operation = await run.forward_backward(make_datum())
    await rig.restart()

    async def away() -> None:
        raise StorageUnavailableError("the database is away")

    with monkeypatch.context() as patched:
        patched.setattr(rig.pod._adoption, "_on_adopted", away)
        await refusal(rig.adopt(run.name, epoch=2))
    await rig.adopt(run.name, epoch=2)
    assert (await run.wait(operation)).done


async def test_a_run_that_can_not_be_loaded_is_free_for_others(
    rig: TrainerRig, other: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run()
    # One that has nothing to do would not be loaded yet.
    await run.optim_step(number=2)
    await rig.restart()

    async def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(rig.pod._adoption._loader, "load", broken)
    assert (await refusal(rig.adopt(run.name, epoch=2))).code is InternalError.code
    await take_over(other, run, 3)


async def test_a_run_that_was_let_go_does_not_come_back_into_the_engine(rig: TrainerRig) -> None:
    run = await rig.new_run()
    await run.step()
    live = rig.pod._registry.held(run.name)
    assert live is not None
    await live.lock.acquire()
    publication = asyncio.ensure_future(rig.pod._weight_exporter.export_to_store(live))
    leaving = asyncio.ensure_future(
        release(rig, run, trainer_control_pb2.ReleaseRunRequest.MODE_HAND_OVER)
    )
    while not live.is_leaving:
        await asyncio.sleep(0.01)
    live.lock.release()
    with pytest.raises(RunMovedError):
        await publication
    await leaving
    assert not live.engine.has_run(run.name)


async def test_a_copy_whose_commit_is_doubtful_keeps_its_files(
    rig: TrainerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run()
    source = await run.saved("a")
    finish_task = rig.pod._ledger.finish_task

    async def lost(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(rig.pod._ledger, "finish_task", finish_task)
        await finish_task(*args, **options)
        raise OutcomeUnknownError("the answer was lost")

    monkeypatch.setattr(rig.pod._ledger, "finish_task", lost)
    made = response_of(await copied(run, source.name, "b"), checkpoint_pb2.Checkpoint())
    async with asyncio.timeout(20):
        while rig.pod._tasks._running:
            await asyncio.sleep(0.01)
    assert Path(made.manifest_uri.removeprefix("file://")).exists()


async def test_a_copy_that_lost_its_run_leaves_the_files_of_its_successor_alone(
    rig: TrainerRig, other: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await rig.new_run()
    source = await run.saved("a")
    held = Held(monkeypatch, rig.pod._ledger, "finish_task")
    request = checkpoint_pb2.CopyCheckpointRequest(
        parent=run.name, checkpoint_id="b", source_checkpoint=source.name, request_id=new_id()
    )
    operation = await run.call("CopyCheckpoint", request)
    await held.begun.wait()
    await release(rig, run, trainer_control_pb2.ReleaseRunRequest.MODE_HAND_OVER)
    # The next holder does it again, here in the same process but as a trainer of its own would.
    abandoned = dict(rig.pod._tasks._running)
    rig.pod._tasks._running.clear()
    await rig.adopt(run.name, epoch=2)
    made = response_of(await run.wait(operation), checkpoint_pb2.Checkpoint())
    rig.pod._registry._runs.pop(run.name)
    held.let_go.set()
    await asyncio.gather(*abandoned.values())
    assert Path(made.manifest_uri.removeprefix("file://")).exists()


async def test_a_run_that_nobody_holds_is_deleted_under_its_epoch_alone(rig: TrainerRig) -> None:
    """As after a restart of its trainer, or when the pool that it trained in is gone."""
    run = await rig.new_run()
    await run.step()
    await rig.restart()
    delete = trainer_control_pb2.ReleaseRunRequest.MODE_DELETE

    assert (await refusal(release(rig, run, delete, epoch=2))).reason == "ABORTED"
    await release(rig, run, delete)

    assert (await refusal(release(rig, run, delete))).reason == "RUN_NOT_FOUND"


async def test_a_run_is_not_taken_for_parked_while_its_trainer_comes_back(
    rig: TrainerRig,
) -> None:
    run = await rig.new_run()
    await run.step()
    await rig.restart()
    hand_over = trainer_control_pb2.ReleaseRunRequest.MODE_HAND_OVER
    delete = trainer_control_pb2.ReleaseRunRequest.MODE_DELETE

    assert (await refusal(release(rig, run, hand_over))).reason == "RUN_MOVED"
    await rig.adopt(run.name, epoch=2)
    assert (await refusal(release(rig, run, delete))).reason == "ABORTED"
    await release(rig, run, delete, epoch=2)
    assert (await refusal(release(rig, run, delete, epoch=2))).reason == "RUN_NOT_FOUND"


async def test_a_run_that_sleeps_is_handed_over_and_adopted_again(
    rig: TrainerRig, other: PostgresLedger
) -> None:
    run = await rig.new_run()
    await run.step()
    await release(rig, run, trainer_control_pb2.ReleaseRunRequest.MODE_PARK)
    await release(rig, run, trainer_control_pb2.ReleaseRunRequest.MODE_HAND_OVER)
    await take_over(other, run, 2)
    assert (await refusal(run.status())).reason == "RUN_MOVED"
    await other.release_run(run.name, 2)
    await rig.adopt(run.name, epoch=3)
    assert await run.step() == 2
