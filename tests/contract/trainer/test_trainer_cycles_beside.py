"""Cycles beside each other: a small operation does not wait for the end of a large one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from tests.fakes.trainer_harness import (
    BASE_MODEL,
    RunClient,
    TrainerRig,
    make_datum,
    metadata_of,
    response_of,
)
from tests.support.wait import eventually

from tinsmith.v1 import trainer_pb2
from tinsmith_engine import BatchRequest
from tinsmith_engine.host import EngineHost
from tinsmith_engine.training.engine import Passes

RUNNING = trainer_pb2.OperationMetadata.STATE_RUNNING


class LongBatches:
    """Batches of runs whose name begins with `large` take until `end`, in as many parts."""

    def __init__(self, engine_host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = engine_host.engine(BASE_MODEL)
        self._compute = engine.compute_by_pass
        self._ends = threading.Event()
        monkeypatch.setattr(engine, "compute_by_pass", self._compute_by_pass)

    def end(self) -> None:
        self._ends.set()

    def _compute_by_pass(self, requests: Sequence[BatchRequest]) -> Passes:
        is_large = any("/large" in str(request.run) for request in requests)
        while is_large and not self._ends.wait(0.005):
            yield 10.0
        return (yield from self._compute(requests))


@pytest.fixture
def long_batches(engine_host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> Iterator[LongBatches]:
    found = LongBatches(engine_host, monkeypatch)
    yield found
    found.end()


async def begin_large(rig: TrainerRig, name: str = "large", *, project: str) -> RunClient:
    run = await rig.new_run(name, project=project)
    await run.forward_backward(make_datum(num_tokens=40, seed=3))

    async def is_running() -> bool:
        return metadata_of(await run.get(1)).state == RUNNING

    assert await eventually(is_running)
    return run


@pytest.mark.parametrize("project", ["quiet", "loud"], ids=["another project", "the same project"])
async def test_small_steps_go_on_beside_a_large_operation(
    rig: TrainerRig, long_batches: LongBatches, project: str
) -> None:
    alone = await rig.new_run("alone", project=project)
    await alone.step(make_datum(seed=1))
    wanted = await alone.bits("final")
    large = await begin_large(rig, project="loud")
    small = await rig.new_run("small", project=project)
    for number in range(1, 4):
        await small.forward_backward(make_datum(seed=1))
        done = await small.wait(await small.optim_step())
        assert response_of(done, trainer_pb2.OptimStepResponse()).version == number
        if number == 1:
            assert await small.bits("final") == wanted
    assert metadata_of(await large.get(1)).state == RUNNING
    long_batches.end()
    await large.wait(1)
    await large.wait(await large.optim_step())


async def test_a_large_operation_has_the_bits_of_one_that_was_alone(
    rig: TrainerRig, long_batches: LongBatches
) -> None:
    large = await begin_large(rig, project="loud")
    small = await rig.new_run("small", project="quiet")
    await small.step(make_datum(seed=1))
    long_batches.end()
    await large.wait(await large.optim_step())
    alone = await rig.new_run("alone")
    await alone.step(make_datum(num_tokens=40, seed=3))
    assert await large.bits("final") == await alone.bits("final")


async def test_a_project_with_a_large_operation_gets_one_cycle_while_others_have_work(
    rig: TrainerRig, long_batches: LongBatches
) -> None:
    await begin_large(rig, "large-1", project="quiet")
    await begin_large(rig, "large-2", project="loud")
    second = await rig.new_run("large-3", project="loud")
    await second.forward_backward(make_datum())
    third = await rig.new_run("small", project="third")
    await third.step(make_datum())
    assert metadata_of(await second.get(1)).state == trainer_pb2.OperationMetadata.STATE_QUEUED
    long_batches.end()
    await second.wait(1)


async def test_a_stop_ends_what_is_computed_and_stores_it(
    rig: TrainerRig, long_batches: LongBatches
) -> None:
    large = await begin_large(rig, project="loud")
    small = await rig.new_run("small", project="quiet")
    await small.step(make_datum(seed=1))
    long_batches.end()
    await rig.restart()
    await large.wait(1)
    await large.wait(await large.optim_step())
