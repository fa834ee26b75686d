"""Numbers of requests that are refused: near ones are used up, far ones leave no trace."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.trainer_harness import (
    TrainerRig,
    make_datum,
    query_ledger,
    refusal,
    running_trainer,
)

from tinsmith_engine.host import EngineHost

pytestmark = pytest.mark.asyncio(loop_scope="module")
_WINDOW = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(
    tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost
) -> AsyncIterator[TrainerRig]:
    data_dir: Path = tmp_path_factory.mktemp("trainer")
    async with running_trainer(data_dir, engine_host, max_queued_operations=_WINDOW) as rig:
        yield rig


async def test_a_wrong_number_does_not_make_a_run_unusable(rig: TrainerRig) -> None:
    run = await rig.new_run("far")
    error = await refusal(run.forward_backward(make_datum(num_tokens=0), number=10**15))
    assert error.reason != "INTERNAL"
    assert (await run.resume()).next_sequence_number == 1
    assert not (await run.wait(await run.forward_backward(number=1))).HasField("error")


async def test_refusals_leave_no_more_rows_than_may_wait(rig: TrainerRig) -> None:
    run = await rig.new_run("flood")
    for number in range(2, 100):
        await refusal(run.forward_backward(make_datum(num_tokens=0), number=number))
    query = "SELECT count(*) FROM operations WHERE run = ?"
    [(num_rows,)] = query_ledger(rig.config.data_dir, query, run.name)
    assert num_rows <= _WINDOW
