"""Reports what a pod counted to the scheduler, and learns from each answer what budgets are left.

It happens about once a second. While the scheduler is away totals wait, and the budgets stay as
they were: what was refused stays refused, and what was allowed stays allowed.
"""

from __future__ import annotations

import logging
from typing import Protocol

from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.rpc import usage_codec
from tinsmith_runtime.rpc.repeated_report import RepeatedReport
from tinsmith_runtime.rpc.scheduler_client import SchedulerClient
from tinsmith_runtime.usage import BudgetGate, UsageReport

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 500


class UsageLog(Protocol):
    """What counts."""

    @property
    def source(self) -> str:
        """Names it among all that report: a total of one is no total of another."""
        ...

    async def take(self, limit: int) -> UsageReport:
        """Return what was not reported since it last changed, so many rows at most of each kind."""
        ...

    async def note_reported(self, report: UsageReport) -> None:
        """Note that the scheduler has a report."""
        ...


class UsageReporter:
    """Reports until it is stopped."""

    def __init__(self, log: UsageLog, gate: BudgetGate, scheduler: SchedulerClient) -> None:
        self._log = log
        self._gate = gate
        self._scheduler = scheduler
        self._repeated = RepeatedReport("usage", self._report_all)

    def start(self) -> None:
        """Begin to report."""
        self._repeated.start()

    async def stop(self) -> None:
        """Report what is left, if that goes soon, and end."""
        await self._repeated.stop()

    async def _report_all(self) -> None:
        """Report until nothing waits, or the scheduler is away."""
        try:
            while await self._report():
                pass
        except TinsmithError as error:
            logger.info("usage is reported later", extra={"problem": error.message})

    async def _report(self) -> bool:
        """Report once; return whether there may be more."""
        report = await self._log.take(_ROWS_AT_ONCE)
        self._gate.begin_report()
        request = usage_codec.encode_report(self._log.source, report)
        answer = await self._scheduler.report_usage(request)
        self._gate.replace(usage_codec.decode_budgets(answer.budgets))
        if report.totals or report.stored:
            await self._log.note_reported(report)
        return max(len(report.totals), len(report.stored)) >= _ROWS_AT_ONCE
