"""Work that is finished although its caller is gone.

A cancelled call does not cancel its write. What follows from the write, such as waking the calls
that wait for it, must then happen all the same. Work goes on until it ends or the loop is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_running: set[asyncio.Task[Any]] = set()


async def see_through(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return what some work returns; a cancelled caller does not end it."""
    return await asyncio.shield(start(work, _running))


def start(
    work: Coroutine[Any, Any, ResultT],
    running: set[asyncio.Task[Any]] | set[asyncio.Task[ResultT]],
) -> asyncio.Task[ResultT]:
    """Start work whose callers may leave, and keep its task in a set until it ends.

    The failure of work that no caller waits for is logged at debug level, and never warned of.
    """
    task = asyncio.create_task(work)
    running.add(task)

    def end(task: asyncio.Task[ResultT]) -> None:
        running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("work ended with an error", extra={"problem": str(error)})

    task.add_done_callback(end)
    return task
