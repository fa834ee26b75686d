"""What a gateway promised and counted: kept in order, told once it ended, forgotten in time."""

from __future__ import annotations

import pytest
from tests.support.clock import Clock

from tinsmith_gateway.tinker.promises.future_store import (
    RECORDING,
    RECORDING_RETENTION_S,
    SAMPLE,
    EndedFuture,
    FutureStore,
    Span,
)
from tinsmith_gateway.tinker.promises.usage import HOUR_S, HourlyUsage, UsageKey
from tinsmith_runtime.errors import AbortedError, StorageUnavailableError
from tinsmith_runtime.sql import Database


@pytest.fixture
def clock() -> Clock:
    return Clock(10 * HOUR_S + 1.5)


@pytest.fixture
def store(database: Database, clock: Clock) -> FutureStore:
    return FutureStore(database, wall_clock=clock)


async def test_a_promise_is_new_once_and_has_one_end(store: FutureStore) -> None:
    assert await store.add("p", "f", SAMPLE, owner="o", request=b"asked")
    assert not await store.add("p", "f", SAMPLE, owner="o", request=b"asked otherwise")
    assert await store.add("q", "f", SAMPLE)
    promised = await store.get("p", "f")
    assert promised is not None
    assert (promised.project, promised.future, promised.kind) == ("p", "f", SAMPLE)
    assert (promised.owner, promised.request, promised.revision) == ("o", b"asked", 0)
    assert not promised.is_ended
    first = await store.finish("p", "f", result=b"")
    await store.finish("p", "f", error=AbortedError("too late"))
    ended = await store.get("p", "f")
    assert ended is not None
    # An end without a byte is one, and what was asked is not kept beyond it.
    assert ended.is_ended
    assert (ended.result, ended.error, ended.revision, ended.request) == (b"", None, first, b"")
    other = await store.get("q", "f")
    assert other is not None
    assert not other.is_ended
    assert await store.get("p", "g") is None
    assert await store.get("p", "f\0") is None


async def test_a_failure_is_told_as_it_was(store: FutureStore) -> None:
    await store.add("p", "f", SAMPLE)
    await store.finish("p", "f", error=AbortedError("given up"))
    ended = await store.get("p", "f")
    assert ended is not None
    assert ended.is_ended
    assert ended.result is None
    assert (type(ended.error), ended.error and ended.error.message) == (AbortedError, "given up")


async def test_what_has_not_ended_is_gone_on_with_in_its_order(
    store: FutureStore, clock: Clock
) -> None:
    for future in ("c", "a", "b"):
        await store.add("p", future, SAMPLE)
        clock.now_s += 1
    await store.add_ended("p", "r", SAMPLE, result=b"x")
    await store.add("p", "other", "another kind")
    await store.finish("p", "a", result=b"x")
    assert [each.future for each in await store.pending(SAMPLE)] == ["c", "b"]


async def test_a_refused_promise_is_forgotten(store: FutureStore) -> None:
    for project in ("p", "q"):
        await store.add(project, "f", SAMPLE)
    await store.discard("p", "f")
    assert await store.get("p", "f") is None
    assert await store.get("q", "f") is not None


async def test_ends_are_told_in_their_order_across_a_restart(
    store: FutureStore, database: Database, clock: Clock
) -> None:
    for future in ("a", "b"):
        await store.add("p", future, SAMPLE, owner="o")
    await store.finish("p", "b", result=b"123")
    await store.add_ended("p", "e", SAMPLE, owner="o", result=b"")
    # Of another owner.
    await store.add_ended("p", "x", SAMPLE, owner="other", result=b"")
    again = FutureStore(database, wall_clock=clock)
    await again.load()
    await again.finish("p", "a", error=AbortedError("given up"))
    everything = [EndedFuture("b", 1, 3), EndedFuture("e", 2, 0), EndedFuture("a", 4, None)]
    assert await again.ended("o", after=0, limit=9) == everything
    assert await again.ended("o", after=1, limit=9) == everything[1:]
    assert await again.ended("o", after=0, limit=2) == everything[:2]


async def test_an_end_that_is_kept_again_changes_nothing(store: FutureStore) -> None:
    for result in (b"first", b"second"):
        await store.add_ended("p", "f", RECORDING, owner="o", request=b"r", result=result)
    kept = await store.get("p", "f")
    assert kept is not None
    assert (kept.kind, kept.owner, kept.request, kept.result) == (RECORDING, "o", b"r", b"first")
    assert kept.revision > 0


async def test_times_of_futures_are_told_oldest_first(store: FutureStore, clock: Clock) -> None:
    begin_s = clock.now_s
    await store.add("p", "late", SAMPLE, owner="o")
    clock.now_s += 1
    await store.add("p", "early", SAMPLE, owner="o")
    clock.now_s += 1
    await store.finish("p", "late", result=b"")
    assert await store.spans("o") == [
        Span("late", SAMPLE, begin_s, begin_s + 2),
        Span("early", SAMPLE, begin_s + 1, None),
    ]


async def left(store: FutureStore) -> set[str]:
    return {name for name in ("got", "asked", "open", "kept") if await store.get("p", name)}


async def test_results_are_kept_as_long_as_promised(store: FutureStore, clock: Clock) -> None:
    for name in ("got", "asked", "open"):
        await store.add("p", name, SAMPLE)
    for name in ("got", "asked"):
        await store.finish("p", name, result=b"")
    await store.add_ended("p", "kept", RECORDING, result=b"")
    # Of another project there is nothing, and nothing comes of it.
    for project, future in (("p", "got"), ("q", "asked"), ("p", "none"), ("p", "\0")):
        store.note_retrieved(project, future)

    async def sweep() -> int:
        return await store.sweep(retrieved_s=10, unretrieved_s=RECORDING_RETENTION_S * 2)

    assert await sweep() == 0
    clock.now_s += 5
    # It was got for the first time before: that counts.
    store.note_retrieved("p", "got")
    assert await sweep() == 0
    clock.now_s += 5
    assert await sweep() == 0
    clock.now_s += 1
    assert await sweep() == 1
    assert await left(store) == {"asked", "open", "kept"}
    clock.now_s += RECORDING_RETENTION_S - 11
    assert await sweep() == 0
    clock.now_s += 1
    assert await sweep() == 1
    assert await left(store) == {"asked", "open"}
    clock.now_s += RECORDING_RETENTION_S
    assert await sweep() == 1
    assert await left(store) == {"open"}


async def test_use_is_counted_by_hour_and_the_largest_comes_first(
    database: Database, clock: Clock
) -> None:
    usage = HourlyUsage(database, wall_clock=clock)
    hour_s = 10 * HOUR_S
    for kind, count in (("a", 1), ("b", 5), ("a", 2), ("c", 0)):
        usage.add("p", "s", "m", kind, count)
    usage.add("q", "s", "m", "a", 100)
    await usage.flush()
    usage.add("p", "s", "m", "a", 1)
    clock.now_s += HOUR_S
    usage.add("p", "s", "m", "a", 7)
    counts = [
        (UsageKey("p", hour_s, "s", "m", "b"), 5),
        (UsageKey("p", hour_s, "s", "m", "a"), 4),
        (UsageKey("p", hour_s + HOUR_S, "s", "m", "a"), 7),
    ]
    assert await usage.read("p", begin_s=0, end_s=clock.now_s) == counts
    # Of a window its beginning belongs to it, its end does not.
    assert await usage.read("p", begin_s=hour_s, end_s=hour_s + HOUR_S) == counts[:2]
    assert await usage.read("p", begin_s=hour_s + 1, end_s=clock.now_s) == counts[2:]
    again = HourlyUsage(database, wall_clock=clock)
    assert await again.read("q", begin_s=0, end_s=clock.now_s) == [
        (UsageKey("q", hour_s, "s", "m", "a"), 100)
    ]


async def test_what_could_not_be_written_is_counted_later(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = HourlyUsage(database, wall_clock=clock)
    usage.add("p", "s", "m", "a", 3)

    async def fail(_: object) -> None:
        usage.add("p", "s", "m", "a", 1)
        raise StorageUnavailableError("the database is away")

    with monkeypatch.context() as patched:
        patched.setattr(database, "write", fail)
        with pytest.raises(StorageUnavailableError):
            await usage.flush()
    ((_, count),) = await usage.read("p", begin_s=0, end_s=clock.now_s)
    assert count == 4
