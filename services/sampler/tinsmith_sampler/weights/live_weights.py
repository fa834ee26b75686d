"""Newer weights of live runs, for requests that take them while they decode.

One task for each run that is followed, however many requests follow it. In one process the task
waits until the engine says that the run has other weights; across processes it asks the trainer at
a bounded rate. Decoding goes on meanwhile, and goes on as it is if newer weights cannot be had.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tinsmith_engine import WeightVersion
from tinsmith_runtime.errors import TinsmithError, VersionNotLoadedError
from tinsmith_sampler.requests.sessions import Target

logger = logging.getLogger(__name__)

Fetch = Callable[[Target], Awaitable[WeightVersion | None]]
Take = Callable[[WeightVersion], Awaitable[None]]


@dataclass(slots=True)
class _Followed:
    target: Target
    takers: dict[int, Take] = field(default_factory=dict)
    is_outdated: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class WeightFollower:
    """Brings the newest weights of runs to the requests that follow them.

    Args:
        fetch: Returns the newest weights of a run.
        poll_interval_s: Time between two looks for newer weights, or after a failure.
        is_told: Whether `note_outdated` is called when there are newer weights, so that it needs no
            looking.
    """

    def __init__(self, fetch: Fetch, *, poll_interval_s: float, is_told: bool) -> None:
        self._fetch = fetch
        self._poll_interval_s = poll_interval_s
        self._is_told = is_told
        self._followed: dict[str, _Followed] = {}
        self._num_takers = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def follow(self, target: Target, take: Take) -> Callable[[], None]:
        """Give newer weights of a run to `take` until the returned function is called."""
        self._loop = asyncio.get_running_loop()
        followed = self._followed.get(target.run)
        if followed is None:
            followed = self._followed[target.run] = _Followed(target)
            followed.task = self._loop.create_task(self._bring(followed))
        # A trainer may have moved since the run was first followed.
        followed.target = target
        if self._is_told:
            # The run may have stepped on before the first request followed it.
            followed.is_outdated.set()
        self._num_takers += 1
        number = self._num_takers
        followed.takers[number] = take

        def stop() -> None:
            followed.takers.pop(number, None)
            if followed.takers or followed.task is None:
                return
            followed.task.cancel()
            if self._followed.get(target.run) is followed:
                del self._followed[target.run]

        return stop

    def note_outdated(self, run: str) -> None:
        """Note that a run has newer weights than a request samples from. Called on any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile.
                self._loop.call_soon_threadsafe(self._wake, run)

    def _wake(self, run: str) -> None:
        if run in self._followed:
            self._followed[run].is_outdated.set()

    async def _bring(self, followed: _Followed) -> None:
        timeout_s = None if self._is_told else self._poll_interval_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await followed.is_outdated.wait()
            followed.is_outdated.clear()
            is_brought = await self._bring_once(followed)
            timeout_s = None if self._is_told and is_brought else self._poll_interval_s

    async def _bring_once(self, followed: _Followed) -> bool:
        """Give the newest weights to all that follow; return whether they could be had."""
        try:
            handle = await self._fetch(followed.target)
            if handle is not None:
                for take in list(followed.takers.values()):
                    await take(handle)
        except VersionNotLoadedError:
            # The run stepped on in between: there are even newer ones.
            followed.is_outdated.set()
        except TinsmithError as error:
            logger.info(
                "newer weights cannot be had; sampling goes on with those that there are",
                extra={"run": followed.target.run, "reason": error.reason},
            )
            return False
        except Exception:
            logger.exception("looking for newer weights failed")
            return False
        return True
