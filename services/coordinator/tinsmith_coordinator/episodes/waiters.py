"""Wakes calls that wait for an episode to come or to end; nothing polls.

A waiter listens before it looks, so that nothing that happens in between is missed. An episode that
comes back wakes one waiter, not five hundred; a waiter that was woken and could not take it passes
the wake on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable

from tinsmith_runtime.errors import DrainingError


class Bell:
    """A wait for one thing; see `Bells.listen`."""

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self._rung = asyncio.Event()

    @property
    def has_rung(self) -> bool:
        """Whether it was rung."""
        return self._rung.is_set()

    def ring(self) -> None:
        """Wake this waiter."""
        self._rung.set()

    async def wait(self, timeout_s: float) -> bool:
        """Return once it rings, or False after a time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            return False
        return True


class Bells:
    """All waiters, by what they wait for."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[Bell]] = {}
        self._is_closed = False

    def listen(self, key: Hashable) -> Bell:
        """Begin to listen; to be ended by `forget`.

        Raises:
            DrainingError: If the pod is about to end.
        """
        if self._is_closed:
            raise DrainingError("the coordinator is shutting down; send the request again")
        bell = Bell(key)
        self._waiting.setdefault(key, deque()).append(bell)
        return bell

    def forget(self, bell: Bell) -> None:
        """Listen no longer; repeating it changes nothing."""
        waiting = self._waiting.get(bell.key)
        if waiting is None:
            return
        if bell in waiting:
            waiting.remove(bell)
        if not waiting:
            del self._waiting[bell.key]

    def ring(self, key: Hashable, count: int = 1) -> None:
        """Wake the first of those who wait, as many as there is something for."""
        waiting = self._waiting.get(key)
        while waiting and count > 0:
            waiting.popleft().ring()
            count -= 1
        if not waiting:
            self._waiting.pop(key, None)

    def ring_all(self, key: Hashable) -> None:
        """Wake all waiters of a thing."""
        for bell in self._waiting.pop(key, ()):
            bell.ring()

    def close(self) -> None:
        """Wake every waiter, to find out that the pod is about to end."""
        self._is_closed = True
        for key in list(self._waiting):
            self.ring_all(key)
