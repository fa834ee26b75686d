"""A process that lost a run and does not know it changes nothing of the run, whatever it does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.runtime.ledger_suite import RUN, attempts, operation, run_record

from tinsmith_runtime.ledger import Holder, Ledger, PostgresLedger, SqliteLedger
from tinsmith_runtime.ledger.records import FencedError

_LOST, _HELD = 1, 2


@pytest.fixture(params=["sqlite", "postgres"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    """A ledger whose run was taken under a higher epoch, with an operation that waits."""
    ledger: Ledger
    if request.param == "sqlite":
        ledger = SqliteLedger(tmp_path / "ledger.db")
    else:
        url = request.getfixturevalue("postgres_url")
        ledger = PostgresLedger(url, holder=Holder("trainer-0", "only"))
    await ledger.open()
    await ledger.adopt_run(run_record(epoch=_LOST))
    await ledger.submit(operation(1))
    await ledger.adopt_run(run_record(epoch=_HELD))
    yield ledger
    await ledger.close()


async def test_attempts_of_a_lost_run_do_not_count(ledger: Ledger) -> None:
    await ledger.start_all([attempts({1: 7}, epoch=_LOST)])
    [waiting] = await ledger.operations_from(RUN, 1)
    assert waiting.num_attempts == 0
    await ledger.start_all([attempts({1: 1}, epoch=_HELD)])
    [begun] = await ledger.operations_from(RUN, 1)
    assert begun.num_attempts == 1


async def test_a_lost_run_is_not_said_to_have_diverged(ledger: Ledger) -> None:
    with pytest.raises(FencedError):
        await ledger.mark_diverged(RUN, _LOST)
    assert [run.replay_diverged for run in await ledger.list_runs()] == [False]
    await ledger.mark_diverged(RUN, _HELD)
    assert [run.replay_diverged for run in await ledger.list_runs()] == [True]
