"""Changes that are seen through although their caller is gone.

A cancelled call does not cancel its write; what follows from the write, waking the calls that wait
for it, must then happen all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_running: set[asyncio.Task[Any]] = set()


async def see_through(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return what some work returns; a cancelled caller does not end it."""
    task = asyncio.create_task(work)
    _running.add(task)
    task.add_done_callback(_end)
    return await asyncio.shield(task)


def _end(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        # A caller that is gone does not ask for it.
        task.exception()
