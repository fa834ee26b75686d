"""Removes batches whose results were kept for as long as promised, or take too much."""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith_coordinator.store import rollout_store
from tinsmith_coordinator.store.database import Clock
from tinsmith_coordinator.store.tables import rollout_batches
from tinsmith_runtime.sql import Database

_MAX_REMOVED = 20


class RolloutKeeper:
    """Looks after old results; driven by the sweeper.

    Args:
        clock: The time, within a transaction.
        retention_s: How long results are kept after the end of their batch.
        max_bytes: What the results of one project may take; the oldest go first.
    """

    def __init__(
        self, database: Database, *, clock: Clock, retention_s: float, max_bytes: int
    ) -> None:
        self._database = database
        self._clock = clock
        self._retention_s = retention_s
        self._max_bytes = max_bytes

    async def expire(self) -> float:
        """Return that no time limit is near: batches are ended by what plays them."""
        return float("inf")

    async def tidy(self) -> None:
        """Remove results that are too old, or more than there may be."""
        while await self._database.write(self._remove_old):
            pass
        while await self._database.write(self._remove_large):
            pass

    def _remove_old(self, connection: sa.Connection) -> bool:
        """Remove some of what is old; return whether there may be more."""
        limit_s = self._clock(connection) - self._retention_s
        query = sa.select(rollout_batches.c.serial).where(rollout_batches.c.end_time_s < limit_s)
        old = connection.execute(query.limit(_MAX_REMOVED)).scalars().all()
        rollout_store.delete(connection, old)
        return len(old) == _MAX_REMOVED

    def _remove_large(self, connection: sa.Connection) -> bool:
        """Remove the oldest results of a project that has too many; return whether one has."""
        total = sa.func.sum(rollout_batches.c.num_bytes)
        query = (
            sa.select(rollout_batches.c.project)
            .where(rollout_batches.c.end_time_s.is_not(None))
            .group_by(rollout_batches.c.project)
            .having(total > self._max_bytes)
            .limit(1)
        )
        project = connection.execute(query).scalar_one_or_none()
        if project is None:
            return False
        oldest = (
            sa.select(rollout_batches.c.serial)
            .where(
                rollout_batches.c.project == project,
                rollout_batches.c.end_time_s.is_not(None),
                rollout_batches.c.num_bytes > 0,
            )
            .order_by(rollout_batches.c.end_time_s)
            .limit(1)
        )
        rollout_store.delete(connection, connection.execute(oldest).scalars().all())
        return True
