"""Which coordinator an episode's key belongs to: the shared one's, or that of a pool.

The key does not tell, so coordinators are asked one after the other, the one that knew the key last
first. One that does not answer holds up the keys of the others for a few seconds and no more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tinsmith.v1 import episode_pb2
from tinsmith_runtime.errors import ErrorCode, KeyInvalidError, TinsmithError

_MAX_ENTRIES = 100_000

Ask = Callable[[str, str], Awaitable[episode_pb2.Episode]]
"""Asks the coordinator of a pool for the episode of a key."""


class EpisodeKeys:
    """Finds the episode of a key, and the pool of its coordinator.

    Args:
        pools: Returns the pools that have a coordinator.
        ask: Asks one of them.
    """

    def __init__(self, pools: Callable[[], Awaitable[set[str]]], ask: Ask) -> None:
        self._pools = pools
        self._ask = ask
        self._known: dict[str, str] = {}

    async def verify(self, key: str) -> tuple[episode_pb2.Episode, str]:
        """Return the episode of a key and the pool of its coordinator.

        Raises:
            KeyInvalidError: If no coordinator knows the key.
            TinsmithError: What the coordinator that has it answered, or that one does not answer.
        """
        pools = await self._pools()
        known = self._known.get(key)
        # An owner without a coordinator is found by the call itself, which says so.
        ordered = sorted(pools, key=lambda pool: (pool != known, pool)) or [""]
        unknown: TinsmithError | None = None
        for pool in ordered:
            try:
                episode = await self._ask(pool, key)
            except TinsmithError as error:
                is_away = error.code in (ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED)
                if is_away or error.reason == KeyInvalidError.reason:
                    # That a key is unknown is certain only if all have said so.
                    unknown = error if is_away or unknown is None else unknown
                    continue
                raise
            if known != pool:
                self._known[key] = pool
                while len(self._known) > _MAX_ENTRIES:
                    del self._known[next(iter(self._known))]
            return episode, pool
        assert unknown is not None, "at least one was asked"
        raise unknown
