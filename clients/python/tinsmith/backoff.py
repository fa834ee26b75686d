"""Pauses between attempts: exponential, with jitter.

Pauses double so that a server that is away is not overrun when it comes back. Each is a random
share of at least half, so that clients that failed together do not return together. How often to
try, and which failures pass, is for the caller to say.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

_MAX_DOUBLINGS = 32


def backoff_s(num_failures: int, first_s: float, longest_s: float) -> float:
    """Return the seconds to wait after so many failures in a row, at least 1.

    Returns:
        Half to all of `first_s * 2 ** (num_failures - 1)`, of at most `longest_s`.
    """
    doublings = min(num_failures - 1, _MAX_DOUBLINGS)
    return min(longest_s, first_s * 2.0**doublings) * random.uniform(0.5, 1.0)


def backoff(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield the pauses of one series of failures, without end."""
    return (backoff_s(count, first_s, longest_s) for count in itertools.count(1))
