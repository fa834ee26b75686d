"""The metrics of all runs: recorded within limits, read as curves, listed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sqlalchemy as sa

from tinsmith.names import RunName
from tinsmith_runtime.errors import RateLimitedError, ResourceExhaustedError
from tinsmith_runtime.fairness.token_buckets import TokenBuckets
from tinsmith_runtime.rpc.requests import decode_key_token, encode_key_token
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.run_metrics import blocks, metric_store
from tinsmith_scheduler.run_metrics.blocks import Points
from tinsmith_scheduler.run_metrics.metric_store import CurveQuery, Curves, Metric, MetricLimits
from tinsmith_scheduler.runs import run_store
from tinsmith_scheduler.store.records import PageRequest

ALL_RUNS = "-"
"""In the place of a run's id: all runs of a project."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The values of one step.

    Attributes:
        step: Which one.
        metrics: Values by name.
        time_s: When they were measured; None for now.
        sequence_number: Of the optimizer step, if its trainer measured it; else 0.
    """

    step: int
    metrics: Mapping[str, float]
    time_s: float | None = None
    sequence_number: int = 0


class RunMetrics:
    """The metrics of all runs.

    Args:
        database: Where they are kept.
        limits: What a run and a project may keep.
        rate: How many points each project may record in a second.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        *,
        limits: MetricLimits,
        rate: TokenBuckets,
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._limits = limits
        self._rate = rate
        self._wall_clock = wall_clock

    async def record(
        self, run: RunName, records: Sequence[StepRecord], *, is_limited: bool = True
    ) -> int:
        """Record what was measured, and return the revision of the run's metrics.

        A run that was finished before one of the steps is finished no more.

        Args:
            run: Which run.
            records: Of two values for one step and name, the later wins.
            is_limited: Whether it counts against the rate of the project.

        Raises:
            RunNotFoundError: If there is no such run.
            ResourceExhaustedError: If run or project have too much; nothing was recorded.
            RateLimitedError: If the project records too fast; nothing was recorded.
        """
        if is_limited:
            self._take_points(run.project, sum(len(record.metrics) for record in records))
        points = _points_of(records, self._wall_clock())
        newest_step = max((record.sequence_number for record in records), default=0)

        def note_step(connection: sa.Connection) -> None:
            found = run_store.require_run(connection, run)
            if found.finish_time_s is not None and newest_step:
                run_store.note_step(connection, str(run), newest_step)

        def write(connection: sa.Connection) -> int:
            note_step(connection)
            return metric_store.record(connection, str(run), run.project, points, self._limits)

        try:
            return await self._database.write(write)
        except ResourceExhaustedError:
            # A step was made, also where there is no room for what it measured.
            await self._database.write(note_step)
            raise

    def _take_points(self, project: str, number: int) -> None:
        wait_s = self._rate.take(project, number)
        if wait_s > 0:
            raise RateLimitedError(
                f"project {project} records more than {self._rate.per_s:g} points of metrics a "
                "second; record fewer metrics, or not at every step",
                retry_after_s=max(wait_s, 1.0),
                project=project,
            )

    async def query(self, run: RunName, wanted: CurveQuery) -> Curves:
        """Return curves of a run.

        Raises:
            RunNotFoundError: If there is no such run.
        """

        def read(connection: sa.Connection) -> Curves:
            run_store.require_run(connection, run)
            return metric_store.query(connection, str(run), wanted)

        return await self._database.read(read)

    async def list(
        self,
        run: RunName,
        names: frozenset[str],
        page: PageRequest,
        *,
        among: frozenset[str] = frozenset(),
    ) -> tuple[list[Metric], str]:
        """Return a page of metrics by run and name, and the token of the next.

        Args:
            run: Which run; `ALL_RUNS` as its id for all of the project.
            names: Which metrics; all if empty.
            page: Which part of the list.
            among: Leaves out other runs than these, unless it is empty.

        Raises:
            RunNotFoundError: If there is no such run.
            InvalidFieldError: If the page token is not one of this list.
        """
        is_one = run.run != ALL_RUNS
        list_name = f"{run}/metrics/{sorted(names)}/{sorted(among)}"
        key = decode_key_token(list_name, page.token)
        after = None if key is None else key.partition("\n")[::2]

        def read(connection: sa.Connection) -> list[Metric]:
            if is_one:
                run_store.require_run(connection, run)
            return metric_store.list_metrics(
                connection,
                project=run.project,
                run=str(run) if is_one else "",
                names=names,
                among=among,
                after=after,
                limit=page.size + 1,
            )

        found = await self._database.read(read)
        shown = found[: page.size]
        has_more = len(found) > page.size
        last = f"{shown[-1].run}\n{shown[-1].name}" if has_more else ""
        return shown, encode_key_token(list_name, last) if has_more else ""


def _points_of(records: Sequence[StepRecord], now_s: float) -> dict[str, Points]:
    """Return points by name."""
    rows: dict[str, list[tuple[int, float, float]]] = {}
    for record in records:
        time_s = now_s if record.time_s is None else record.time_s
        for name, value in record.metrics.items():
            rows.setdefault(name, []).append((record.step, value, time_s))
    return {
        name: blocks.latest_points(np.array(found, dtype=blocks.POINT))
        for name, found in rows.items()
    }
