"""Calls on usage and budgets, as coroutines of the background loop."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from tinsmith.names import BudgetName, ProjectName
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.durations import encode_optional_time
from tinsmith.rpc.forms import call
from tinsmith.rpc.lists import read_pages
from tinsmith.v1 import usage_pb2

_GROUPS = {
    "project": usage_pb2.ListUsageRequest.GROUP_PROJECT,
    "run": usage_pb2.ListUsageRequest.GROUP_RUN,
    "key": usage_pb2.ListUsageRequest.GROUP_KEY,
    "day": usage_pb2.ListUsageRequest.GROUP_DAY,
}
_PERIODS = {
    "total": usage_pb2.Budget.PERIOD_TOTAL,
    "day": usage_pb2.Budget.PERIOD_DAY,
    "month": usage_pb2.Budget.PERIOD_MONTH,
}


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What a group used."""

    project: str
    """Resource name; empty where rows are of all projects together."""
    run: str
    """Resource name; empty where rows are not by run, and for samples of a base model."""
    key_id: str
    """Empty where rows are not by key; of a pod for what it did for a project."""
    day: datetime.date | None
    """Of UTC; None where rows are not by day."""
    num_trained_tokens: int
    """Of `forward_backward`."""
    num_sampled_tokens: int
    num_prefilled_tokens: int
    """Read without a gradient: prompts, `compute_logprobs` and `forward`."""
    num_cached_tokens: int
    """Of prompts that were not read again; they are not among the prefilled ones."""
    engine_seconds: float
    """Time of an engine, of which operations that share it are each charged their part."""
    stored_bytes: int
    """Of checkpoints and exports, now; 0 where rows are by key or day."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much of something a project may use."""

    project: str
    """Its id."""
    what: str
    """Such as `trained-tokens`; see `set_budget`."""
    limit: float
    """At it, calls that would use more are refused with the reason `BUDGET_EXCEEDED`."""
    period: str
    """When what was used begins anew: `total` for never, `day` or `month`."""
    used: float
    """Of the period, as far as pods have reported it."""


class UsageCalls:
    """What projects used, and the budgets that end it.

    Example:
        >>> for row in client.usage.list(by=["run"]):
        ...     print(row.run, row.num_trained_tokens, row.engine_seconds)
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    @call
    async def _list(
        self,
        *,
        by: Collection[str] = (),
        run: str = "",
        key_id: str = "",
        start_time: datetime.datetime | None = None,
        end_time: datetime.datetime | None = None,
        project: str = "",
    ) -> list[UsageRow]:
        """Return what was used: one row for each group, or one for all.

        Training is counted once it is committed, samples when they end. Both are here about a
        second later.

        Args:
            by: By what rows are grouped: some of `project`, `run`, `key` and `day`.
            run: Only of this run, given by its resource name or id.
            key_id: Only of this key.
            start_time: Leaves out days before that of this moment; a day is one of UTC.
            end_time: Leaves out days that begin then or later.
            project: Id of another project, or `-` for all; operators only.

        Returns:
            The rows by project, run, key and day.

        Raises:
            PermissionDeniedError: If the client's key may not read them.

        Example:
            >>> days = client.usage.list(by=["day"])
        """
        unknown = [name for name in by if name not in _GROUPS]
        if unknown:
            raise ValueError(f"by must be some of {', '.join(_GROUPS)}, got {unknown[0]!r}")
        parent = self._project_name(project)
        pages = read_pages(
            self._core.transport,
            self._core.scheduler,
            lambda c: c.usage.ListUsage,
            usage_pb2.ListUsageRequest(
                parent=parent,
                group_by=[_GROUPS[name] for name in by],
                run=f"{parent}/trainingRuns/{run}" if run and "/" not in run else run,
                key_id=key_id,
                start_time=encode_optional_time(start_time),
                end_time=encode_optional_time(end_time),
            ),
        )
        return [_decode_row(message) async for page in pages for message in page.rows]

    @call
    async def _list_budgets(self, *, project: str = "") -> list[Budget]:
        """Return the budgets of a project, with what was used of each.

        Args:
            project: Id of another project, or `-` for all; operators only.

        Returns:
            The budgets by name.

        Raises:
            PermissionDeniedError: If the client's key may not read them.

        Example:
            >>> left = {b.what: b.limit - b.used for b in client.usage.list_budgets()}
        """
        pages = read_pages(
            self._core.transport,
            self._core.scheduler,
            lambda c: c.usage.ListBudgets,
            usage_pb2.ListBudgetsRequest(parent=self._project_name(project)),
        )
        return [_decode_budget(message) async for page in pages for message in page.budgets]

    @call
    async def _set_budget(
        self, what: str, limit: float, *, period: str = "total", project: str = ""
    ) -> Budget:
        """Set a budget, in the place of the one that there is; operators only.

        It holds at every pod within seconds. What was accepted before goes on.

        Args:
            what: Of what: `trained-tokens`, `sampled-tokens`, `prefilled-tokens`,
                `engine-seconds` or `stored-bytes`.
            limit: How much may be used in a period; 0 refuses all.
            period: `total`, `day` or `month`, of UTC.
            project: Id of the project; that of the client by default.

        Returns:
            The budget, with what was used of it.

        Raises:
            PermissionDeniedError: If the client's key is not an operator's.

        Example:
            >>> client.usage.set_budget("trained-tokens", 1e9, period="month", project="team")
        """
        if period not in _PERIODS:
            raise ValueError(f"period must be one of {', '.join(_PERIODS)}, got {period!r}")
        request = usage_pb2.UpdateBudgetRequest(
            name=self._budget_name(what, project),
            request_id=str(uuid.uuid4()),
            limit=limit,
            period=_PERIODS[period],
        )
        budget = await self._core.transport.call(
            self._core.scheduler, lambda c: c.usage.UpdateBudget, request
        )
        return _decode_budget(budget)

    @call
    async def _delete_budget(self, what: str, *, project: str = "") -> None:
        """Remove a budget; operators only. Repeating it succeeds.

        Args:
            what: As in `set_budget`.
            project: Id of the project; that of the client by default.

        Raises:
            PermissionDeniedError: If the client's key is not an operator's.

        Example:
            >>> client.usage.delete_budget("trained-tokens", project="team")
        """
        request = usage_pb2.DeleteBudgetRequest(name=self._budget_name(what, project))
        await self._core.transport.call(
            self._core.scheduler, lambda c: c.usage.DeleteBudget, request
        )

    def _budget_name(self, what: str, project: str) -> str:
        parsed = ProjectName.parse(self._project_name(project))
        return str(BudgetName(parsed.project, what))

    def _project_name(self, project: str) -> str:
        return f"projects/{project}" if project else self._core.project


def _decode_row(message: usage_pb2.UsageRow) -> UsageRow:
    has_day = message.HasField("day_time")
    amounts = message.amounts
    return UsageRow(
        project=message.project,
        run=message.run,
        key_id=message.key_id,
        day=message.day_time.ToDatetime(tzinfo=datetime.UTC).date() if has_day else None,
        num_trained_tokens=amounts.num_trained_tokens,
        num_sampled_tokens=amounts.num_sampled_tokens,
        num_prefilled_tokens=amounts.num_prefilled_tokens,
        num_cached_tokens=amounts.num_cached_tokens,
        engine_seconds=amounts.engine_seconds,
        stored_bytes=message.stored_bytes,
    )


def _decode_budget(message: usage_pb2.Budget) -> Budget:
    periods = {number: name for name, number in _PERIODS.items()}
    name = BudgetName.parse(message.name)
    return Budget(
        project=name.project,
        what=name.budget,
        limit=message.limit,
        period=periods.get(message.period, "total"),
        used=message.used,
    )
