"""The past of a run in the ledger, and the copying of it, on both databases."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.ledger_suite import (
    OTHER,
    RUN,
    cutoffs,
    operation,
    outcome,
    run_record,
    snapshot,
)

from tinsmith_runtime.errors import AbortedError
from tinsmith_runtime.ledger import (
    Holder,
    Ledger,
    OperationState,
    PostgresLedger,
    RunCopy,
    SqliteLedger,
)
from tinsmith_runtime.ledger.records import FencedError

_KINDS = frozenset({"forward_backward", "optim_step"})
_NUMBERS = range(1, 7)


@pytest.fixture(params=["sqlite", "postgres"])
async def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ledger]:
    """A ledger with a run of three steps, a batch and a step each, and an empty run."""
    opened: Ledger
    if request.param == "sqlite":
        opened = SqliteLedger(tmp_path / "ledger.db")
    else:
        url = request.getfixturevalue("postgres_url")
        opened = PostgresLedger(url, holder=Holder("trainer-0", "only"))
    await opened.open()
    for name in (RUN, OTHER):
        await opened.adopt_run(run_record(name))
    for number in _NUMBERS:
        kind = "optim_step" if number % 2 == 0 else "forward_backward"
        path = f"{RUN}/payloads/{number}" if number == 3 else None
        payload = None if path else b"payload"
        await opened.submit(operation(number, kind=kind, payload=payload, payload_path=path))
    for number in _NUMBERS:
        result = b"%d" % number if number != 5 else None
        await opened.finish(RUN, 1, [outcome(number, result=result, version=number // 2)])
    yield opened
    await opened.close()


def copy(**fields: Any) -> RunCopy:
    values: dict[str, Any] = {
        "source": RUN,
        "target": OTHER,
        "epoch": 1,
        "rows_after": 0,
        "requests_after": 0,
        "through": 4,
        "snapshot": None,
        "version": 2,
        "rerun_from": 0,
        "submit_time_s": 50.0,
        "replayed_kinds": _KINDS,
        "rerun_kinds": _KINDS,
    }
    return RunCopy(**values | fields)


async def rows(ledger: Ledger, run: str) -> list[Any]:
    """Return the rows of a run, under one name."""
    found = await ledger.operations_from(run, 1)
    return [dataclasses.replace(record, run=RUN) for record in found]


async def test_the_past_of_a_run_is_told(ledger: Ledger) -> None:
    await ledger.add_snapshot(snapshot(4), 1)
    found = await ledger.history(RUN, {"optim_step"})
    assert found is not None
    assert [(e.sequence_number, e.is_success, e.was_begun, e.result) for e in found.ended] == [
        (2, True, True, b"2"),
        (4, True, True, b"4"),
        (6, True, True, b"6"),
    ]
    assert (found.run.version, found.is_here) == (3, True)
    assert (found.expired_through, found.payloads_through) == (0, 0)
    assert found.snapshots == (snapshot(4),)
    assert await ledger.history("projects/p/trainingRuns/none", {"optim_step"}) is None


async def test_a_copy_has_the_rows_of_its_source_under_its_own_name(ledger: Ledger) -> None:
    assert await ledger.stored_requests(copy()) == [f"{RUN}/payloads/3"]
    assert await ledger.copy_run(copy())
    expected = [
        dataclasses.replace(
            record,
            payload_path=record.payload_path and f"{OTHER}/payloads/3",
        )
        for record in await rows(ledger, RUN)
    ]
    assert await rows(ledger, OTHER) == expected[:4]
    point = await ledger.resume_point(OTHER)
    assert (point.next_sequence_number, point.latest_revision) == (5, 4)
    [version] = [run.version for run in await ledger.list_runs() if run.name == OTHER]
    assert version == 2
    # It goes on by itself.
    await ledger.submit(operation(5, run=OTHER))
    [record] = await ledger.finish(OTHER, 1, [outcome(5)])
    assert record.revision == 5


async def test_above_a_snapshot_only_what_is_needed_is_copied(ledger: Ledger) -> None:
    base = snapshot(2, OTHER)
    chosen = copy(rows_after=1, requests_after=2, snapshot=base)
    assert await ledger.copy_run(chosen)
    found = await rows(ledger, OTHER)
    assert [record.sequence_number for record in found] == [2, 3, 4]
    assert [bool(record.payload or record.payload_path) for record in found] == [False, True, True]
    assert await ledger.list_snapshots(OTHER) == [base]
    history = await ledger.history(OTHER, _KINDS)
    assert history is not None
    assert (history.expired_through, history.payloads_through) == (1, 2)
    assert (await ledger.resume_point(OTHER)).next_sequence_number == 5


async def test_what_is_executed_anew_waits_as_if_it_had_just_been_sent(ledger: Ledger) -> None:
    assert await ledger.copy_run(copy(through=6, version=2, rerun_from=5))
    point = await ledger.resume_point(OTHER)
    assert point.next_sequence_number == 6
    [waiting] = point.pending
    source = (await rows(ledger, RUN))[5]
    assert dataclasses.replace(waiting, run=RUN) == dataclasses.replace(
        source,
        state=OperationState.PENDING,
        num_attempts=0,
        submit_time_s=50.0,
        finish_time_s=None,
        revision=0,
        result=None,
        plan=None,
    )
    # What failed is not tried again: it says what its failure meant.
    failed = (await rows(ledger, RUN))[4]
    assert (await rows(ledger, OTHER))[4] == dataclasses.replace(failed, payload=None)


async def test_nothing_is_copied_if_something_is_missing(ledger: Ledger) -> None:
    for number in (2, 4):
        await ledger.add_snapshot(snapshot(number), 1)
    dropped = await ledger.expire(RUN, 1, cutoffs(request_s=100.0))
    assert dropped.num_payloads == 2
    assert not await ledger.copy_run(copy())
    assert not await ledger.copy_run(copy(source="projects/p/trainingRuns/none"))
    assert await rows(ledger, OTHER) == []
    assert not await ledger.copy_run(copy(through=8, requests_after=2))
    assert await ledger.copy_run(copy(requests_after=2, snapshot=snapshot(2, OTHER)))


async def test_only_the_holder_of_an_empty_run_copies_into_it(ledger: Ledger) -> None:
    with pytest.raises(FencedError):
        await ledger.copy_run(copy(epoch=2))
    with pytest.raises(FencedError):
        await ledger.copy_run(copy(target="projects/p/trainingRuns/none"))
    await ledger.submit(operation(1, run=OTHER))
    with pytest.raises(AbortedError, match="has operations"):
        await ledger.copy_run(copy())


async def test_a_copy_outlives_its_source(ledger: Ledger) -> None:
    assert await ledger.copy_run(copy())
    before = await rows(ledger, OTHER)
    await ledger.delete_run(RUN, 1)
    assert await rows(ledger, OTHER) == before
