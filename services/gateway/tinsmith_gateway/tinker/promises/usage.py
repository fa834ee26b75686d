"""What was used through this gateway, by hour: tokens and checkpoints, counted in memory first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa

from tinsmith_gateway.store.tables import usage
from tinsmith_runtime.sql import Database, insert

TRAINING = "training"
PREFILL = "sampling_prefill"
PREFILL_CACHED = "sampling_prefill_cached"
SAMPLED = "sampling_sample"
CHECKPOINT = "checkpoint"

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class UsageKey:
    """Usage of one key in one hour."""

    project: str
    hour_s: int
    session: str
    base_model: str
    kind: str


class HourlyUsage:
    """Counts by hour.

    Args:
        database: Where they are kept.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, database: Database, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._wall_clock = wall_clock
        self._counts: Counter[UsageKey] = Counter()

    def add(self, project: str, session: str, base_model: str, kind: str, count: int) -> None:
        """Count something that was used now."""
        if count:
            hour_s = int(self._wall_clock()) // HOUR_S * HOUR_S
            self._counts[UsageKey(project, hour_s, session, base_model, kind)] += count

    async def flush(self) -> None:
        """Write what was counted since the last time."""
        counts, self._counts = self._counts, Counter()
        if not counts:
            return

        def write(connection: sa.Connection) -> None:
            for key, count in counts.items():
                statement = insert(connection, usage).values(
                    project=key.project,
                    hour_s=key.hour_s,
                    session=key.session,
                    base_model=key.base_model,
                    kind=key.kind,
                    count=count,
                )
                connection.execute(
                    statement.on_conflict_do_update(
                        index_elements=list(usage.primary_key.columns),
                        set_={"count": usage.c.count + count},
                    )
                )

        try:
            await self._database.write(write)
        except Exception:
            self._counts.update(counts)
            raise

    async def read(
        self, project: str, *, begin_s: float, end_s: float
    ) -> list[tuple[UsageKey, int]]:
        """Return the counts of a project in a window, by hour and then the largest first."""
        await self.flush()
        query = (
            sa.select(usage)
            .where(usage.c.project == project, usage.c.hour_s >= begin_s, usage.c.hour_s < end_s)
            .order_by(usage.c.hour_s, usage.c.count.desc())
        )

        def read(connection: sa.Connection) -> list[tuple[UsageKey, int]]:
            return [
                (UsageKey(row.project, row.hour_s, row.session, row.base_model, row.kind), row[5])
                for row in connection.execute(query)
            ]

        return await self._database.read(read)
