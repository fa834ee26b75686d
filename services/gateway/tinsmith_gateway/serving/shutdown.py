"""The end of a gateway: what only waits is cut at once, everything else finishes.

A long poll would hold up the end for as long as it may last, for nothing: its client asks again
anyway, and gets the same answer from the gateway that serves then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from tinsmith_runtime.errors import DrainingError


class Drain:
    """Whether the gateway is shutting down, and which calls may be cut then."""

    def __init__(self) -> None:
        self.has_begun = False
        self._waits: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        """Cut all waits, now and from now on."""
        self.has_begun = True
        for task in self._waits:
            task.cancel()

    def check(self) -> None:
        """Raise `DrainingError` if the gateway is shutting down."""
        if self.has_begun:
            raise _draining()

    @contextlib.contextmanager
    def running(self, *, is_wait: bool) -> Iterator[None]:
        """Say of a request that is cut why, and cut the current task first if it only waits.

        Raises:
            DrainingError: If it was cut.
        """
        task = asyncio.current_task()
        assert task is not None, "a request runs in a task"
        if is_wait:
            self.check()
            self._waits.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.has_begun:
                raise
            task.uncancel()
            raise _draining() from None
        finally:
            self._waits.discard(task)


def _draining() -> DrainingError:
    return DrainingError("the gateway is shutting down; send the request again")
