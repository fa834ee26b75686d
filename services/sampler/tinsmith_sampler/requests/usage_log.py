"""What samples used, counted by the process that drew them.

A request is charged once, when it ends: what it sampled, what of its prompt was read, and its part
of the engine's time. The totals are of this process alone, and die with it: what ended since the
last report, about a second before, is not charged then.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

from tinsmith_engine import SampleRequest
from tinsmith_runtime.usage import NOTHING, BudgetGate, UsageAmounts, UsageKey, UsageReport, day_of


class SharedTime:
    """Shares the time of an engine among the requests that it holds, by their samples.

    The parts of all requests together are the time that was spent while there were any.
    """

    def __init__(self) -> None:
        self._num_shares = 0
        self._share_s = 0.0

    def enter(self, num_shares: int) -> float:
        """Take in a request; returns the mark that it leaves with."""
        self._num_shares += num_shares
        return self._share_s

    def leave(self, num_shares: int, mark_s: float) -> float:
        """Let a request go, and return its part of the time since it came."""
        self._num_shares -= num_shares
        return num_shares * (self._share_s - mark_s)

    def spend(self, duration_s: float) -> None:
        """Share out what a step took."""
        if self._num_shares:
            self._share_s += duration_s / self._num_shares


def amounts_of(
    request: SampleRequest,
    *,
    num_sampled_tokens: int,
    num_cached_tokens: int,
    is_read: bool,
    engine_s: float,
) -> UsageAmounts:
    """Return what a request is charged with.

    Args:
        request: What was asked for.
        num_sampled_tokens: Of all samples, those that were cut included.
        num_cached_tokens: Of the prompt, those that were not computed again.
        is_read: Whether the prompt was read to its end; else it is not counted.
        engine_s: Its part of the engine's time.
    """
    num_prompt = len(request.prompt_tokens) if is_read else 0
    return UsageAmounts(
        num_sampled_tokens=num_sampled_tokens,
        num_prefilled_tokens=max(0, num_prompt - num_cached_tokens),
        num_cached_tokens=num_cached_tokens,
        engine_s=engine_s,
    )


class SampledUsage:
    """The totals of this process; implements `UsageLog`.

    Args:
        budgets: Told what projects used.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, budgets: BudgetGate, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.budgets = budgets
        self.source = f"sampler-{uuid.uuid4().hex}"
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._totals: dict[UsageKey, UsageAmounts] = {}
        self._changed: set[UsageKey] = set()

    def charge(self, project: str, run: str, key_id: str, amounts: UsageAmounts) -> None:
        """Count a request that ended; may be called on any thread."""
        if amounts == NOTHING:
            return
        day = day_of(self._wall_clock())
        key = UsageKey(project=project, run=run, key_id=key_id, day=day)
        with self._lock:
            self._totals[key] = self._totals.get(key, NOTHING) + amounts
            self._changed.add(key)
        self.budgets.note_spent(project, amounts)

    async def take(self, limit: int) -> UsageReport:
        """Return totals that grew since they were reported."""
        with self._lock:
            changed = sorted(self._changed, key=lambda key: key.day)[:limit]
            return UsageReport({key: self._totals[key] for key in changed}, {})

    async def note_reported(self, report: UsageReport) -> None:
        """Note that the scheduler has a report, and forget what does not grow any more."""
        today = day_of(self._wall_clock())
        with self._lock:
            for key, amounts in report.totals.items():
                if self._totals[key] == amounts:
                    self._changed.discard(key)
            over = [key for key in self._totals if key.day < today and key not in self._changed]
            for key in over:
                del self._totals[key]
