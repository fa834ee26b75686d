"""Takes episodes back whose lease ran out, and removes what ended long ago.

The sweeper wakes when the next lease ends, and at least once a second. An episode is back in its
queue within milliseconds of the end of its lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

import sqlalchemy as sa

from tinsmith_coordinator import metrics
from tinsmith_coordinator.episodes.episodes import announce
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.store import episode_store
from tinsmith_coordinator.store.database import Clock
from tinsmith_coordinator.store.records import OPEN_STATES, AttemptEnd, Episode, EpisodeState
from tinsmith_coordinator.store.tables import episodes, requests
from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.sql import Database

logger = logging.getLogger(__name__)

REQUEST_RETENTION_S = 25 * 3600.0
"""How long registrations are remembered; the contract promises 24 h."""

_MIN_PAUSE_S = 0.005
_MAX_EXPIRED = 500
_MAX_REMOVED = 200
_TIDY_INTERVAL_S = 60.0
_COUNT_INTERVAL_S = 5.0


class Keeper(Protocol):
    """Looks after the time limits of something else that the coordinator keeps."""

    async def expire(self) -> float:
        """End what is over; return the time until the next limit."""

    async def tidy(self) -> None:
        """Remove what ended long ago."""


class Sweeper:
    """Looks after leases and retention in the background.

    Args:
        bells: Rung for episodes that came back.
        clock: The time, within a transaction.
        interval_s: Longest pause between two looks.
        retention_s: How long an episode is kept after its end.
        keepers: Looked after along with the episodes.
    """

    def __init__(
        self,
        database: Database,
        bells: Bells,
        *,
        clock: Clock,
        interval_s: float,
        retention_s: float,
        keepers: Sequence[Keeper] = (),
    ) -> None:
        self._database = database
        self._bells = bells
        self._clock = clock
        self._interval_s = interval_s
        self._retention_s = retention_s
        self._keepers = keepers
        self._task: asyncio.Task[None] | None = None
        self._tidied_s = float("-inf")
        self._counted_s = float("-inf")

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._sweep_forever())

    async def stop(self) -> None:
        """End; what runs is finished by the database."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def expire(self) -> float:
        """Take back what ran out; return the time until the next lease may run out."""
        left_s = await self._database.read(self._next_expiry)
        if left_s > 0:
            return left_s
        changes = await self._database.write(self._expire)
        for before, after in changes:
            metrics.LOST_ATTEMPTS.labels("expired").inc()
            logger.info(
                "a lease ran out",
                extra={
                    "episode": str(after.name),
                    "attempt": after.num_attempts,
                    "state": after.state.value,
                },
            )
            announce(self._bells, before, after)
        return 0.0

    async def tidy(self) -> None:
        """Remove episodes and registrations that are older than promised."""
        while await self._database.write(self._remove_old):
            pass

    async def _sweep_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            pause_s = self._interval_s
            try:
                pauses_s = [await keeper.expire() for keeper in (self, *self._keepers)]
                pause_s = min(*pauses_s, self._interval_s)
                if loop.time() - self._counted_s > _COUNT_INTERVAL_S:
                    await self._database.read(_count_open)
                    self._counted_s = loop.time()
                if loop.time() - self._tidied_s > _TIDY_INTERVAL_S:
                    for keeper in (self, *self._keepers):
                        await keeper.tidy()
                    self._tidied_s = loop.time()
            except TinsmithError as error:
                logger.warning("leases cannot be looked after", extra={"reason": error.reason})
            except Exception:
                logger.exception("the sweep of leases failed by a bug")
            await asyncio.sleep(max(pause_s, _MIN_PAUSE_S))

    def _next_expiry(self, connection: sa.Connection) -> float:
        query = sa.select(sa.func.min(episodes.c.lease_expire_s))
        next_expire_s = connection.execute(query).scalar_one()
        if next_expire_s is None:
            return self._interval_s
        return float(next_expire_s) - self._clock(connection)

    def _expire(self, connection: sa.Connection) -> list[tuple[Episode, Episode]]:
        now_s = self._clock(connection)
        query = (
            sa.select(episodes)
            .where(episodes.c.lease_expire_s <= now_s)
            .order_by(episodes.c.lease_expire_s)
            .limit(_MAX_EXPIRED)
        )
        return [
            (
                episode,
                episode_store.give_up_attempt(
                    connection, episode, AttemptEnd.EXPIRED, "the lease ran out", now_s=now_s
                ),
            )
            for episode in episode_store.select(connection, query)
        ]

    def _remove_old(self, connection: sa.Connection) -> bool:
        """Remove some of what is old; return whether there may be more."""
        now_s = self._clock(connection)
        connection.execute(
            sa.delete(requests).where(requests.c.create_time_s < now_s - REQUEST_RETENTION_S)
        )
        query = sa.select(episodes.c.serial).where(
            episodes.c.end_time_s < now_s - self._retention_s
        )
        old = connection.execute(query.limit(_MAX_REMOVED)).scalars().all()
        episode_store.delete(connection, old)
        return len(old) == _MAX_REMOVED


def _count_open(connection: sa.Connection) -> None:
    query = sa.select(episodes.c.state, sa.func.count()).where(
        episodes.c.state.in_([state.value for state in OPEN_STATES])
    )
    found = {row[0]: row[1] for row in connection.execute(query.group_by(episodes.c.state))}
    for state in (EpisodeState.QUEUED, EpisodeState.CLAIMED):
        metrics.OPEN_EPISODES.labels(state.value).set(found.get(state.value, 0))
