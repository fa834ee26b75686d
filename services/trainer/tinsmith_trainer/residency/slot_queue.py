"""The line of runs that wait for a place in an engine: first come, first served.

An engine holds so many runs at once; another one that has work waits here until the first of the
line can park somebody. Whoever is first is woken when a place may have become free: a run was
parked or deleted, or one that was computed is at rest. Runs that are computed again and again give
way to the line, one at a time; a run that came into the engine keeps its place for one turn at
least, so that two runs in one place take turns instead of pushing each other out before either
computed anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator

_BACKSTOP_S = 5.0
"""Looks again after this time, should nobody have been told of a free place."""


class PlaceLine:
    """The lines, one for each base model."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, dict[str, Waiting]] = defaultdict(dict)

    @contextlib.contextmanager
    def join(self, base_model: str, run: str) -> Iterator[Waiting]:
        """Stand in line while the context lasts; a run stands there once."""
        line = self._lines[base_model]
        waiting = line[run] = Waiting(self, base_model, run)
        try:
            yield waiting
        finally:
            del line[run]
            self.wake_first(base_model)

    def is_first(self, base_model: str, run: str) -> bool:
        """Whether a run is next to get a place."""
        return next(iter(self._lines[base_model]), None) == run

    def wants_place(self, base_model: str) -> bool:
        """Whether the first of the line waits for somebody to give way."""
        first = next(iter(self._lines[base_model].values()), None)
        return first is not None and first.is_asleep

    def wake_first(self, base_model: str) -> None:
        """Have the first of the line look for a place again."""
        first = next(iter(self._lines[base_model].values()), None)
        if first is not None:
            first.wake()

    def wake(self, base_model: str, run: str) -> None:
        """Have a run look why it waits: it may have been deleted."""
        waiting = self._lines[base_model].get(run)
        if waiting is not None:
            waiting.wake()


class Waiting:
    """One run in the line."""

    def __init__(self, line: PlaceLine, base_model: str, run: str) -> None:
        self._line = line
        self._base_model = base_model
        self._run = run
        self._woken = asyncio.Event()
        self.is_asleep = False

    @property
    def is_first(self) -> bool:
        """Whether it is this run that may take the next place."""
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
