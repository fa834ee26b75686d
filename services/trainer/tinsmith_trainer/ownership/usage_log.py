"""What the runs of this trainer used, on its way from the ledger to the scheduler.

The ledger has the totals and knows which of them the scheduler has, so that a crash loses none. Of
what is stored the sizes themselves are reported, whenever they differ from the last report of this
process; a new process reports all of them once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tinsmith_runtime.ledger import Ledger
from tinsmith_runtime.usage import UsageReport, day_of

_STORED_INTERVAL_S = 5.0
_KEPT_DAYS = 30
"""How long the ledger keeps totals that the scheduler has: a commit may wait long for space."""


class LedgerUsage:
    """The totals of a ledger; implements `UsageLog`.

    Args:
        ledger: Counts.
        worker: Names a ledger that is of this trainer alone.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, ledger: Ledger, worker: str, *, wall_clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._worker = worker
        self._wall_clock = wall_clock
        self._stored: dict[tuple[str, str], int] = {}
        self._looked_at_s = float("-inf")

    @property
    def source(self) -> str:
        """Names the ledger among those of a deployment."""
        return self._ledger.identity or self._worker

    async def take(self, limit: int) -> UsageReport:
        """Return totals and sizes that the scheduler does not have."""
        totals = await self._ledger.unreported_usage(limit)
        stored: dict[tuple[str, str], int] = {}
        if time.monotonic() - self._looked_at_s >= _STORED_INTERVAL_S:
            found = await self._ledger.stored_bytes()
            gone = dict.fromkeys(self._stored.keys() - found.keys(), 0)
            changed = [
                (place, num_bytes)
                for place, num_bytes in {**found, **gone}.items()
                if self._stored.get(place, 0) != num_bytes
            ]
            stored = dict(changed[:limit])
            if len(changed) <= limit:
                self._looked_at_s = time.monotonic()
        return UsageReport(totals, stored)

    async def note_reported(self, report: UsageReport) -> None:
        """Note that the scheduler has a report."""
        for place, num_bytes in report.stored.items():
            if num_bytes:
                self._stored[place] = num_bytes
            else:
                self._stored.pop(place, None)
        if report.totals:
            await self._ledger.note_usage_reported(
                report.totals, forget_before=day_of(self._wall_clock()) - _KEPT_DAYS
            )
