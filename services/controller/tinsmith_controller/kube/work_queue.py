"""Keys of objects that are to be looked at: each once, by one worker at a time, after a delay."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from tinsmith.backoff import backoff_s

KeyT = TypeVar("KeyT", bound=Hashable)

_RETRY_S = (0.1, 60.0)


class WorkQueue(Generic[KeyT]):
    """A queue for several workers.

    A key that is added while it waits is looked at once; one that is added while a worker has it is
    looked at again afterwards.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[KeyT, float] = {}
        self._heap: list[tuple[float, int, KeyT]] = []
        self._serial = itertools.count()
        self._taken: set[KeyT] = set()
        self._failures: dict[KeyT, int] = {}
        self._is_closed = False

    def __len__(self) -> int:
        with self._changed:
            return len(self._due)

    def add(self, key: KeyT, delay_s: float = 0.0) -> None:
        """Have a key looked at, at the latest after a delay."""
        due_s = self._clock() + max(0.0, delay_s)
        with self._changed:
            if self._is_closed or self._due.get(key, float("inf")) <= due_s:
                return
            self._due[key] = due_s
            heapq.heappush(self._heap, (due_s, next(self._serial), key))
            self._changed.notify()

    def take(self, timeout_s: float = 1.0) -> KeyT | None:
        """Return a key that is due and no other worker has, or None; call `done` with it."""
        end_s = self._clock() + timeout_s
        with self._changed:
            while not self._is_closed:
                key = self._pop()
                if key is not None:
                    self._taken.add(key)
                    return key
                now_s = self._clock()
                if now_s >= end_s:
                    return None
                self._changed.wait(max(0.001, min(end_s, self._next_s()) - now_s))
            return None

    def done(self, key: KeyT, *, failed: bool = False) -> None:
        """Give a key back; after a failure it comes again, later each time."""
        with self._changed:
            self._taken.discard(key)
            if failed:
                count = self._failures[key] = self._failures.get(key, 0) + 1
            else:
                self._failures.pop(key, None)
            self._changed.notify_all()
        if failed:
            self.add(key, backoff_s(count, *_RETRY_S))

    def close(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _next_s(self) -> float:
        """Return when the next free key is due; `done` wakes those who wait for taken ones."""
        return min(
            (due_s for key, due_s in self._due.items() if key not in self._taken),
            default=float("inf"),
        )

    def _pop(self) -> KeyT | None:
        """Return a due key that is free; those that are taken wait until they are given back."""
        kept: list[tuple[float, int, KeyT]] = []
        found: KeyT | None = None
        while self._heap and self._heap[0][0] <= self._clock():
            entry = heapq.heappop(self._heap)
            due_s, _, key = entry
            if self._due.get(key) != due_s:
                continue
            if key in self._taken:
                kept.append(entry)
                continue
            del self._due[key]
            found = key
            break
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return found
