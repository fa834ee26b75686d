"""UsageService: one method for each call, which decodes, checks the tenant, calls, encodes."""

from __future__ import annotations

import math
from typing import Any

import grpc.aio

from tinsmith.names import BudgetName, ProjectName
from tinsmith.v1 import usage_pb2, usage_pb2_grpc
from tinsmith_runtime.errors import InvalidFieldError, NotFoundError
from tinsmith_runtime.rpc import usage_codec
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.pages import take_page
from tinsmith_runtime.rpc.requests import decode_identity, decode_time, encode_time, parse_name
from tinsmith_runtime.usage import DAY_S, Budget, Quantity, day_of
from tinsmith_scheduler.auth.api_keys import Keys
from tinsmith_scheduler.rpc import codec
from tinsmith_scheduler.usage.usage import Usage, decode_quantity
from tinsmith_scheduler.usage.usage_store import GROUPS, UsageQuery, UsageRow

Context = grpc.aio.ServicerContext[Any, Any]

_ALL_PROJECTS = "projects/-"
_MAX_ROWS = 1_000
_GROUPS = {
    usage_pb2.ListUsageRequest.GROUP_PROJECT: "project",
    usage_pb2.ListUsageRequest.GROUP_RUN: "run",
    usage_pb2.ListUsageRequest.GROUP_KEY: "key_id",
    usage_pb2.ListUsageRequest.GROUP_DAY: "day",
}


class UsageServicer(usage_pb2_grpc.UsageServiceServicer):
    """Maps UsageService onto the usage of projects.

    Args:
        usage: What is served.
        keys: Says which callers are operators.
    """

    def __init__(self, usage: Usage, keys: Keys) -> None:
        self._usage = usage
        self._keys = keys

    async def ListUsage(
        self, request: usage_pb2.ListUsageRequest, context: Context
    ) -> usage_pb2.ListUsageResponse:
        """List what a project used."""
        project = self._readable_project(request.parent)
        page = codec.decode_page(request.page_size, request.page_token)
        rows, token = await self._usage.list_rows(_decode_query(request, project), page)
        return usage_pb2.ListUsageResponse(
            rows=[_encode_row(row, project) for row in rows], next_page_token=token
        )

    async def ListBudgets(
        self, request: usage_pb2.ListBudgetsRequest, context: Context
    ) -> usage_pb2.ListBudgetsResponse:
        """List budgets."""
        project = self._readable_project(request.parent)
        budgets = [
            _encode_budget(budget)
            for budget in await self._usage.budgets()
            if project in (None, budget.project)
        ]
        page, token = take_page(
            f"{request.parent}/budgets", budgets, lambda each: each.name, request
        )
        return usage_pb2.ListBudgetsResponse(budgets=page, next_page_token=token)

    async def UpdateBudget(
        self, request: usage_pb2.UpdateBudgetRequest, context: Context
    ) -> usage_pb2.Budget:
        """Set a budget."""
        caller = current_caller()
        self._keys.require_operator(caller)
        name = parse_name(BudgetName, request.name, "name")
        if not request.HasField("limit") or not 0 <= request.limit < math.inf:
            raise InvalidFieldError("limit", "must be given, finite and at least 0")
        budget = Budget(
            project=name.project,
            quantity=decode_quantity(name.budget),
            limit=request.limit,
            period=usage_codec.decode_period(request.period),
        )
        is_stored = budget.quantity is Quantity.STORED_BYTES
        if is_stored and request.period not in (
            usage_pb2.Budget.PERIOD_UNSPECIFIED,
            usage_pb2.Budget.PERIOD_TOTAL,
        ):
            raise InvalidFieldError("period", "must be left out for what is stored")
        answer = await self._usage.set_budget(
            caller,
            budget,
            decode_identity(request, name.project),
            lambda made: _encode_budget(made).SerializeToString(),
        )
        return usage_pb2.Budget.FromString(answer)

    async def DeleteBudget(
        self, request: usage_pb2.DeleteBudgetRequest, context: Context
    ) -> usage_pb2.DeleteBudgetResponse:
        """Remove a budget."""
        caller = current_caller()
        self._keys.require_operator(caller)
        name = parse_name(BudgetName, request.name, "name")
        await self._usage.delete_budget(caller, name.project, decode_quantity(name.budget))
        return usage_pb2.DeleteBudgetResponse()

    async def ReportUsage(
        self, request: usage_pb2.ReportUsageRequest, context: Context
    ) -> usage_pb2.ReportUsageResponse:
        """Take totals of a pod."""
        if not request.source:
            raise InvalidFieldError("source", "is required")
        if max(len(request.totals), len(request.stored)) > _MAX_ROWS:
            raise InvalidFieldError("totals", f"and stored must be at most {_MAX_ROWS} each")
        report = usage_codec.decode_report(request)
        budgets = await self._usage.report(request.source, report)
        return usage_pb2.ReportUsageResponse(budgets=[_encode_budget(each) for each in budgets])

    def _readable_project(self, parent: str) -> str | None:
        """Return the project of a list, None for all; operators read those of others."""
        caller = current_caller()
        if parent == _ALL_PROJECTS:
            self._keys.require_operator(caller)
            return None
        project = parse_name(ProjectName, parent, "parent").project
        if not self._keys.is_operator(caller):
            caller.require_project(
                project,
                lambda: NotFoundError(f"project {project} does not exist", project=project),
            )
        return project


def _decode_query(request: usage_pb2.ListUsageRequest, project: str | None) -> UsageQuery:
    unknown = [group for group in request.group_by if group not in _GROUPS]
    if unknown:
        raise InvalidFieldError("group_by", f"must be project, run, key or day, got {unknown[0]}")
    chosen = {_GROUPS[group] for group in request.group_by}
    has_start, has_end = request.HasField("start_time"), request.HasField("end_time")
    return UsageQuery(
        project=project,
        groups=tuple(name for name in GROUPS if name in chosen),
        run=request.run,
        key_id=request.key_id,
        first_day=day_of(decode_time(request.start_time)) if has_start else None,
        end_day=-day_of(-decode_time(request.end_time)) if has_end else None,
    )


def _encode_row(row: UsageRow, project: str | None) -> usage_pb2.UsageRow:
    named = row.group.get("project", project)
    message = usage_pb2.UsageRow(
        project=str(ProjectName(named)) if named else "",
        run=row.group.get("run", ""),
        key_id=row.group.get("key_id", ""),
        amounts=usage_codec.encode_amounts(row.amounts),
        stored_bytes=row.stored_bytes,
    )
    if "day" in row.group:
        message.day_time.CopyFrom(encode_time(row.group["day"] * DAY_S))
    return message


def _encode_budget(budget: Budget) -> usage_pb2.Budget:
    return usage_codec.encode_budget(budget, str(BudgetName(budget.project, budget.quantity)))
