"""Points in blocks, blocks in buckets: how a long curve is kept small and read fast. Pure numpy.

A block holds the points of one metric in 128 steps, as one value in the database, and beside it a
summary. A curve is read in buckets whose width is a power of two. Buckets of a block or more are
made of summaries alone, so the cost of reading hardly grows with the length of a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_STEPS = 128
"""A power of two, so that buckets hold whole blocks or lie within one."""

POINT = np.dtype([("step", "<i8"), ("value", "<f8"), ("time_s", "<f8")])
_STORED = np.dtype([("offset", "u1"), ("value", "<f8"), ("time_s", "<f8")])

BLOCK_OVERHEAD_BYTES = 160
"""About what the rows of a block take beside its points."""

Points = NDArray[np.void]
"""Points by ascending step, of dtype `POINT` [N]."""


@dataclass(frozen=True, slots=True)
class Summaries:
    """What is known of N spans of steps, ascending; a span may be one point.

    Attributes:
        steps: First step of each, int64 [N].
        totals: Sum of its finite values [N].
        num_finite: How many these are [N].
        minima: The least of them [N]; infinity without any.
        maxima: The greatest of them [N]; minus infinity without any.
        times_s: Time of the newest point [N].
    """

    steps: NDArray[np.int64]
    totals: NDArray[np.float64]
    num_finite: NDArray[np.int64]
    minima: NDArray[np.float64]
    maxima: NDArray[np.float64]
    times_s: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric in P buckets; see `MetricCurve` of the contract."""

    name: str
    steps: NDArray[np.int64]
    means: NDArray[np.float64]
    minima: NDArray[np.float64]
    maxima: NDArray[np.float64]
    times_s: NDArray[np.float64]


def encode_block(points: Points) -> bytes:
    """Return the stored form of the points of one block."""
    stored = np.empty(len(points), dtype=_STORED)
    stored["offset"] = points["step"] % BLOCK_STEPS
    stored["value"] = points["value"]
    stored["time_s"] = points["time_s"]
    return stored.tobytes()


def decode_block(block: int, content: bytes) -> Points:
    """Return the points of a block."""
    stored = np.frombuffer(content, dtype=_STORED)
    points = np.empty(len(stored), dtype=POINT)
    points["step"] = stored["offset"].astype(np.int64) + block * BLOCK_STEPS
    points["value"] = stored["value"]
    points["time_s"] = stored["time_s"]
    return points


def block_bytes(num_points: int) -> int:
    """Return about what a block takes in the database."""
    return BLOCK_OVERHEAD_BYTES + num_points * _STORED.itemsize


def split_blocks(points: Points) -> dict[int, Points]:
    """Return points by block."""
    blocks = points["step"] // BLOCK_STEPS
    found, begins = np.unique(blocks, return_index=True)
    parts = np.split(points, begins[1:])
    return dict(zip(found.tolist(), parts, strict=True))


def latest_points(points: Points) -> Points:
    """Return points by ascending step; of several at one step, the last."""
    _, index = np.unique(points["step"][::-1], return_index=True)
    chosen: Points = points[::-1][index]
    return chosen


def merge(known: Points, new: Points) -> Points | None:
    """Return the points of a block with newer ones in it; None if nothing changes.

    A point that is recorded again with its value keeps its time, so that repeats change nothing.
    """
    values = dict(zip(known["step"].tolist(), known["value"].tolist(), strict=True))
    is_new = [
        step not in values or not _is_same(values[step], value)
        for step, value in zip(new["step"].tolist(), new["value"].tolist(), strict=True)
    ]
    if not any(is_new):
        return None
    return latest_points(np.concatenate([known, new[np.array(is_new)]]))


def _is_same(one: float, other: float) -> bool:
    return one == other or (one != one and other != other)


def summarize_points(points: Points) -> Summaries:
    """Return each point as a span of its own."""
    values = points["value"]
    is_finite = np.isfinite(values)
    return Summaries(
        steps=points["step"],
        totals=np.where(is_finite, values, 0.0),
        num_finite=is_finite.astype(np.int64),
        minima=np.where(is_finite, values, np.inf),
        maxima=np.where(is_finite, values, -np.inf),
        times_s=points["time_s"],
    )


def group(spans: Summaries, width: int) -> Summaries:
    """Return spans put together in buckets of a width."""
    buckets = spans.steps // width
    found, begins = np.unique(buckets, return_index=True)
    if not len(found):
        return spans
    return Summaries(
        steps=spans.steps[begins] if width == 1 else found * width,
        totals=np.add.reduceat(spans.totals, begins),
        num_finite=np.add.reduceat(spans.num_finite, begins),
        minima=np.minimum.reduceat(spans.minima, begins),
        maxima=np.maximum.reduceat(spans.maxima, begins),
        times_s=np.maximum.reduceat(spans.times_s, begins),
    )


def draw(name: str, spans: Summaries, width: int) -> Curve:
    """Return the curve of a metric in buckets of a width."""
    grouped = group(spans, width)
    is_empty = grouped.num_finite == 0
    with np.errstate(invalid="ignore", over="ignore"):
        means = grouped.totals / np.where(is_empty, 1, grouped.num_finite)
    return Curve(
        name=name,
        steps=grouped.steps,
        means=np.where(is_empty, np.nan, means),
        minima=np.where(is_empty, np.nan, grouped.minima),
        maxima=np.where(is_empty, np.nan, grouped.maxima),
        times_s=grouped.times_s,
    )


def bucket_width(first_step: int, last_step: int, max_points: int) -> int:
    """Return the least power of two whose buckets of a range of steps are at most so many."""
    width = 1
    while last_step // width - first_step // width + 1 > max_points:
        width *= 2
    return width
