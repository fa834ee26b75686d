"""Statements on the metrics of runs; each runs inside a transaction.

Each metric of a run is a row of `metric_series`. Its points are blobs by block, and each block has
a summary in a table of its own, which stays small. The revision of a run counts its recordings; a
block has that of its last change, so that a reader asks for what is newer than it has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa

from tinsmith_runtime.errors import ResourceExhaustedError
from tinsmith_runtime.sql import insert
from tinsmith_scheduler.run_metrics import blocks
from tinsmith_scheduler.run_metrics.blocks import BLOCK_STEPS, Curve, Points, Summaries
from tinsmith_scheduler.store.records import RunState
from tinsmith_scheduler.store.tables import (
    metric_blocks,
    metric_points,
    metric_series,
    metric_usage,
    runs,
)

_ROWS_AT_ONCE = 500
"""Databases limit the parameters of a statement."""

Row = sa.Row[Any]


@dataclass(frozen=True, slots=True)
class MetricLimits:
    """What a run and a project may keep."""

    max_names: int
    max_run_bytes: int
    max_project_bytes: int


@dataclass(frozen=True, slots=True)
class CurveQuery:
    """Which part of the curves of a run is asked for, and how fine.

    Attributes:
        names: The metrics; all if empty.
        min_step: First step.
        max_step: Last step; None for the last that was recorded.
        max_points: Limits the points of a curve.
        bucket_steps: Width of buckets, in the place of `max_points`; 0 if that decides.
        after_revision: Leaves out what has not changed since.
    """

    names: frozenset[str]
    min_step: int
    max_step: int | None
    max_points: int
    bucket_steps: int
    after_revision: int


@dataclass(frozen=True, slots=True)
class Curves:
    """The answer to a query."""

    curves: Sequence[Curve]
    bucket_steps: int
    revision: int


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of a run, as a list shows it."""

    run: str
    name: str
    num_points: int
    last_step: int
    last_value: float
    update_time_s: float


def record(
    connection: sa.Connection,
    run: str,
    project: str,
    points: Mapping[str, Points],
    limits: MetricLimits,
) -> int:
    """Record points of a run by name, and return the revision of its metrics.

    Raises:
        ResourceExhaustedError: If the run has too many metrics, or run or project too many bytes;
            nothing was recorded.
    """
    known = {row.name: row for row in _series_of(connection, run)}
    revision = max((row.revision for row in known.values()), default=0)
    num_names = len(known.keys() | points.keys())
    if num_names > limits.max_names:
        raise ResourceExhaustedError(
            f"run {run} would have {num_names} metrics, of {limits.max_names} that it may have",
            run=run,
            limit=limits.max_names,
        )
    changed: dict[str, dict[int, Points]] = {}
    size_bytes = 0
    for name, added in points.items():
        serial = known[name].serial if name in known else None
        changed[name], grown_bytes = _merge(connection, serial, added)
        size_bytes += grown_bytes
    changed = {name: parts for name, parts in changed.items() if parts}
    if not changed:
        return revision
    _take_bytes(connection, run, project, known.values(), size_bytes, limits)
    for name, parts in changed.items():
        row = known.get(name)
        serial = row.serial if row is not None else _add_series(connection, run, project, name)
        _write_blocks(connection, serial, parts, revision + 1)
        _note_series(connection, serial, revision + 1)
    return revision + 1


def _series_of(connection: sa.Connection, run: str) -> Sequence[Row]:
    return connection.execute(sa.select(metric_series).where(metric_series.c.run == run)).all()


def _merge(
    connection: sa.Connection, serial: int | None, added: Points
) -> tuple[dict[int, Points], int]:
    """Return the blocks that change, whole, and the bytes by which they grow."""
    parts = blocks.split_blocks(added)
    stored: dict[int, Points] = {}
    if serial is not None:
        for numbers in _in_parts(sorted(parts)):
            query = sa.select(metric_points.c.block, metric_points.c.points).where(
                metric_points.c.series == serial, metric_points.c.block.in_(numbers)
            )
            for row in connection.execute(query):
                stored[row.block] = blocks.decode_block(row.block, row.points)
    changed, grown_bytes = {}, 0
    for block, part in parts.items():
        before = stored.get(block)
        after = part if before is None else blocks.merge(before, part)
        if after is None:
            continue
        changed[block] = after
        grown_bytes += blocks.block_bytes(len(after))
        grown_bytes -= 0 if before is None else blocks.block_bytes(len(before))
    return changed, grown_bytes


def _take_bytes(
    connection: sa.Connection,
    run: str,
    project: str,
    series: Collection[Row],
    size_bytes: int,
    limits: MetricLimits,
) -> None:
    run_bytes = sum(row.size_bytes for row in series) + size_bytes
    if run_bytes > limits.max_run_bytes:
        raise ResourceExhaustedError(
            f"the metrics of run {run} would take {run_bytes} bytes, of {limits.max_run_bytes} "
            "that they may; record fewer, or not at every step",
            run=run,
            limit=limits.max_run_bytes,
        )
    usage = insert(connection, metric_usage).values(project=project, size_bytes=size_bytes)
    total = connection.execute(
        usage.on_conflict_do_update(
            index_elements=["project"],
            set_={"size_bytes": metric_usage.c.size_bytes + size_bytes},
        ).returning(metric_usage.c.size_bytes)
    ).scalar_one()
    if total > limits.max_project_bytes:
        raise ResourceExhaustedError(
            f"the metrics of project {project} take all of {limits.max_project_bytes} bytes; "
            "delete runs that are not needed",
            project=project,
            limit=limits.max_project_bytes,
        )


def _add_series(connection: sa.Connection, run: str, project: str, name: str) -> int:
    statement = (
        sa.insert(metric_series)
        .values(
            run=run,
            project=project,
            name=name,
            num_points=0,
            size_bytes=0,
            last_step=0,
            last_value=None,
            update_time_s=0.0,
            revision=0,
        )
        .returning(metric_series.c.serial)
    )
    serial: int = connection.execute(statement).scalar_one()
    return serial


def _write_blocks(
    connection: sa.Connection, serial: int, parts: Mapping[int, Points], revision: int
) -> None:
    summaries, contents = [], []
    for block, points in parts.items():
        whole = blocks.group(blocks.summarize_points(points), BLOCK_STEPS)
        has_values = bool(whole.num_finite[0])
        summaries.append(
            {
                "series": serial,
                "block": block,
                "revision": revision,
                "num_points": len(points),
                "num_finite": int(whole.num_finite[0]),
                "total": float(whole.totals[0]),
                "minimum": float(whole.minima[0]) if has_values else None,
                "maximum": float(whole.maxima[0]) if has_values else None,
                "time_s": float(whole.times_s[0]),
            }
        )
        contents.append({"series": serial, "block": block, "points": blocks.encode_block(points)})
    for table, values in ((metric_blocks, summaries), (metric_points, contents)):
        statement = insert(connection, table)
        columns = [column.name for column in table.c if not column.primary_key]
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["series", "block"],
                set_={name: statement.excluded[name] for name in columns},
            ),
            values,
        )


def _note_series(connection: sa.Connection, serial: int, revision: int) -> None:
    """Bring the row of a metric up to date with its blocks."""
    of_series = metric_blocks.c.series == serial
    sums = connection.execute(
        sa.select(
            sa.func.sum(metric_blocks.c.num_points).label("num_points"),
            sa.func.count().label("num_blocks"),
            sa.func.max(metric_blocks.c.block).label("last_block"),
            sa.func.max(metric_blocks.c.time_s).label("time_s"),
        ).where(of_series)
    ).one()
    last = connection.execute(
        sa.select(metric_points.c.points).where(
            metric_points.c.series == serial, metric_points.c.block == sums.last_block
        )
    ).scalar_one()
    points = blocks.decode_block(sums.last_block, last)
    value = float(points["value"][-1])
    num_points = int(sums.num_points)
    connection.execute(
        sa.update(metric_series)
        .where(metric_series.c.serial == serial)
        .values(
            num_points=num_points,
            size_bytes=blocks.block_bytes(0) * sums.num_blocks
            + blocks.block_bytes(num_points)
            - blocks.block_bytes(0),
            last_step=int(points["step"][-1]),
            # SQLite has no number for what is none.
            last_value=None if value != value else value,
            update_time_s=float(sums.time_s),
            revision=revision,
        )
    )


def query(connection: sa.Connection, run: str, wanted: CurveQuery) -> Curves:
    """Return curves of a run."""
    rows = _series_of(connection, run)
    revision = max((row.revision for row in rows), default=0)
    series = {
        row.serial: row
        for row in rows
        if (not wanted.names or row.name in wanted.names) and row.revision > wanted.after_revision
    }
    shown = [row for row in rows if not wanted.names or row.name in wanted.names]
    last_step = max((row.last_step for row in shown), default=0)
    max_step = last_step if wanted.max_step is None else min(wanted.max_step, last_step)
    width = wanted.bucket_steps or blocks.bucket_width(
        min(wanted.min_step, max_step), max_step, wanted.max_points
    )
    begins = _first_steps(connection, series, wanted, width)
    spans = _read_spans(connection, begins, max_step, width)
    curves = [
        blocks.draw(series[serial].name, found, width)
        for serial, found in spans.items()
        if len(found.steps)
    ]
    return Curves(sorted(curves, key=lambda curve: curve.name), width, revision)


def _first_steps(
    connection: sa.Connection, series: Mapping[int, Row], wanted: CurveQuery, width: int
) -> dict[int, int]:
    """Return the first step that is to be read of each metric: that of the first changed bucket."""
    min_step = wanted.min_step // width * width
    if not wanted.after_revision:
        return dict.fromkeys(series, min_step)
    first = (
        sa.select(metric_blocks.c.series, sa.func.min(metric_blocks.c.block).label("block"))
        .where(
            metric_blocks.c.series.in_(list(series)),
            metric_blocks.c.revision > wanted.after_revision,
        )
        .group_by(metric_blocks.c.series)
    )
    return {
        row.series: max(min_step, row.block * BLOCK_STEPS // width * width)
        for row in connection.execute(first)
    }


def _read_spans(
    connection: sa.Connection, begins: Mapping[int, int], max_step: int, width: int
) -> dict[int, Summaries]:
    if not begins:
        return {}
    table = metric_points if width < BLOCK_STEPS else metric_blocks
    rows = connection.execute(
        sa.select(table)
        .where(
            table.c.series.in_(list(begins)),
            table.c.block >= min(begins.values()) // BLOCK_STEPS,
            table.c.block <= max_step // BLOCK_STEPS,
        )
        .order_by(table.c.series, table.c.block)
    ).all()
    by_series: dict[int, list[Row]] = {}
    for row in rows:
        if row.block >= begins[row.series] // BLOCK_STEPS:
            by_series.setdefault(row.series, []).append(row)
    if table is metric_blocks:
        return {serial: _summaries(found) for serial, found in by_series.items()}
    return {serial: _spans(found, begins[serial], max_step) for serial, found in by_series.items()}


def _spans(rows: Sequence[Row], min_step: int, max_step: int) -> Summaries:
    points = np.concatenate([blocks.decode_block(row.block, row.points) for row in rows])
    steps = points["step"]
    return blocks.summarize_points(points[(steps >= min_step) & (steps <= max_step)])


def _summaries(rows: Sequence[Row]) -> Summaries:
    return Summaries(
        steps=np.array([row.block for row in rows], dtype=np.int64) * BLOCK_STEPS,
        totals=np.array([row.total for row in rows], dtype=np.float64),
        num_finite=np.array([row.num_finite for row in rows], dtype=np.int64),
        minima=np.array([np.inf if row.minimum is None else row.minimum for row in rows]),
        maxima=np.array([-np.inf if row.maximum is None else row.maximum for row in rows]),
        times_s=np.array([row.time_s for row in rows], dtype=np.float64),
    )


def list_metrics(
    connection: sa.Connection,
    *,
    project: str,
    run: str,
    names: frozenset[str],
    among: frozenset[str],
    after: tuple[str, str] | None,
    limit: int,
) -> list[Metric]:
    """Return metrics by run and name, of one run or, without one, of the project's.

    Args:
        connection: Of the transaction.
        project: Which project.
        run: Which run; empty for those of the project.
        names: Which metrics; all if empty.
        among: Leaves out other runs than these, unless it is empty.
        after: Run and name of the last metric before.
        limit: How many at most.
    """
    table = metric_series
    statement = (
        sa.select(table)
        .join(runs, runs.c.name == table.c.run)
        .where(runs.c.state != RunState.DELETED.value)
        .order_by(table.c.run, table.c.name)
        .limit(limit)
    )
    statement = statement.where(table.c.run == run if run else table.c.project == project)
    if names:
        statement = statement.where(table.c.name.in_(sorted(names)))
    if among:
        statement = statement.where(table.c.run.in_(sorted(among)))
    if after is not None:
        statement = statement.where(sa.tuple_(table.c.run, table.c.name) > sa.tuple_(*after))
    return [
        Metric(
            run=row.run,
            name=row.name,
            num_points=row.num_points,
            last_step=row.last_step,
            last_value=float("nan") if row.last_value is None else row.last_value,
            update_time_s=row.update_time_s,
        )
        for row in connection.execute(statement)
    ]


def _in_parts(numbers: Sequence[int]) -> list[Sequence[int]]:
    return [
        numbers[first : first + _ROWS_AT_ONCE] for first in range(0, len(numbers), _ROWS_AT_ONCE)
    ]
