"""Which coordinator an episode's key belongs to: the shared one's, or that of a pool.

The key does not tell, so coordinators are asked one after the other, the one that knew the key last
first. One that does not answer holds up the keys of the others for a few seconds and no more. That
all have called a key unknown is kept for a moment, and an address may try only so many.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from tinsmith.v1 import episode_pb2
from tinsmith_runtime.errors import ErrorCode, KeyInvalidError, TinsmithError
from tinsmith_runtime.rpc.key_lookups import Answers, FailureLimit
from tinsmith_runtime.rpc.peers import current_peer

MAX_EPISODE_KEYS = 100_000
"""Keys whose coordinator is remembered."""
MAX_UNKNOWN_EPISODE_KEYS = 10_000
"""Keys that are remembered as unknown."""
_UNKNOWN_TTL_S = 2.0

Ask = Callable[[str, str], Awaitable[episode_pb2.Episode]]
"""Asks the coordinator of a pool for the episode of a key."""


class EpisodeKeys:
    """Finds the episode of a key, and the pool of its coordinator.

    Args:
        pools: Returns the pools that have a coordinator.
        ask: Asks one of them.
        clock: Monotonic seconds.
        failures: How many unknown keys an address may try.
    """

    def __init__(
        self,
        pools: Callable[[], Awaitable[set[str]]],
        ask: Ask,
        *,
        clock: Callable[[], float] = time.monotonic,
        failures: FailureLimit | None = None,
    ) -> None:
        self._pools = pools
        self._ask = ask
        self._clock = clock
        self._failures = failures or FailureLimit(clock=clock)
        self._known: dict[str, str] = {}
        self._unknown = Answers[str, KeyInvalidError](
            ttl_s=_UNKNOWN_TTL_S, max_entries=MAX_UNKNOWN_EPISODE_KEYS, clock=clock
        )

    async def verify(self, key: str) -> tuple[episode_pb2.Episode, str]:
        """Return the episode of a key and the pool of its coordinator.

        Raises:
            KeyInvalidError: If no coordinator knows the key.
            RateLimitedError: If the address of the call has shown too many unknown keys.
            TinsmithError: What the coordinator that has it answered, or that one does not answer.
        """
        refusal = self._unknown.get(key)
        if refusal is not None:
            raise refusal
        # A key that was known before is no guess.
        address = None if key in self._known else current_peer()
        if address is not None:
            self._failures.take(address)
        asked_s = self._clock()
        try:
            found = await self._find(key)
        except KeyInvalidError as error:
            self._known.pop(key, None)
            self._unknown.keep(key, error, asked_s)
            raise
        except BaseException:
            self._give_back(address)
            raise
        self._give_back(address)
        return found

    def _give_back(self, address: str | None) -> None:
        if address is not None:
            self._failures.give_back(address)

    async def _find(self, key: str) -> tuple[episode_pb2.Episode, str]:
        pools = await self._pools()
        known = self._known.get(key)
        # An owner without a coordinator is found by the call itself, which says so.
        ordered = sorted(pools, key=lambda pool: (pool != known, pool)) or [""]
        away: TinsmithError | None = None
        for pool in ordered:
            try:
                episode = await self._ask(pool, key)
            except TinsmithError as error:
                if error.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED):
                    away = error
                    continue
                if error.reason == KeyInvalidError.reason:
                    continue
                raise
            if known != pool:
                self._known[key] = pool
                while len(self._known) > MAX_EPISODE_KEYS:
                    del self._known[next(iter(self._known))]
            return episode, pool
        # That a key is unknown is certain only if all have said so.
        raise away or KeyInvalidError("the key of the episode is unknown")
