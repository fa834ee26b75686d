"""What the ledger counts: with each result, by key and day, and never twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.ledger_suite import RUN, checkpoint, operation, outcome, run_record

from tinsmith_runtime.ledger import Commit, Holder, Ledger, PostgresLedger, SqliteLedger
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.usage import DAY_S, NOTHING, UsageAmounts, UsageKey


@pytest.fixture(params=["sqlite", "postgres"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    made: Ledger
    if request.param == "sqlite":
        made = SqliteLedger(tmp_path / "ledger.db")
    else:
        url = request.getfixturevalue("postgres_url")
        made = PostgresLedger(url, holder=Holder("trainer-0", "only"))
    await made.open()
    await made.adopt_run(run_record())
    yield made
    await made.close()


def key(key_id: str = "", day: int = 0) -> UsageKey:
    return UsageKey(project="p", run=RUN, key_id=key_id, day=day)


def trained(num_tokens: int, engine_s: float = 0.25) -> UsageAmounts:
    return UsageAmounts(num_trained_tokens=num_tokens, engine_s=engine_s)


def read(num_tokens: int) -> UsageAmounts:
    return UsageAmounts(num_prefilled_tokens=num_tokens, engine_s=0.5)


async def accept(ledger: Ledger, *numbers: int, **fields: Any) -> None:
    for number in numbers:
        await ledger.submit(operation(number, **fields))


async def test_a_commit_counts_by_key_and_day(ledger: Ledger) -> None:
    await accept(ledger, 1, 2, key_id="k")
    await accept(ledger, 3, key_id="l")
    outcomes = [
        outcome(1, used=trained(10)),
        outcome(2, used=read(5), finish_time_s=DAY_S + 1.0),
        outcome(3, result=None, used=trained(0)),
    ]
    (records,) = await ledger.finish_all([Commit(run=RUN, epoch=1, outcomes=outcomes)])
    assert [each.key_id for each in records] == ["k", "k", "l"]  # type: ignore[union-attr]
    assert await ledger.unreported_usage(10) == {
        key("k"): trained(10),
        key("k", 1): read(5),
        key("l"): trained(0),
    }


async def test_what_is_not_committed_is_not_counted(ledger: Ledger) -> None:
    await accept(ledger, 1)
    assert await ledger.unreported_usage(10) == {}
    await ledger.finish(RUN, 1, [outcome(1, used=trained(10))])
    await accept(ledger, 2)
    # Another result of the same operation, and a result under another epoch.
    for number, epoch in ((1, 1), (2, 7)):
        with pytest.raises(FencedError):
            await ledger.finish(RUN, epoch, [outcome(number, plan="x", used=trained(100))])
    (answer,) = await ledger.finish_all(
        [Commit(run=RUN, epoch=1, outcomes=[outcome(1, plan="y", used=trained(100))])]
    )
    assert isinstance(answer, FencedError)
    assert await ledger.unreported_usage(10) == {key(): trained(10)}


async def test_a_commit_with_a_checkpoint_counts_as_well(ledger: Ledger) -> None:
    await accept(ledger, 1)
    await ledger.finish(RUN, 1, [outcome(1, used=trained(3))], checkpoints=[checkpoint("a")])
    assert await ledger.unreported_usage(10) == {key(): trained(3)}
    assert await ledger.stored_bytes() == {("p", RUN): 10}


async def test_a_total_is_reported_again_once_it_has_grown(ledger: Ledger) -> None:
    await accept(ledger, 1, 2)
    await ledger.finish(RUN, 1, [outcome(1, used=trained(10))])
    first = await ledger.unreported_usage(10)
    await ledger.finish(RUN, 1, [outcome(2, used=trained(10))])
    # It grew while the report was on its way: the mark is not for what the report had.
    await ledger.note_usage_reported(first, forget_before=0)
    second = await ledger.unreported_usage(10)
    assert second == {key(): trained(20, 0.5)}
    await ledger.note_usage_reported(second, forget_before=0)
    assert await ledger.unreported_usage(10) == {}
    await accept(ledger, 3)
    await ledger.finish(RUN, 1, [outcome(3, used=trained(1))])
    assert await ledger.unreported_usage(10) == {key(): trained(21, 0.75)}


async def test_usage_outlives_the_run(ledger: Ledger) -> None:
    await accept(ledger, 1)
    await ledger.finish(RUN, 1, [outcome(1, used=trained(10))])
    await ledger.delete_run(RUN, 1)
    assert await ledger.unreported_usage(10) == {key(): trained(10)}
    assert sum((await ledger.unreported_usage(10)).values(), NOTHING) == trained(10)


async def test_reported_totals_of_old_days_are_forgotten(ledger: Ledger) -> None:
    await accept(ledger, 1, 2)
    outcomes = [outcome(1, used=trained(1)), outcome(2, used=trained(2), finish_time_s=9.0 * DAY_S)]
    await ledger.finish(RUN, 1, outcomes)
    totals = await ledger.unreported_usage(10)
    await ledger.note_usage_reported({key(): totals[key()]}, forget_before=5)
    assert await ledger.unreported_usage(10) == {key(day=9): trained(2)}
