"""A step behind a failed batch, of clients that fetch results in the background."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.trainer_harness import (
    RunClient,
    TrainerRig,
    error_of,
    make_datum,
    metadata_of,
    refusal,
    response_of,
    running_trainer,
)

from tinsmith.v1 import trainer_pb2
from tinsmith_engine.host import EngineHost

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    data_dir: Path = tmp_path_factory.mktemp("trainer")
    async with running_trainer(data_dir, engine_host) as rig:
        yield rig


async def _fail(run: RunClient, *, is_delivered: bool) -> int:
    """Have a batch refused; return its number."""
    await refusal(run.forward_backward(loss="mse"))
    number = (await run.resume()).next_sequence_number - 1
    if is_delivered:
        await run.wait(number)
    return number


async def _step(run: RunClient) -> str:
    """Return why a step was refused; empty if it was applied."""
    done = await run.wait(await run.optim_step(observes_deliveries=True))
    if done.HasField("error"):
        return error_of(done).reason
    assert response_of(done, trainer_pb2.OptimStepResponse()).version > 0
    return ""


async def test_the_next_batch_is_a_new_accumulation_once_the_failure_was_delivered(
    rig: TrainerRig,
) -> None:
    run, plain = await rig.new_run("caught"), await rig.new_run("caught-plain")
    await plain.step(make_datum(seed=3))
    await _fail(run, is_delivered=True)
    await run.forward_backward(make_datum(seed=3))
    assert await _step(run) == ""
    assert await run.bits("a") == await plain.bits("a")


async def test_a_failure_that_was_not_delivered_fails_the_step_once(rig: TrainerRig) -> None:
    run = await rig.new_run("unknown")
    await _fail(run, is_delivered=False)
    await run.forward_backward()
    assert await _step(run) == "GRADIENT_INCOMPLETE"
    await run.forward_backward()
    assert await _step(run) == ""


async def test_a_part_that_was_sent_before_the_failure_was_known_fails_the_step(
    rig: TrainerRig,
) -> None:
    run = await rig.new_run("half")
    await run.forward_backward()
    await _fail(run, is_delivered=True)
    await run.forward_backward()
    assert await _step(run) == "GRADIENT_INCOMPLETE"
    late = await rig.new_run("late")
    number = await _fail(late, is_delivered=False)
    await late.forward_backward()
    await late.wait(number)
    assert await _step(late) == "GRADIENT_INCOMPLETE"


async def test_a_step_alone_behind_a_known_failure_has_no_gradient(rig: TrainerRig) -> None:
    run = await rig.new_run("alone")
    await _fail(run, is_delivered=True)
    assert await _step(run) == "NO_GRADIENT"


async def test_one_of_two_failures_that_is_not_known_fails_the_step(rig: TrainerRig) -> None:
    run = await rig.new_run("two")
    await _fail(run, is_delivered=False)
    await _fail(run, is_delivered=True)
    await run.forward_backward()
    assert await _step(run) == "GRADIENT_INCOMPLETE"


async def test_what_a_sender_could_know_outlives_a_kill(rig: TrainerRig) -> None:
    run, plain = await rig.new_run("killed"), await rig.new_run("killed-plain")
    await plain.step(make_datum(seed=4))
    await _fail(run, is_delivered=True)
    await run.wait(await run.forward_backward(make_datum(seed=4)))
    half = await rig.new_run("killed-half")
    await half.wait(await half.forward_backward())
    await _fail(half, is_delivered=True)
    with rig.engine_held():
        waiting = await run.optim_step(observes_deliveries=True)
        refused = await half.optim_step(observes_deliveries=True)
        left_behind = rig.copy_data()
    await rig.recover_from(left_behind)
    number = metadata_of(waiting).sequence_number
    assert response_of(await run.wait(number), trainer_pb2.OptimStepResponse()).version == 1
    assert await run.bits("a") == await plain.bits("a")
    number = metadata_of(refused).sequence_number
    assert error_of(await half.wait(number)).reason == "GRADIENT_INCOMPLETE"


async def test_a_step_says_in_one_way_what_its_client_knows(rig: TrainerRig) -> None:
    run = await rig.new_run("both")
    error = await refusal(run.optim_step(observed=1, observes_deliveries=True))
    assert (error.reason, error.metadata["field"]) == ("INVALID_FIELD", "observed_sequence_number")
