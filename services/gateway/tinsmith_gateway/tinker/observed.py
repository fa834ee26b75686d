"""Which failures a client has seen, by what it was told.

An optimizer step whose accumulation lacks a batch is failed by the trainer, unless its client knew
of the loss and went on: natively the client says so. The SDK does not, but it asks here for each
result, so that this is known: a step may pass over the failures that were delivered before it, if
everything below them was delivered as well. What is not known, as after a restart, counts as not
seen: the careful reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import sqlalchemy as sa

from tinsmith_gateway.tables import observed_steps
from tinsmith_runtime.sql import Database, insert

_MAX_RUNS = 10_000
_KEEP_S = 25 * 3600.0


@dataclass(slots=True)
class _Seen:
    """What the client of a run was told since the last step that closed its accumulation."""

    mark: int | None = None
    """Everything up to this number was delivered; None where the beginning is not known."""
    delivered: set[int] = field(default_factory=set)
    last_failure: int = 0


class ObservedFailures:
    """Deliveries by run.

    Args:
        database: Keeps what steps were told, since a repeated step must say the same.
        wall_clock: Seconds since the epoch.
    """

    def __init__(self, database: Database, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._wall_clock = wall_clock
        self._runs: dict[str, _Seen] = {}

    def note_created(self, run: str, first: int) -> None:
        """Note that a run begins, whose first call has a number."""
        self._seen(run).mark = first - 1

    def note_delivered(
        self, run: str, number: int, *, is_failure: bool, closes_accumulation: bool
    ) -> None:
        """Note that the client of a run was told of an operation.

        Args:
            run: Resource name of the run.
            number: Sequence number of the operation.
            is_failure: Whether it failed.
            closes_accumulation: Whether no gradient is left behind it: a step or load that
                succeeded.
        """
        seen = self._seen(run)
        if closes_accumulation and (seen.mark is None or number > seen.mark):
            seen.mark = number
            seen.delivered = {other for other in seen.delivered if other > number}
        seen.delivered.add(number)
        if is_failure:
            seen.last_failure = max(seen.last_failure, number)
        while seen.mark is not None and seen.mark + 1 in seen.delivered:
            seen.mark += 1
            seen.delivered.discard(seen.mark)

    async def before_step(self, run: str, number: int) -> int:
        """Return up to which number the sender of a step knows all outcomes; 0 if that is moot."""
        query = sa.select(observed_steps.c.observed).where(
            observed_steps.c.run == run, observed_steps.c.sequence_number == number
        )
        known = await self._database.read(
            lambda connection: connection.execute(query).scalar_one_or_none()
        )
        if known is not None:
            return int(known)
        seen = self._seen(run)
        if seen.mark is None or not 0 < seen.last_failure <= seen.mark or number <= seen.mark:
            return 0
        observed, now_s = seen.mark, self._wall_clock()

        def write(connection: sa.Connection) -> None:
            connection.execute(
                sa.delete(observed_steps).where(observed_steps.c.create_time_s < now_s - _KEEP_S)
            )
            connection.execute(
                insert(connection, observed_steps)
                .values(run=run, sequence_number=number, observed=observed, create_time_s=now_s)
                .on_conflict_do_nothing()
            )

        await self._database.write(write)
        return observed

    def _seen(self, run: str) -> _Seen:
        seen = self._runs.get(run)
        if seen is None:
            if len(self._runs) >= _MAX_RUNS:
                self._runs.clear()
            seen = self._runs[run] = _Seen()
        return seen
