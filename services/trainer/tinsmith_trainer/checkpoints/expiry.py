"""Removes what expired: checkpoints, exports, idle uploads, their files, and old audit events.

The row goes first and the files after a grace period, in which a sampler of another process or a
download may finish; a tombstone says for a week that a checkpoint expired. Each step may be
repeated or cut off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.ledger import Ledger
from tinsmith_trainer.checkpoints.registry import CheckpointRegistry
from tinsmith_trainer.checkpoints.uploads import Uploads
from tinsmith_trainer.metrics import EXPIRED, EXPIRED_CHECKPOINTS

logger = logging.getLogger(__name__)

TOMBSTONE_S = 7 * 24 * 3600.0


class CheckpointSweeper:
    """Sweeps again and again.

    Args:
        ledger: What there is.
        checkpoints: Removes folders.
        uploads: What clients did not finish.
        chores: What else is to be looked after now and then, as it may have been left undone.
        audit_retention_s: Age at which audit events go.
        interval_s: Pause between two sweeps.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        ledger: Ledger,
        checkpoints: CheckpointRegistry,
        uploads: Uploads,
        *,
        chores: Sequence[Callable[[], Awaitable[None]]] = (),
        audit_retention_s: float,
        interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._uploads = uploads
        self._chores = chores
        self._audit_retention_s = audit_retention_s
        self._interval_s = interval_s
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sweep now, and then in intervals."""
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        """Stop; the next process goes on."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def sweep(self) -> None:
        """Remove what is due."""
        num_expired = await self._checkpoints.expire()
        if num_expired:
            EXPIRED_CHECKPOINTS.inc(num_expired)
            logger.info("expired", extra={"num_folders": num_expired})
        await self._checkpoints.remove_folders()
        await self._ledger.forget_expired(before_s=self._clock() - TOMBSTONE_S)
        num_events = await self._ledger.forget_events(
            before_s=self._clock() - self._audit_retention_s
        )
        EXPIRED.labels("audit_event").inc(num_events)
        await asyncio.to_thread(self._uploads.sweep)
        for chore in self._chores:
            await chore()

    async def _repeat(self) -> None:
        while True:
            try:
                await self.sweep()
            except (TinsmithError, OSError) as error:
                logger.warning("sweep put off", extra={"problem": str(error)})
            except Exception:
                logger.exception("sweep failed by a bug")
            await asyncio.sleep(self._interval_s)
