"""Which weights the one base of an engine holds, and which requests wait for other ones.

vLLM holds one set of base weights. Requests for the same set run together; one for another set
waits until they have ended, and later ones wait behind it. No token is a mixture of two sets, and
no set waits for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

BASE = 0
"""The weights that the model was started with; adapters need them."""


class BaseTurns:
    """The turns of sets of base weights.

    Args:
        switch: Loads a set; called while nothing runs.
    """

    def __init__(self, switch: Callable[[int], Awaitable[None]]) -> None:
        self._switch = switch
        self._current = BASE
        self._num_running = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._switching: asyncio.Task[None] | None = None

    async def enter(self, key: int) -> None:
        """Wait until the weights under a key are loaded; a matching `leave` must follow.

        Raises:
            Exception: What `switch` raised.
        """
        if key == self._current and not self._waiting and self._switching is None:
            self._num_running += 1
            return
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((key, admitted))
        self._advance()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                self.leave()
            raise

    def leave(self) -> None:
        """End the use of the weights."""
        self._num_running -= 1
        self._advance()

    def restarted(self) -> None:
        """Note that the engine has been started anew, with its first weights.

        What ran in the one before has left by then.
        """
        self._current = BASE
        self._advance()

    def _advance(self) -> None:
        if self._switching is not None:
            return
        while self._waiting:
            key, admitted = self._waiting[0]
            if admitted.done():
                self._waiting.popleft()
            elif key == self._current:
                self._waiting.popleft()
                self._num_running += 1
                admitted.set_result(None)
            elif self._num_running == 0:
                self._switching = asyncio.create_task(self._change(key))
                return
            else:
                return

    async def _change(self, key: int) -> None:
        try:
            await self._switch(key)
            self._current = key
        except Exception as error:
            for _, admitted in self._waiting:
                if not admitted.done():
                    admitted.set_exception(error)
            self._waiting.clear()
        finally:
            self._switching = None
            self._advance()
