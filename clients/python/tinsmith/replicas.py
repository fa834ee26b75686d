"""Which of several equal replicas a call goes to: hashing with bounded loads.

Calls that begin alike prefer the same replica, which may know their prompt. A replica with over its
part of the calls in flight is left out; the next one in the order of the call's key takes the call.
So one session uses all replicas, and one that comes or goes changes the place of few calls. A
replica that failed comes last for a while. The load is what this process has in flight.

Source: Mirrokni, Thorup, Zadimoghaddam 2018, arXiv:1608.01350; order by rendezvous hashing.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

_BALANCE = 1.25
"""A replica may have this many times the mean of the calls in flight."""
_AVOIDED_S = 5.0
KEY_BYTES = 1024
"""Of a prompt, what its place depends on."""


class Replicas:
    """The calls in flight of this process, by address.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: Counter[str] = Counter()
        self._failed: dict[str, float] = {}

    def choose(self, addresses: Sequence[str], key: bytes) -> str:
        """Return the address for a call.

        Args:
            addresses: Of the replicas; at least one.
            key: What the call begins with; calls of equal keys prefer one replica.
        """
        if len(addresses) == 1:
            return addresses[0]
        now = self._clock()
        self._failed = {one: until for one, until in self._failed.items() if until > now}
        usable = [one for one in addresses if one not in self._failed] or list(addresses)
        total = sum(self._loads[one] for one in usable) + 1
        most = math.ceil(_BALANCE * total / len(usable))
        ranked = sorted(usable, key=lambda one: (_weight(key, one), one), reverse=True)
        return next(
            (one for one in ranked if self._loads[one] < most),
            min(ranked, key=lambda one: self._loads[one]),
        )

    @contextlib.contextmanager
    def in_flight(self, address: str) -> Iterator[None]:
        """Count a call to an address while it runs."""
        self._loads[address] += 1
        try:
            yield
        finally:
            self._loads[address] -= 1
            if not self._loads[address]:
                del self._loads[address]

    def note_failure(self, address: str) -> None:
        """Prefer the other replicas for a while."""
        self._failed[address] = self._clock() + _AVOIDED_S


def _weight(key: bytes, address: str) -> bytes:
    return hashlib.sha256(key[:KEY_BYTES] + b"\0" + address.encode()).digest()
