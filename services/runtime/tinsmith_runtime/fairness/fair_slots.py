"""Places for work that runs at once, shared out by project.

A place that comes free goes to the project with the fewest, and of those to the one that waits
longest; within a project, first come is first served. A project never has more than its own limit.
Where it could have all places, the last one is kept for a project that has none: long work of
one project delays only that project.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator


class FairSlots:
    """Places of one event loop.

    Args:
        num_slots: How many there are.
        max_per_project: How many of them a project may have.
    """

    def __init__(self, num_slots: int, max_per_project: int) -> None:
        self._num_slots = num_slots
        self._max_per_project = max_per_project
        self._held: Counter[str] = Counter()
        # The project that was given a place longest ago is first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def hold(self, project: str) -> AsyncIterator[None]:
        """Wait for a place and keep it in this context."""
        if self._waiting.get(project) or not self._may_have(project):
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(project, deque()).append(place)
            try:
                await place
            except BaseException:
                if place.done() and not place.cancelled():
                    self._leave(project)
                else:
                    self._forget(project, place)
                raise
        else:
            self._held[project] += 1
        try:
            yield
        finally:
            self._leave(project)

    def _may_have(self, project: str) -> bool:
        num_free = self._num_slots - self._held.total()
        held = self._held[project]
        return held < self._max_per_project and num_free > (1 if held else 0)

    def _leave(self, project: str) -> None:
        self._held[project] -= 1
        if not self._held[project]:
            del self._held[project]
        self._give()

    def _give(self) -> None:
        while True:
            ready = [project for project in self._waiting if self._may_have(project)]
            if not ready:
                return
            project = min(ready, key=lambda name: self._held[name])
            places = self._waiting.pop(project)
            place = places.popleft()
            if places:
                self._waiting[project] = places
            if not place.done():
                self._held[project] += 1
                place.set_result(None)

    def _forget(self, project: str, place: asyncio.Future[None]) -> None:
        places = self._waiting.get(project)
        if places is not None and place in places:
            places.remove(place)
            if not places:
                del self._waiting[project]
