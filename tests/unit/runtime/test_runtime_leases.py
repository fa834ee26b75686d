"""Ownership of a run on a shared ledger: leases, take-overs, and writes that come too late."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest
from tests.unit.runtime.ledger_suite import (
    OTHER,
    RUN,
    checkpoint,
    operation,
    outcome,
    run_record,
    snapshot,
)

from tinsmith_runtime.errors import (
    AbortedError,
    OutcomeUnknownError,
    RunHeldError,
    RunNotFoundError,
)
from tinsmith_runtime.ledger import Holder, OperationState, PostgresLedger
from tinsmith_runtime.ledger.records import FencedError

TTL_S = 60.0
Open = Callable[[str, str], Awaitable[PostgresLedger]]


@pytest.fixture
async def open_ledger(postgres_url: str) -> AsyncIterator[Open]:
    async with contextlib.AsyncExitStack() as stack:

        async def open_one(worker: str, incarnation: str) -> PostgresLedger:
            ledger = PostgresLedger(postgres_url, holder=Holder(worker, incarnation))
            await ledger.open()
            stack.push_async_callback(ledger.close)
            return ledger

        yield open_one


@pytest.fixture
async def holder(open_ledger: Open) -> PostgresLedger:
    """A trainer that holds a run with two operations."""
    ledger = await open_ledger("a", "1")
    await ledger.renew(TTL_S)
    await ledger.adopt_run(run_record())
    for number in (1, 2):
        await ledger.submit(operation(number))
    return ledger


async def test_processes_on_one_database_agree_on_its_name(open_ledger: Open) -> None:
    first, second = await open_ledger("a", "1"), await open_ledger("b", "1")
    assert first.identity == second.identity
    assert first.incarnation == "1"


async def test_a_run_is_not_taken_from_a_trainer_that_is_alive(
    holder: PostgresLedger, open_ledger: Open
) -> None:
    other = await open_ledger("b", "1")
    with pytest.raises(RunHeldError) as refusal:
        await other.adopt_run(run_record(epoch=2))
    assert 0 < (refusal.value.retry_after_s or 0) <= TTL_S
    assert await holder.renew(TTL_S) == {RUN: 1}


@pytest.mark.parametrize("how", ["expired", "released", "left", "restarted"])
async def test_a_run_is_taken_once_its_trainer_is_gone(
    holder: PostgresLedger, open_ledger: Open, how: str
) -> None:
    match how:
        case "expired":
            await holder.renew(-1.0)
        case "released":
            await holder.release_run(RUN, 1)
        case "left":
            await holder.leave()
    other = await open_ledger("a" if how == "restarted" else "b", "2")
    await other.renew(TTL_S)
    assert (await other.adopt_run(run_record(epoch=2))).epoch == 2
    assert await other.renew(TTL_S) == {RUN: 2}
    assert await holder.renew(TTL_S) == {}
    point = await other.resume_point(RUN)
    assert [pending.sequence_number for pending in point.pending] == [1, 2]


async def test_two_processes_do_not_hold_a_run_under_one_epoch(
    holder: PostgresLedger, open_ledger: Open
) -> None:
    other = await open_ledger("b", "1")
    with pytest.raises(AbortedError) as refusal:
        await other.adopt_run(run_record())
    assert refusal.value.metadata["epoch"] == "1"
    assert (await holder.adopt_run(run_record())).epoch == 1


async def test_nothing_is_written_under_an_epoch_that_passed(
    holder: PostgresLedger, open_ledger: Open
) -> None:
    await holder.adopt_run(run_record(OTHER))
    await holder.renew(-1.0)
    other = await open_ledger("b", "1")
    await other.adopt_run(run_record(epoch=2))
    for write in (
        holder.submit(operation(3)),
        holder.refuse(operation(3), b"why"),
        holder.finish(RUN, 1, [outcome(1)]),
        holder.finish(RUN, 1, [outcome(1)], checkpoints=[checkpoint("a")]),
        holder.give_up(RUN, 1, [3], b"gap"),
        holder.add_snapshot(snapshot(1), 1),
        holder.release_run(RUN, 1),
        holder.delete_run(RUN, 1),
    ):
        with pytest.raises(FencedError):
            await write
    records = await other.operations_from(RUN, 1)
    assert [record.state for record in records] == [OperationState.PENDING] * 2
    assert await other.list_snapshots(RUN) == []
    # Its other run is its own still.
    assert (await holder.submit(operation(1, run=OTHER))).state is OperationState.PENDING


async def test_a_commit_that_waits_for_a_take_over_is_fenced(
    holder: PostgresLedger, postgres_url: str
) -> None:
    """The take-over is not committed yet when the commit begins: it must not look through it."""
    session = await asyncpg.connect(postgres_url, server_settings={"search_path": "ledger"})
    try:
        async with session.transaction():
            await session.execute("UPDATE leases SET epoch = 2, holder = 'b/1' WHERE run = $1", RUN)
            writes = [
                asyncio.ensure_future(write)
                for write in (
                    holder.finish(RUN, 1, [outcome(1)]),
                    holder.submit(operation(3)),
                    holder.add_snapshot(snapshot(1), 1),
                )
            ]
            await _wait_for_locks(session, len(writes))
    finally:
        await session.close()
    answers = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(answer) for answer in answers] == [FencedError] * 3
    records = await holder.operations_from(RUN, 1)
    assert [record.sequence_number for record in records] == [1, 2]


async def test_a_take_over_waits_for_a_commit_that_has_begun(
    holder: PostgresLedger, open_ledger: Open, postgres_url: str
) -> None:
    await holder.renew(-1.0)
    other = await open_ledger("b", "1")
    session = await asyncpg.connect(postgres_url, server_settings={"search_path": "ledger"})
    try:
        async with session.transaction():
            # What a commit locks, held open.
            await session.execute("SELECT 1 FROM leases WHERE run = $1 FOR SHARE", RUN)
            adoption = asyncio.ensure_future(other.adopt_run(run_record(epoch=2)))
            await _wait_for_locks(session, 1)
            assert not adoption.done()
    finally:
        await session.close()
    assert (await adoption).epoch == 2


async def test_a_process_hears_that_its_run_was_taken(
    holder: PostgresLedger, open_ledger: Open
) -> None:
    heard = asyncio.Event()
    watching = asyncio.create_task(holder.watch_lease(heard.set))
    other = await open_ledger("b", "1")
    epoch = 1
    async with asyncio.timeout(20):
        while not heard.is_set():
            # Listening has no answer to wait for, so that it is taken until it is heard.
            epoch += 1
            await holder.renew(-1.0)
            await other.adopt_run(run_record(epoch=epoch))
            epoch += 1
            await other.release_run(RUN, epoch - 1)
            await holder.adopt_run(run_record(epoch=epoch))
    watching.cancel()


async def test_a_request_that_waits_for_a_deletion_is_told_of_it(
    holder: PostgresLedger, postgres_url: str
) -> None:
    """It is no lost run, for which the whole process would end."""
    session = await asyncpg.connect(postgres_url, server_settings={"search_path": "ledger"})
    try:
        async with session.transaction():
            await session.execute("DELETE FROM leases WHERE run = $1", RUN)
            write = asyncio.ensure_future(holder.submit(operation(3)))
            await _wait_for_locks(session, 1)
    finally:
        await session.close()
    with pytest.raises(RunNotFoundError):
        await write


async def test_of_two_adoptions_of_a_new_run_the_higher_epoch_stays(
    open_ledger: Open, postgres_url: str
) -> None:
    late = await open_ledger("b", "1")
    session = await asyncpg.connect(postgres_url, server_settings={"search_path": "ledger"})
    try:
        async with session.transaction():
            query = "INSERT INTO leases (run, epoch, holder) VALUES ($1, 2, 'a/1')"
            await session.execute(query, RUN)
            adoption = asyncio.ensure_future(late.adopt_run(run_record()))
            await _wait_for_locks(session, 1)
        with pytest.raises(AbortedError):
            await adoption
        rows = await session.fetch("SELECT epoch, holder FROM leases")
    finally:
        await session.close()
    assert [tuple(row) for row in rows] == [(2, "a/1")]


async def test_no_operation_outlives_its_run(holder: PostgresLedger, postgres_url: str) -> None:
    session = await asyncpg.connect(postgres_url, server_settings={"search_path": "ledger"})
    try:
        async with session.transaction():
            # What a submit does, while the run is deleted.
            await session.execute("SELECT 1 FROM leases WHERE run = $1 FOR SHARE", RUN)
            deletion = asyncio.ensure_future(holder.delete_run(RUN, 1))
            await _wait_for_locks(session, 1)
            await session.execute(
                "INSERT INTO operations (run, sequence_number, kind, digest, state, num_attempts,"
                " submit_time_s, revision) VALUES ($1, 3, 'forward', '', 'pending', 0, 0, 0)",
                RUN,
            )
    finally:
        await session.close()
    await deletion
    assert await holder.operations_from(RUN, 1) == []


@pytest.mark.parametrize("took_place", [True, False])
async def test_a_save_whose_outcome_is_unknown_is_committed_once(
    holder: PostgresLedger, took_place: bool
) -> None:
    database = holder._database
    write = database.write

    async def lost(statements: Callable[[object], object]) -> object:
        database.write = write  # type: ignore[method-assign]
        if took_place:
            await write(statements)  # type: ignore[arg-type]
        raise OutcomeUnknownError("the answer was lost")

    database.write = lost  # type: ignore[method-assign, assignment]
    [record] = await holder.finish(RUN, 1, [outcome(1)], checkpoints=[checkpoint("a")])
    assert record.state is OperationState.SUCCEEDED
    assert await holder.get_checkpoint(checkpoint("a").name) is not None
    assert (await holder.resume_point(RUN)).next_sequence_number == 2


async def test_many_operations_go_in_few_statements(holder: PostgresLedger) -> None:
    statements = 0
    fetch = holder._pool.fetch

    async def counted(statement: str, *arguments: object) -> object:
        nonlocal statements
        statements += 1
        return await fetch(statement, *arguments)

    holder._pool.fetch = counted  # type: ignore[method-assign, assignment]
    records = await asyncio.gather(*(holder.submit(operation(n)) for n in range(3, 203)))
    assert [record.sequence_number for record in records] == list(range(3, 203))
    assert statements <= 3


async def _wait_for_locks(session: asyncpg.Connection, num_waiting: int) -> None:
    """Return once so many statements of others wait for a lock."""
    query = "SELECT count(*) FROM pg_locks WHERE NOT granted"
    async with asyncio.timeout(20):
        while await session.fetchval(query) < num_waiting:
            await asyncio.sleep(0.01)
