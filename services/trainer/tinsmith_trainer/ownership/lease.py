"""The lease of this process on a shared ledger: renewed, and believed in for less than it lasts.

The fence alone keeps a process from writing to a run that it lost. The lease is about time. It says
how long others leave a silent process its runs. It also says when that process stops to compute and
to answer for what may not be its own any more. Only the database's clock ends a lease; here a
monotonic clock stops at 0.6 of it, counted from before the renewal was sent. A process that was
stopped for longer (paused, swapped out, cut off) finds its lease stale before it does more.

A lease that could not be renewed and that no other process took is renewed late and nothing is
lost. One that was taken ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import TinsmithError, UnavailableError
from tinsmith_runtime.ledger import Ledger
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_trainer.metrics import LEASE_AGE_SECONDS
from tinsmith_trainer.runs.run import LiveRun

logger = logging.getLogger(__name__)

_TRUSTED_PART = 0.6
_RENEWALS = 5
"""Renewals in the life of a lease."""


class Lease:
    """Renews the lease and says whether it holds.

    Args:
        ledger: Where leases are.
        runs: The runs that this process believes to hold, by name.
        ttl_s: How long others wait before they take the runs of a silent process.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        runs: Mapping[str, LiveRun],
        *,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._runs = runs
        self._ttl_s = ttl_s
        self._clock = clock
        self._renewed_s = float("-inf")
        self._renewed = asyncio.Event()
        self._look = asyncio.Event()

    @property
    def is_current(self) -> bool:
        """Whether no other process may have taken a run of this one."""
        if not self._ledger.is_shared:
            return True
        return self._clock() - self._renewed_s < _TRUSTED_PART * self._ttl_s

    def obstacle(self) -> str:
        """Say why nothing is computed; empty while the lease is current."""
        if self.is_current:
            return ""
        return "the trainer to renew its lease in the database, which it could not for a while"

    def require(self) -> None:
        """Raise `UnavailableError` unless the lease is current."""
        if not self.is_current:
            raise UnavailableError(
                "the trainer could not renew its lease and may have lost the run; send the request "
                "again",
                retry_after_s=self._ttl_s / _RENEWALS,
            )

    async def wait_current(self) -> None:
        """Return once the lease is current."""
        while not self.is_current:
            self._renewed.clear()
            self._look.set()
            await self._renewed.wait()

    def look(self) -> None:
        """Ask the ledger now: something was said about leases."""
        self._look.set()

    async def keep(self) -> None:
        """Renew for ever.

        Raises:
            FencedError: If another process holds a run of this one.
        """
        if self._ledger.is_shared:
            # Asked when it is scraped: a loop that hangs cannot say so.
            LEASE_AGE_SECONDS.set_function(lambda: self._clock() - self._renewed_s)
        while self._ledger.is_shared:
            try:
                await self.renew()
            except FencedError:
                raise
            except TinsmithError as error:
                logger.warning("lease not renewed", extra={"problem": error.message})
            self._look.clear()
            try:
                async with asyncio.timeout(self._ttl_s / _RENEWALS):
                    await self._look.wait()
            except TimeoutError:
                continue

    async def renew(self) -> None:
        """Renew once.

        Raises:
            FencedError: If another process holds a run of this one.
            StorageUnavailableError: If the database cannot be reached.
        """
        begin_s = self._clock()
        believed = list(self._runs.values())
        failpoints.passing("trainer.renew")
        held = await self._ledger.renew(self._ttl_s, [run.name for run in believed])
        failpoints.passing("trainer.renewed")
        for run in believed:
            # One that was let go meanwhile is not missed.
            is_ours = self._runs.get(run.name) is run and run.is_staying
            if is_ours and run.name not in held:
                raise FencedError(
                    f"another trainer holds {run.name}; this process must stop", run=run.name
                )
        self._renewed_s = begin_s
        self._renewed.set()
