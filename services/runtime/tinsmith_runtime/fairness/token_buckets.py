"""Token buckets by owner: how much each may do at once, and how fast it gets that back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MAX_OWNERS = 10_000
"""Owners that are remembered; of more the one that took longest ago is forgotten."""


@dataclass(slots=True)
class _Bucket:
    num_left: float
    filled_s: float


class TokenBuckets:
    """A bucket for each owner, full at first.

    Args:
        at_once: Size of a bucket.
        per_s: How fast it fills.
        clock: Monotonic seconds.
        max_owners: Bound of the memory that owners can take.
        lends: Whether a full bucket gives more than it holds, which is owed then. So nothing is
            too large for ever.
    """

    def __init__(
        self,
        at_once: float,
        per_s: float,
        *,
        clock: Callable[[], float],
        max_owners: int = MAX_OWNERS,
        lends: bool = False,
    ) -> None:
        self.at_once = at_once
        self.per_s = per_s
        self._clock = clock
        self._max_owners = max_owners
        self._lends = lends
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, owner: str, number: int = 1) -> float:
        """Take tokens if they are there; else return the seconds until they will be."""
        bucket = self._filled(owner)
        needed = min(number, self.at_once) if self._lends else number
        if bucket.num_left < needed:
            return (needed - bucket.num_left) / self.per_s
        bucket.num_left -= number
        return 0.0

    def num_left(self, owner: str) -> float:
        """Return the tokens that an owner has."""
        return self._filled(owner).num_left

    def give_back(self, owner: str, number: int = 1) -> None:
        """Put tokens back that were taken and not used."""
        bucket = self._buckets.get(owner)
        if bucket is not None:
            bucket.num_left = min(bucket.num_left + number, self.at_once)

    def _filled(self, owner: str) -> _Bucket:
        now_s = self._clock()
        bucket = self._buckets.get(owner)
        if bucket is None:
            bucket = self._buckets[owner] = _Bucket(self.at_once, now_s)
            if len(self._buckets) > self._max_owners:
                self._buckets.popitem(last=False)
        left = bucket.num_left + (now_s - bucket.filled_s) * self.per_s
        bucket.num_left = min(left, self.at_once)
        bucket.filled_s = now_s
        self._buckets.move_to_end(owner)
        return bucket
