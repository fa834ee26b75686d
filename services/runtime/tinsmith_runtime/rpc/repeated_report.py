"""Sends what a pod noted, again and again in the background, and what is left when it stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_LAST_TIMEOUT_S = 2.0


class RepeatedReport:
    """Reports until it is stopped; a report that fails ends nothing.

    Args:
        what: What is reported, for the log.
        send: Sends what waits.
        interval_s: How long what is noted waits for its report.
    """

    def __init__(
        self, what: str, send: Callable[[], Awaitable[None]], *, interval_s: float = _INTERVAL_S
    ) -> None:
        self._what = what
        self._send = send
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to report, at once."""
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """Report what is left, if that goes soon, and end."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_TIMEOUT_S):
                await self._try_to_send()

    async def _repeat(self) -> None:
        while True:
            await self._try_to_send()
            await asyncio.sleep(self._interval_s)

    async def _try_to_send(self) -> None:
        try:
            await self._send()
        except Exception:
            logger.exception("not reported", extra={"what": self._what})
