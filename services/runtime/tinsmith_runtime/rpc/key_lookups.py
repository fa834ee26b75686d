"""What is kept of the answers about keys, and how many unknown keys an address may try.

Whether a key is good costs a call to the pod that knows it. So answers are kept for a few seconds,
good ones apart from bad ones: a flood of unknown keys takes no good answer away. And each address
has a token bucket of failures, so that random keys do not become as many calls. A key that was good
before is asked about in any case, and one that was made here too (`key_checks`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tinsmith_runtime.errors import RateLimitedError
from tinsmith_runtime.fairness.token_buckets import MAX_OWNERS, TokenBuckets
from tinsmith_runtime.rpc.peers import network_of

AnswerT = TypeVar("AnswerT")
EntryT = TypeVar("EntryT", bound=Hashable)

FAILURES_AT_ONCE = 200
"""Unknown keys that an address may try at once."""
FAILURES_PER_S = 2.0
"""How many of them it gets back in a second."""


class Answers(Generic[EntryT, AnswerT]):
    """Answers that are good for a while; of too many the oldest go first."""

    def __init__(self, *, ttl_s: float, max_entries: int, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._clock = clock
        self._kept: OrderedDict[EntryT, tuple[AnswerT, float]] = OrderedDict()

    def get(self, entry: EntryT) -> AnswerT | None:
        """Return an answer that is still good."""
        answer, expires_s = self._kept.get(entry, (None, 0.0))
        return answer if expires_s > self._clock() else None

    def latest(self, entry: EntryT) -> AnswerT | None:
        """Return the last answer, good still or not."""
        answer, _ = self._kept.get(entry, (None, 0.0))
        return answer

    def keep(self, entry: EntryT, answer: AnswerT, asked_s: float) -> None:
        """Keep the answer to a question that was asked at a time."""
        self._kept.pop(entry, None)
        self._kept[entry] = (answer, asked_s + self._ttl_s)
        while len(self._kept) > self._max_entries:
            self._kept.popitem(last=False)

    def drop(self, entry: EntryT) -> None:
        """Forget an answer."""
        self._kept.pop(entry, None)


class FailureLimit:
    """Token buckets of failures by address; an IPv6 network of 64 bits is one address.

    Args:
        at_once: Size of a bucket.
        per_s: How fast it fills.
        max_addresses: Bound of the memory that addresses can take.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        at_once: int = FAILURES_AT_ONCE,
        per_s: float = FAILURES_PER_S,
        max_addresses: int = MAX_OWNERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buckets = TokenBuckets(at_once, per_s, clock=clock, max_owners=max_addresses)

    def take(self, address: str) -> None:
        """Count a question that may fail; `give_back` if it did not.

        Args:
            address: `host:port` of the party that shows the key; empty where it is not known.

        Raises:
            RateLimitedError: If too many failed; nothing was counted.
        """
        wait_s = self._buckets.take(network_of(address))
        if wait_s:
            at_once = self._buckets.at_once
            raise RateLimitedError(
                f"this address has shown more than {at_once} keys that are unknown here; "
                "check the key, and send the request again later",
                retry_after_s=wait_s,
                what="unknown keys",
                limit=at_once,
            )

    def give_back(self, address: str) -> None:
        """Take back a question that did not fail."""
        self._buckets.give_back(network_of(address))
