"""Remembers which request created what, so that a repeated request creates nothing.

Entries live for a day. A request that was refused, or never reached a worker, is forgotten, because
it may be right later; one whose environment failed is not: its answer stays that failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from tinsmith_runtime.errors import EnvironmentFailedError, RequestIdReusedError

ResultT = TypeVar("ResultT")
Key = tuple[str, str]
"""Project and request id."""

_TTL_S = 24 * 3600.0
_MAX_ENTRIES = 200_000


@dataclass(frozen=True, slots=True)
class _Entry(Generic[ResultT]):
    digest: bytes
    task: asyncio.Task[ResultT]
    expires_s: float


class Creations(Generic[ResultT]):
    """Creating requests and their answers.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[Key, _Entry[ResultT]] = {}

    def find(self, key: Key, digest: bytes) -> asyncio.Task[ResultT] | None:
        """Return the answer, perhaps still to come, of a request that was seen before.

        Raises:
            RequestIdReusedError: If it had another body.
        """
        entry = self._entries.get(key)
        if entry is None or entry.expires_s <= self._clock():
            return None
        if entry.digest != digest:
            raise RequestIdReusedError(
                f"request id {key[1]} was used with another body; draw a new one",
                request_id=key[1],
            )
        return entry.task

    def add(self, key: Key, digest: bytes, task: asyncio.Task[ResultT]) -> None:
        """Remember a request."""
        if len(self._entries) >= _MAX_ENTRIES:
            # The oldest comes first: entries are never moved.
            self._entries.pop(next(iter(self._entries)))
        self._entries[key] = _Entry(digest, task, self._clock() + _TTL_S)
        task.add_done_callback(lambda done: self._forget_refused(key, done))

    def raise_gone(self, key: Key, name: str) -> NoReturn:
        """Raise what a repeated request gets whose instance was deleted or expired."""
        raise RequestIdReusedError(
            f"request id {key[1]} created {name}, which was deleted or expired; draw a new one",
            request_id=key[1],
            instance=name,
        )

    def expire(self) -> None:
        """Forget old requests."""
        now_s = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.expires_s <= now_s]:
            del self._entries[key]

    def _forget_refused(self, key: Key, task: asyncio.Task[ResultT]) -> None:
        entry = self._entries.get(key)
        if entry is None or entry.task is not task:
            return
        if task.cancelled() or not isinstance(
            task.exception(), EnvironmentFailedError | type(None)
        ):
            del self._entries[key]
