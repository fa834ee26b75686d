"""Runs of ended sessions sleep: they take no place, and come back when they are asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.contract.trainer.test_trainer_shared_ledger import release
from tests.fakes.trainer_harness import (
    RunClient,
    TrainerRig,
    make_datum,
    query_ledger,
    refusal,
    response_of,
    running_trainer,
)
from tests.support.wait import eventually

from tinsmith.v1 import trainer_control_pb2, trainer_pb2
from tinsmith_engine.host import EngineHost

pytestmark = pytest.mark.asyncio(loop_scope="module")
_PARK = trainer_control_pb2.ReleaseRunRequest.MODE_PARK
_PLACES = 2


@pytest_asyncio.fixture(loop_scope="module")
async def rig(tmp_path: Path, engine_host: EngineHost) -> AsyncIterator[TrainerRig]:
    async with running_trainer(tmp_path / "trainer", engine_host, max_runs=_PLACES) as rig:
        yield rig


async def test_many_runs_one_after_another_need_one_place(rig: TrainerRig) -> None:
    made: list[RunClient] = []
    for number in range(40):
        run = await rig.new_run(f"run-{number}", seed=number)
        assert await run.step(make_datum(seed=number)) == 1
        await release(rig, run, _PARK)
        made.append(run)
    for run in made[::13]:
        done = await run.wait(2)
        assert response_of(done, trainer_pb2.OptimStepResponse()).version == 1
        assert (await run.status()).version == 1
        await release(rig, run, _PARK)


async def test_a_run_that_slept_goes_on_with_the_same_bits(rig: TrainerRig) -> None:
    awake, slept = await rig.new_run("awake"), await rig.new_run("slept")
    for run in (awake, slept):
        await run.step(make_datum(seed=1))
        await run.wait(await run.forward_backward(make_datum(seed=2)))
    await release(rig, slept, _PARK)
    for run in (awake, slept):
        done = await run.wait(await run.optim_step())
        assert response_of(done, trainer_pb2.OptimStepResponse()).version == 2
    assert await slept.bits("a") == await awake.bits("a")


async def test_a_run_waits_for_a_place_to_come_back_to(rig: TrainerRig) -> None:
    past = await rig.new_run("past")
    await past.step()
    await release(rig, past, _PARK)
    others = [await rig.new_run(f"other-{number}") for number in range(_PLACES)]
    error = await refusal(past.status())
    assert (error.reason, error.retry_after_s is not None) == ("CAPACITY_EXHAUSTED", True)
    await release(rig, others[0], _PARK)
    assert (await past.status()).version == 1


async def test_a_start_takes_in_only_what_has_something_to_do(rig: TrainerRig) -> None:
    busy = await rig.new_run("busy")
    for number in range(_PLACES):
        run = await rig.new_run(f"idle-{number}") if number else busy
        await run.step()
        await release(rig, run, _PARK)
    more = await rig.new_run("more")
    await more.step()
    await release(rig, more, _PARK)
    with rig.engine_held():
        await busy.forward_backward()
        left_behind = rig.copy_data()
    # There are more runs than places.
    await rig.recover_from(left_behind)
    query = "SELECT state FROM operations WHERE run = ? AND sequence_number = 3"

    async def is_done() -> bool:
        return query_ledger(left_behind, query, busy.name) == [("succeeded",)]

    await eventually(is_done)
    assert (await more.status()).version == 1


async def test_a_sleeping_run_can_be_deleted(rig: TrainerRig) -> None:
    run = await rig.new_run("deleted")
    await run.step()
    await release(rig, run, _PARK)
    await release(rig, run, trainer_control_pb2.ReleaseRunRequest.MODE_DELETE)
    assert (await refusal(run.status())).reason == "RUN_NOT_FOUND"


async def test_results_of_a_sleeping_run_expire(rig: TrainerRig) -> None:
    run = await rig.new_run("expiring")
    await run.step()
    await release(rig, run, _PARK)
    count = "SELECT count(result) FROM operations WHERE run = ?"
    assert query_ledger(rig.config.data_dir, count, run.name) == [(2,)]
    await rig.sweep(30 * 24 * 3600.0)
    await rig.sweep(30 * 24 * 3600.0)
    assert query_ledger(rig.config.data_dir, count, run.name) == [(0,)]


async def test_runs_that_sleep_take_no_place_while_their_results_expire(rig: TrainerRig) -> None:
    await rig.new_run("awake")
    for number in range(5):
        run = await rig.new_run(f"of-the-past-{number}")
        await run.step()
        await release(rig, run, _PARK)
    count = "SELECT count(result) FROM operations WHERE run LIKE '%of-the-past%'"
    assert query_ledger(rig.config.data_dir, count) == [(10,)]
    await rig.sweep(30 * 24 * 3600.0)
    assert query_ledger(rig.config.data_dir, count) == [(0,)]
    # Of two places one is free all the time.
    assert await (await rig.new_run("next")).step() == 1
