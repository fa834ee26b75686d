"""The reaper: ends sessions that lost their heartbeat, and sees releases through.

The transaction that decides a release also stores it, and the trainer's answer removes it. So
neither a crash here nor one there loses it. A trainer that does not know the run, or holds it under
a higher epoch, has nothing to release.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import ErrorCode, TinsmithError
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.auth.api_keys import Keys
from tinsmith_scheduler.metrics import NEXT_KEY_EXPIRY, PENDING_RELEASES
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.runs.sessions import Sessions
from tinsmith_scheduler.store import retention
from tinsmith_scheduler.store.database import forget_audit_events, forget_requests
from tinsmith_scheduler.store.records import Release
from tinsmith_scheduler.workers.trainer_protocol import Trainers
from tinsmith_scheduler.workers.workers import Workers

logger = logging.getLogger(__name__)

_DONE_CODES = frozenset({ErrorCode.NOT_FOUND, ErrorCode.ABORTED})
_MAX_CONCURRENT_RELEASES = 16
_FORGET_INTERVAL_S = 600.0


class Reaper:
    """A background task that parks, releases and forgets resources that have expired.

    Args:
        database: Where releases and answers are kept.
        sessions: The sessions to watch.
        workers: The workers that are registered.
        trainers: Asked to release runs.
        interval_s: Pause between two rounds.
        audit_retention_s: How long audit events are kept.
        ended_retention_s: How long sessions that ended, deleted runs and refused keys are kept.
        keys: Those that are to be forgotten too.
        clock: Monotonic seconds.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        *,
        sessions: Sessions,
        workers: Workers,
        trainers: Trainers,
        interval_s: float,
        audit_retention_s: float,
        ended_retention_s: float,
        keys: Keys,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._sessions = sessions
        self._workers = workers
        self._trainers = trainers
        self._interval_s = interval_s
        self._audit_retention_s = audit_retention_s
        self._ended_retention_s = ended_retention_s
        self._keys = keys
        self._clock = clock
        self._wall_clock = wall_clock
        self._forget_at_s = clock()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin the rounds; those that call trainers do not hold up the others."""
        self._tasks = [
            asyncio.create_task(self._repeat(self.reap)),
            asyncio.create_task(self._repeat(self.release)),
        ]

    async def stop(self) -> None:
        """End the rounds."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def reap(self) -> None:
        """End sessions that are overdue, forget old answers, bring gauges up to date."""
        await self._sessions.expire_overdue()
        self._workers.measure()
        if self._clock() >= self._forget_at_s:
            self._forget_at_s = self._clock() + _FORGET_INTERVAL_S
            now_s = self._wall_clock()
            await self._database.write(lambda connection: forget_requests(connection, now_s=now_s))
            before_s = now_s - self._audit_retention_s
            await self._database.write(
                lambda connection: forget_audit_events(connection, before_s=before_s)
            )
            await self._forget_ended(now_s)
            expiry_s = await self._database.read(
                lambda connection: retention.next_key_expiry_s(connection, now_s)
            )
            NEXT_KEY_EXPIRY.set(expiry_s)

    async def _forget_ended(self, now_s: float) -> None:
        await self._database.write(lambda connection: retention.stamp_ended(connection, now_s))
        before_s = now_s - self._ended_retention_s
        for forget in (retention.forget_sessions, retention.forget_runs):
            while await self._database.write(
                lambda connection, forget=forget: forget(connection, before_s)  # type: ignore[misc]
            ):
                continue
        while await self._database.write(retention.forget_metrics):
            continue
        await self._keys.forget(before_s)

    async def _repeat(self, round_of: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await round_of()
            except Exception:
                logger.exception("a round of the reaper failed")
            await asyncio.sleep(self._interval_s)

    async def release(self) -> None:
        """Ask each trainer that is alive for the releases it owes."""
        pending = await self._database.read(run_store.list_releases)
        PENDING_RELEASES.set(len(pending))
        slots = asyncio.Semaphore(_MAX_CONCURRENT_RELEASES)

        async def release_one(release: Release) -> None:
            async with slots:
                await self._release(release)

        await asyncio.gather(*(release_one(release) for release in pending))

    async def _release(self, release: Release) -> None:
        address = self._workers.address(release.worker)
        if not address:
            return
        failpoints.passing("scheduler.release")
        try:
            await self._trainers.release_run(
                address, run=release.run, epoch=release.epoch, mode=release.mode
            )
        except TinsmithError as error:
            if error.code not in _DONE_CODES:
                logger.warning(
                    "release not confirmed",
                    extra={"run": release.run, "worker": release.worker, "reason": error.reason},
                )
                return
        failpoints.passing("scheduler.released")
        await self._database.write(
            lambda connection: run_store.confirm_release(connection, release)
        )
