"""Usage at the scheduler: totals that are lost, repeated or overtaken, and what budgets see."""

from __future__ import annotations

import datetime
from collections import defaultdict
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith_runtime.usage import (
    DAY_S,
    NOTHING,
    Budget,
    Period,
    Quantity,
    UsageAmounts,
    UsageKey,
    UsageReport,
    day_of,
)
from tinsmith_scheduler.store.tables import metadata, usage_days, usage_rows, usage_stored
from tinsmith_scheduler.usage import usage_store
from tinsmith_scheduler.usage.usage_store import UsageQuery, UsageRow

_NOW_S = 20_786 * DAY_S + 3600.0  # 2026-11-29, early in the day.
_TODAY = day_of(_NOW_S)

_AMOUNTS = st.builds(
    UsageAmounts,
    num_trained_tokens=st.integers(0, 10**9),
    num_sampled_tokens=st.integers(0, 10**9),
    num_prefilled_tokens=st.integers(0, 10**9),
    # Sums of eighths have no rounding.
    engine_s=st.integers(0, 8_000).map(lambda eighths: eighths / 8),
)
_KEYS = st.builds(
    UsageKey,
    project=st.sampled_from(["p", "q"]),
    run=st.sampled_from(["", "projects/p/trainingRuns/a", "projects/p/trainingRuns/b"]),
    key_id=st.sampled_from(["k", "l"]),
    day=st.sampled_from([_TODAY - 40, _TODAY - 1, _TODAY]),
)
_USE = st.tuples(st.sampled_from(["ledger", "sampler-1", "sampler-2"]), _KEYS, _AMOUNTS)


def connect() -> sa.Connection:
    """Return a connection to an empty database."""
    connection = sa.create_engine("sqlite://").connect()
    metadata.create_all(connection, tables=[usage_rows, usage_days, usage_stored])
    return connection


def rows(connection: sa.Connection, **query: Any) -> list[UsageRow]:
    wanted = UsageQuery(**{"project": "p", **query})
    return usage_store.list_rows(connection, wanted, after=None, limit=1_000)


def total(connection: sa.Connection, **query: Any) -> UsageAmounts:
    (row,) = rows(connection, **query)
    return row.amounts


def report(key: UsageKey, amounts: UsageAmounts) -> UsageReport:
    return UsageReport({key: amounts}, {})


@settings(max_examples=20, deadline=None)
@given(uses=st.lists(_USE, max_size=12), data=st.data())
def test_each_use_counts_once_however_its_reports_fare(
    uses: list[tuple[str, UsageKey, UsageAmounts]], data: st.DataObject
) -> None:
    """Sources add up what they count, and report their totals so far."""
    totals: dict[tuple[str, UsageKey], UsageAmounts] = {}
    sent: list[tuple[str, UsageReport]] = []
    for source, key, amounts in uses:
        totals[source, key] = totals.get((source, key), NOTHING) + amounts
        sent.append((source, report(key, totals[source, key])))
    # Lost, repeated and in any order, but that the last total of each arrives in the end.
    arriving = data.draw(st.lists(st.sampled_from(sent), max_size=20)) if sent else []
    arriving += [(source, report(key, total_)) for (source, key), total_ in totals.items()]
    arriving = data.draw(st.permutations(arriving))
    used: defaultdict[str, UsageAmounts] = defaultdict(UsageAmounts)
    for _, key, amounts in uses:
        used[key.project] += amounts

    with connect() as connection:
        for source, arrived in arriving:
            usage_store.record(connection, source, arrived)
        for project in ("p", "q"):
            assert total(connection, project=project) == used[project]
            for groups in (("run",), ("key_id", "day"), ("run", "key_id", "day")):
                grouped = rows(connection, project=project, groups=groups)
                assert sum((row.amounts for row in grouped), NOTHING) == used[project]
            # What budgets are compared with is the sum of the same rows.
            for quantity in (Quantity.TRAINED_TOKENS, Quantity.ENGINE_SECONDS):
                found = usage_store.used_of(connection, [budget(project, quantity)], _NOW_S)
                assert found[project, quantity] == used[project].of(quantity)


def budget(project: str, quantity: Quantity, period: Period = Period.TOTAL) -> Budget:
    return Budget(project=project, quantity=quantity, limit=1.0, period=period)


@pytest.mark.parametrize(
    ("period", "used"),
    [
        pytest.param(Period.TOTAL, 7, id="total"),
        pytest.param(Period.MONTH, 3, id="month"),
        pytest.param(Period.DAY, 1, id="day"),
    ],
)
def test_a_period_begins_anew(period: Period, used: int) -> None:
    with connect() as connection:
        for age, tokens in ((0, 1), (1, 2), (40, 4)):
            key = UsageKey(project="p", run="", key_id="k", day=_TODAY - age)
            amounts = UsageAmounts(num_sampled_tokens=tokens)
            usage_store.record(connection, "s", report(key, amounts))
        wanted = budget("p", Quantity.SAMPLED_TOKENS, period)
        found = usage_store.used_of(connection, [wanted], _NOW_S)
        assert found["p", Quantity.SAMPLED_TOKENS] == used


@pytest.mark.parametrize(
    ("today", "first"),
    [("2026-11-01", "2026-11-01"), ("2026-11-30", "2026-11-01"), ("2028-02-29", "2028-02-01")],
)
def test_a_month_begins_with_its_first_day(today: str, first: str) -> None:
    days = [
        (datetime.date.fromisoformat(text) - datetime.date(1970, 1, 1)).days
        for text in (today, first)
    ]
    last_s = days[0] * DAY_S + DAY_S - 1.0
    assert usage_store.first_day(Period.MONTH, last_s) == days[1]
    assert usage_store.first_day(Period.DAY, last_s) == days[0]
    assert usage_store.first_day(Period.TOTAL, last_s) == 0


def test_a_report_says_whether_it_is_new() -> None:
    key = UsageKey(project="p", run="", key_id="k", day=_TODAY)
    stored = UsageReport({}, {("p", "r"): 3})
    with connect() as connection:
        first = report(key, UsageAmounts(num_sampled_tokens=2))
        assert [usage_store.record(connection, "s", first) for _ in range(2)] == [True, False]
        # Less than before was overtaken; more of something else is new.
        assert not usage_store.record(
            connection, "s", report(key, UsageAmounts(num_sampled_tokens=1))
        )
        assert usage_store.record(connection, "s", report(key, UsageAmounts(engine_s=1.0)))
        assert usage_store.record(connection, "s", stored)
        assert not usage_store.record(connection, "s", UsageReport({}, {}))
        assert total(connection) == UsageAmounts(num_sampled_tokens=2, engine_s=1.0)


def test_the_last_report_of_stored_bytes_counts() -> None:
    run, other = "projects/p/trainingRuns/a", "projects/p/trainingRuns/b"
    with connect() as connection:
        for stored in ({("p", run): 10, ("p", other): 5}, {("p", run): 3}, {("p", other): 0}):
            usage_store.record(connection, "ledger", UsageReport({}, stored))
        assert [row.stored_bytes for row in rows(connection)] == [3]
        assert [(row.group["run"], row.stored_bytes) for row in rows(connection, groups=("run",))]
        found = usage_store.used_of(connection, [budget("p", Quantity.STORED_BYTES)], _NOW_S)
        assert found == {("p", Quantity.STORED_BYTES): 3}


def test_pages_hold_every_row_once() -> None:
    with connect() as connection:
        for number in range(25):
            key = UsageKey(project="p", run=f"r{number % 5}", key_id="k", day=number // 5)
            usage_store.record(connection, "s", report(key, UsageAmounts(num_sampled_tokens=1)))
        query = UsageQuery(project="p", groups=("run", "day"))
        found: list[UsageRow] = []
        while page := usage_store.list_rows(
            connection, query, after=list(found[-1].group.values()) if found else None, limit=4
        ):
            found += page
        assert len({tuple(row.group.values()) for row in found}) == len(found) == 25
