"""The usage of all projects and their budgets: reported by pods, read by people.

Pods refuse what is over a budget themselves, by the gate of `tinsmith_runtime.usage`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import sqlalchemy as sa

from tinsmith.names import BudgetName
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.rpc.requests import decode_key_token, encode_key_token
from tinsmith_runtime.sql import Database
from tinsmith_runtime.usage import Budget, Quantity, UsageReport
from tinsmith_scheduler.store.database import answer_once, record_action
from tinsmith_scheduler.store.records import PageRequest
from tinsmith_scheduler.usage import usage_store
from tinsmith_scheduler.usage.usage_store import UsageQuery, UsageRow

_FRESH_S = 0.5
"""How long what was used of budgets is good for, where nothing new was reported."""


class Usage:
    """What all projects used.

    Args:
        database: Where it is kept.
        clock: Monotonic seconds.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._clock = clock
        self._wall_clock = wall_clock
        self._budgets: dict[tuple[str, Quantity], Budget] = {}
        self._read_s = float("-inf")

    async def load(self) -> None:
        """Read the budgets; call once, before anything is served."""
        found = await self._database.read(usage_store.load_budgets)
        self._budgets = {(each.project, each.quantity): each for each in found}

    async def report(self, source: str, report: UsageReport) -> list[Budget]:
        """Take the report of a source, and return all budgets, in which it counts."""
        if report.totals or report.stored:
            is_new = await self._database.write(
                lambda connection: usage_store.record(connection, source, report)
            )
            if is_new:
                self._read_s = float("-inf")
        return await self.budgets()

    async def list_rows(self, query: UsageQuery, page: PageRequest) -> tuple[list[UsageRow], str]:
        """Return rows in the order of their groups, and the token of the next page.

        Raises:
            InvalidFieldError: If the page token is not one of this list.
        """
        list_name = f"usage/{query}"
        after = _position(query, decode_key_token(list_name, page.token))
        found = await self._database.read(
            lambda connection: usage_store.list_rows(
                connection, query, after=after, limit=page.size + 1
            )
        )
        shown = found[: page.size]
        if len(found) <= page.size:
            return shown, ""
        return shown, encode_key_token(list_name, json.dumps(list(shown[-1].group.values())))

    async def budgets(self) -> list[Budget]:
        """Return all budgets by name, with what was used of them."""
        wanted = list(self._budgets.values())
        now_s = self._clock()
        if wanted and now_s - self._read_s > _FRESH_S:
            used = await self._database.read(
                lambda connection: usage_store.used_of(connection, wanted, self._wall_clock())
            )
            self._take_used(used)
            self._read_s = now_s
        return sorted(self._budgets.values(), key=lambda each: (each.project, each.quantity))

    async def set_budget(
        self,
        caller: Caller,
        budget: Budget,
        request: RequestIdentity,
        encode: Callable[[Budget], bytes],
    ) -> bytes:
        """Set a budget, and return the answer of the request.

        Raises:
            RequestIdReusedError: If the request id was used with another body.
        """
        now_s = self._wall_clock()
        name = str(BudgetName(budget.project, budget.quantity.value))

        def create(connection: sa.Connection) -> bytes:
            usage_store.put_budget(connection, budget)
            record_action(
                connection, caller, "update_budget", name, project=budget.project, now_s=now_s
            )
            used = usage_store.used_of(connection, [budget], now_s)
            return encode(replace(budget, used=used.get((budget.project, budget.quantity), 0.0)))

        answer = await answer_once(self._database, request, create, now_s=now_s)
        # Read again: a repeat of an older request changes nothing.
        await self._reload()
        return answer

    async def delete_budget(self, caller: Caller, project: str, quantity: Quantity) -> None:
        """Remove a budget; repeating it changes nothing."""
        now_s = self._wall_clock()
        name = str(BudgetName(project, quantity.value))

        def delete(connection: sa.Connection) -> None:
            if usage_store.delete_budget(connection, project, quantity):
                record_action(
                    connection, caller, "delete_budget", name, project=project, now_s=now_s
                )

        await self._database.write(delete)
        await self._reload()

    async def _reload(self) -> None:
        await self.load()
        self._read_s = float("-inf")

    def _take_used(self, used: Mapping[tuple[str, Quantity], float]) -> None:
        self._budgets = {
            place: replace(budget, used=used.get(place, 0.0))
            for place, budget in self._budgets.items()
        }


def _position(query: UsageQuery, key: str | None) -> list[str | int] | None:
    """Return the values of the group that a token names.

    Raises:
        InvalidFieldError: If it is no token of such a list.
    """
    if key is None:
        return None
    kinds = [int if name == "day" else str for name in query.groups]
    try:
        values = json.loads(key)
    except ValueError:
        values = None
    if not isinstance(values, list) or [type(value) for value in values] != kinds:
        raise InvalidFieldError("page_token", "is not a next_page_token of this list")
    return values


def decode_quantity(value: str) -> Quantity:
    """Return what a budget is of, by the last part of its name.

    Raises:
        InvalidFieldError: If there is no such budget.
    """
    try:
        return Quantity(value)
    except ValueError as error:
        raise InvalidFieldError(
            "name", f"must end with one of {', '.join(Quantity)}, got {value!r}"
        ) from error
