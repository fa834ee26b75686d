"""A gate that many may pass at once, and that closes once all of them are through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Tells apart what goes on all the time and what must not happen meanwhile."""

    def __init__(self) -> None:
        self._num_passing = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Do something beside others that pass; waits while the gate is closed."""
        while self._is_closed:
            await self._changed.wait()
        self._num_passing += 1
        try:
            yield
        finally:
            self._num_passing -= 1
            self._notify()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Do something while nothing passes; what passes now ends, and nothing else begins."""
        while self._is_closed:
            await self._changed.wait()
        self._is_closed = True
        try:
            while self._num_passing:
                await self._changed.wait()
            yield
        finally:
            self._is_closed = False
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
