"""What came of hostile requests: how each ended, and what must not have happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

_MAX_FAILURES = 50


@dataclass(slots=True)
class Tally:
    """What came of all requests.

    Attributes:
        statuses: How often each status came back, by sort of request.
        failures: What must not have happened.
    """

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        """Note a failure."""
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(what)

    def count(self, sort: str, status: str) -> None:
        """Count how a request ended."""
        self.statuses[sort, status] += 1
