"""The queue of runs that wait for a slot of an engine: first come, first served.

An engine holds so many runs at once. Another one that has work waits here until the first of the
queue can park a run. The first is woken when a slot may have become free: a run was parked or
deleted, or one that was computed is at rest. Runs that are computed again and again give way to the
queue, one at a time. A run that came into the engine keeps its slot for one cycle at least. So two
runs in one slot alternate instead of pushing each other out before either computed anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator

_BACKSTOP_S = 5.0
"""Looks again after this time, should a free slot not have been announced."""


class SlotQueue:
    """The queues, one for each base model."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, dict[str, Waiting]] = defaultdict(dict)

    @contextlib.contextmanager
    def join(self, base_model: str, run: str) -> Iterator[Waiting]:
        """Wait in the queue while the context lasts; a run is there once."""
        line = self._lines[base_model]
        waiting = line[run] = Waiting(self, base_model, run)
        try:
            yield waiting
        finally:
            del line[run]
            self.wake_first(base_model)

    def is_first(self, base_model: str, run: str) -> bool:
        """Whether a run is next to get a slot."""
        return next(iter(self._lines[base_model]), None) == run

    def wants_slot(self, base_model: str) -> bool:
        """Whether the first of the queue waits for a run to give way."""
        first = next(iter(self._lines[base_model].values()), None)
        return first is not None and first.is_asleep

    def wake_first(self, base_model: str) -> None:
        """Have the first of the queue look for a slot again."""
        first = next(iter(self._lines[base_model].values()), None)
        if first is not None:
            first.wake()

    def wake(self, base_model: str, run: str) -> None:
        """Have a run look why it waits: it may have been deleted."""
        waiting = self._lines[base_model].get(run)
        if waiting is not None:
            waiting.wake()


class Waiting:
    """One run in the queue."""

    def __init__(self, line: SlotQueue, base_model: str, run: str) -> None:
        self._line = line
        self._base_model = base_model
        self._run = run
        self._woken = asyncio.Event()
        self.is_asleep = False

    @property
    def is_first(self) -> bool:
        """Whether it is this run that may take the next slot."""
        return self._line.is_first(self._base_model, self._run)

    def wake(self) -> None:
        """End the sleep, or the next one at once."""
        self._woken.set()

    async def sleep(self, timeout_s: float) -> None:
        """Return when it is worth looking again, or after a time."""
        self.is_asleep = not self._woken.is_set()
        try:
            async with asyncio.timeout(min(timeout_s, _BACKSTOP_S)):
                await self._woken.wait()
        except TimeoutError:
            return
        finally:
            self.is_asleep = False
            self._woken.clear()
