"""What usage and budgets say to the database.

A total that is reported again is joined with the one before: the larger amounts count. What that
adds goes into the sums of the day by the same transaction.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tinsmith_runtime.sql import insert
from tinsmith_runtime.usage import (
    AMOUNT_FIELDS,
    NOTHING,
    Budget,
    Period,
    Quantity,
    UsageAmounts,
    UsageReport,
    day_of,
)
from tinsmith_scheduler.store.tables import budgets, usage_days, usage_rows, usage_stored

GROUPS = ("project", "run", "key_id", "day")
"""By what rows can be grouped, in the order in which lists have them."""
_EPOCH = datetime.date(1970, 1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageQuery:
    """Which rows are asked for.

    Attributes:
        project: Whose; None for all projects.
        groups: Those of `GROUPS` that rows are grouped by, in its order.
        run: Which run; empty for all.
        key_id: Which key; empty for all.
        first_day: The first day; None where it is open.
        end_day: The day after the last; None where it is open.
    """

    project: str | None
    groups: tuple[str, ...] = ()
    run: str = ""
    key_id: str = ""
    first_day: int | None = None
    end_day: int | None = None

    @property
    def has_stored(self) -> bool:
        """Whether rows say what is stored now, which is of no key and of no day."""
        return not self.key_id and not {"key_id", "day"} & set(self.groups)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What a group used: its values, and those of what it is grouped by."""

    group: Mapping[str, Any]
    amounts: UsageAmounts
    stored_bytes: int


def record(connection: sa.Connection, source: str, report: UsageReport) -> bool:
    """Take the report of a source; return whether it said anything new."""
    is_new = False
    for key, amounts in report.totals.items():
        day = {"project": key.project, "day": key.day}
        place = {**day, "run": key.run, "key_id": key.key_id, "source": source}
        before = _amounts_at(connection, usage_rows, place)
        after = before.joined(amounts)
        if after != before:
            _put(connection, usage_rows, place, _values(after))
            summed = _amounts_at(connection, usage_days, day) + (after - before)
            _put(connection, usage_days, day, _values(summed))
            is_new = True
    for (project, run), num_bytes in report.stored.items():
        place = {"project": project, "run": run, "source": source}
        if num_bytes:
            _put(connection, usage_stored, place, {"num_bytes": num_bytes})
        else:
            connection.execute(sa.delete(usage_stored).where(*_is_at(usage_stored, place)))
        is_new = True
    return is_new


def list_rows(
    connection: sa.Connection, query: UsageQuery, *, after: Sequence[Any] | None, limit: int
) -> list[UsageRow]:
    """Return rows in the order of their groups, after one of them."""
    used = _used(query)
    groups = [used.c[name] for name in query.groups]
    sums = [
        sa.func.coalesce(sa.func.sum(used.c[name]), 0).label(name)
        for name in (*AMOUNT_FIELDS, "stored_bytes")
    ]
    selected = sa.select(*groups, *sums)
    if groups:
        selected = selected.group_by(*groups).order_by(*groups)
        if after is not None:
            selected = selected.where(sa.tuple_(*groups) > sa.tuple_(*after))
    return [
        UsageRow(
            {name: row[name] for name in query.groups},
            UsageAmounts(**{name: _number(name, row[name]) for name in AMOUNT_FIELDS}),
            int(row["stored_bytes"]),
        )
        for row in connection.execute(selected.limit(limit)).mappings()
    ]


def _used(query: UsageQuery) -> sa.Subquery:
    """Return the rows that are asked for, ungrouped, and what is stored as rows besides."""
    columns = [usage_rows.c[name] for name in (*GROUPS, *AMOUNT_FIELDS)]
    rows = sa.select(*columns, sa.literal(0, sa.BigInteger).label("stored_bytes"))
    conditions = _conditions(usage_rows, query)
    if query.key_id:
        conditions.append(usage_rows.c.key_id == query.key_id)
    if query.first_day is not None:
        conditions.append(usage_rows.c.day >= query.first_day)
    if query.end_day is not None:
        conditions.append(usage_rows.c.day < query.end_day)
    rows = rows.where(*conditions)
    if not query.has_stored:
        return rows.subquery()
    stored = sa.select(
        usage_stored.c.project,
        usage_stored.c.run,
        sa.literal("").label("key_id"),
        sa.literal(0, sa.BigInteger).label("day"),
        *(sa.literal(0, usage_rows.c[name].type).label(name) for name in AMOUNT_FIELDS),
        usage_stored.c.num_bytes.label("stored_bytes"),
    )
    stored = stored.where(*_conditions(usage_stored, query))
    return sa.union_all(rows, stored).subquery()


def _conditions(table: sa.Table, query: UsageQuery) -> list[sa.ColumnElement[bool]]:
    conditions = []
    if query.project is not None:
        conditions.append(table.c.project == query.project)
    if query.run:
        conditions.append(table.c.run == query.run)
    return conditions


def load_budgets(connection: sa.Connection) -> list[Budget]:
    """Return all budgets, without what was used of them."""
    return [
        Budget(
            project=row.project,
            quantity=Quantity(row.quantity),
            limit=row.budget,
            period=Period(row.period),
        )
        for row in connection.execute(sa.select(budgets))
    ]


def put_budget(connection: sa.Connection, budget: Budget) -> None:
    """Set a budget."""
    place = {"project": budget.project, "quantity": budget.quantity.value}
    values = {"budget": budget.limit, "period": budget.period.value}
    _put(connection, budgets, place, values)


def delete_budget(connection: sa.Connection, project: str, quantity: Quantity) -> bool:
    """Remove a budget; return whether there was one."""
    place = {"project": project, "quantity": quantity.value}
    return connection.execute(sa.delete(budgets).where(*_is_at(budgets, place))).rowcount > 0


def used_of(
    connection: sa.Connection, wanted: Iterable[Budget], now_s: float
) -> dict[tuple[str, Quantity], float]:
    """Return what was used of budgets in their periods, by project and quantity."""
    used: dict[tuple[str, Quantity], float] = {}
    by_period: dict[Period, list[Budget]] = {}
    stored: set[str] = set()
    for budget in wanted:
        if budget.quantity is Quantity.STORED_BYTES:
            stored.add(budget.project)
        else:
            by_period.setdefault(budget.period, []).append(budget)
    for period, found in by_period.items():
        sums = _sums_since(connection, {each.project for each in found}, first_day(period, now_s))
        for budget in found:
            amounts = sums.get(budget.project, NOTHING)
            used[budget.project, budget.quantity] = amounts.of(budget.quantity)
    query = sa.select(usage_stored.c.project, sa.func.sum(usage_stored.c.num_bytes))
    query = query.where(usage_stored.c.project.in_(stored)).group_by(usage_stored.c.project)
    for project, num_bytes in connection.execute(query) if stored else ():
        used[project, Quantity.STORED_BYTES] = int(num_bytes)
    return used


def first_day(period: Period, now_s: float) -> int:
    """Return the day on which a period that is under way began."""
    today = day_of(now_s)
    if period is Period.TOTAL:
        return 0
    if period is Period.DAY:
        return today
    date = _EPOCH + datetime.timedelta(days=today)
    return today - (date.day - 1)


def _sums_since(connection: sa.Connection, projects: set[str], day: int) -> dict[str, UsageAmounts]:
    query = (
        sa.select(
            usage_days.c.project,
            *(sa.func.sum(usage_days.c[name]).label(name) for name in AMOUNT_FIELDS),
        )
        .where(usage_days.c.project.in_(projects), usage_days.c.day >= day)
        .group_by(usage_days.c.project)
    )
    return {
        row["project"]: UsageAmounts(**{name: _number(name, row[name]) for name in AMOUNT_FIELDS})
        for row in connection.execute(query).mappings()
    }


def _number(name: str, value: Any) -> Any:
    """Return a sum as the field has it; PostgreSQL sums integers to decimals."""
    return float(value) if name == "engine_s" else int(value)


def _amounts_at(
    connection: sa.Connection, table: sa.Table, place: Mapping[str, Any]
) -> UsageAmounts:
    query = sa.select(*(table.c[name] for name in AMOUNT_FIELDS)).where(*_is_at(table, place))
    row = connection.execute(query).mappings().first()
    return NOTHING if row is None else UsageAmounts(**row)


def _put(
    connection: sa.Connection, table: sa.Table, place: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    connection.execute(
        insert(connection, table)
        .values(**place, **values)
        .on_conflict_do_update(index_elements=list(place), set_=dict(values))
    )


def _is_at(table: sa.Table, place: Mapping[str, Any]) -> list[sa.ColumnElement[bool]]:
    return [table.c[name] == value for name, value in place.items()]


def _values(amounts: UsageAmounts) -> dict[str, Any]:
    return {name: getattr(amounts, name) for name in AMOUNT_FIELDS}
