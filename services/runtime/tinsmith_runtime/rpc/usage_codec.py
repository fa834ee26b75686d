"""Usage and budgets between the contract and the domain, for the pods at both ends."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tinsmith.v1 import usage_pb2
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.usage import (
    NOTHING,
    Budget,
    Period,
    Quantity,
    UsageAmounts,
    UsageKey,
    UsageReport,
)

_PERIODS = {each: usage_pb2.Budget.Period.Value(f"PERIOD_{each.name}") for each in Period}


def encode_amounts(amounts: UsageAmounts) -> usage_pb2.UsageAmounts:
    """Return what was used."""
    return usage_pb2.UsageAmounts(
        num_trained_tokens=amounts.num_trained_tokens,
        num_sampled_tokens=amounts.num_sampled_tokens,
        num_prefilled_tokens=amounts.num_prefilled_tokens,
        num_cached_tokens=amounts.num_cached_tokens,
        engine_seconds=amounts.engine_s,
    )


def decode_amounts(message: usage_pb2.UsageAmounts, field: str) -> UsageAmounts:
    """Return what was used.

    Raises:
        InvalidFieldError: If something is negative or no number.
    """
    amounts = UsageAmounts(
        num_trained_tokens=message.num_trained_tokens,
        num_sampled_tokens=message.num_sampled_tokens,
        num_prefilled_tokens=message.num_prefilled_tokens,
        num_cached_tokens=message.num_cached_tokens,
        engine_s=message.engine_seconds,
    )
    if not math.isfinite(amounts.engine_s) or amounts.joined(NOTHING) != amounts:
        raise InvalidFieldError(field, "must hold finite amounts of at least 0")
    return amounts


def encode_report(source: str, report: UsageReport) -> usage_pb2.ReportUsageRequest:
    """Return the report of a source."""
    return usage_pb2.ReportUsageRequest(
        source=source,
        totals=[
            usage_pb2.UsageTotal(
                project=key.project,
                run=key.run,
                key_id=key.key_id,
                day=key.day,
                amounts=encode_amounts(amounts),
            )
            for key, amounts in report.totals.items()
        ],
        stored=[
            usage_pb2.StoredBytes(project=project, run=run, num_bytes=num_bytes)
            for (project, run), num_bytes in report.stored.items()
        ],
    )


def decode_report(request: usage_pb2.ReportUsageRequest) -> UsageReport:
    """Return what a pod reports.

    Raises:
        InvalidFieldError: If something is negative or no number.
    """
    totals = {
        UsageKey(
            project=each.project, run=each.run, key_id=each.key_id, day=each.day
        ): decode_amounts(each.amounts, f"totals[{index}].amounts")
        for index, each in enumerate(request.totals)
    }
    stored = {(each.project, each.run): max(0, each.num_bytes) for each in request.stored}
    return UsageReport(totals, stored)


def encode_budget(budget: Budget, name: str) -> usage_pb2.Budget:
    """Return a budget under its resource name."""
    return usage_pb2.Budget(
        name=name, limit=budget.limit, period=_PERIODS[budget.period], used=budget.used
    )


def decode_budgets(messages: Iterable[usage_pb2.Budget]) -> list[Budget]:
    """Return the budgets that the scheduler tells; one of a kind unknown here is left out."""
    known = {quantity.value for quantity in Quantity}
    budgets = []
    for message in messages:
        _, project, _, budget = message.name.split("/")
        if budget in known:
            budgets.append(
                Budget(
                    project=project,
                    quantity=Quantity(budget),
                    limit=message.limit,
                    period=decode_period(message.period),
                    used=message.used,
                )
            )
    return budgets


def decode_period(value: int) -> Period:
    """Return a period; the one that is not specified is the total.

    Raises:
        InvalidFieldError: If there is none of this number.
    """
    if value == usage_pb2.Budget.PERIOD_UNSPECIFIED:
        return Period.TOTAL
    for period, number in _PERIODS.items():
        if number == value:
            return period
    raise InvalidFieldError("period", f"is no period of a budget: {value}")
