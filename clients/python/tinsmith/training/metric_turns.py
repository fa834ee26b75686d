"""Finds the step where a metric of a run turned, from what is recorded.

Curves of long runs come in buckets of steps. A bucket that holds the turn is asked for again, more
finely, until it is a single step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import ConfigurationError, NotFoundError
from tinsmith.training.past_steps import MetricTurn
from tinsmith.types import MetricCurve


@dataclass(frozen=True, slots=True)
class Reading:
    """A part of a curve, and how many steps are in each of its buckets."""

    curve: MetricCurve
    width: int


Query = Callable[[int, int | None], Awaitable[Reading | None]]
"""Reads from one step to another, the last included; None if nothing is there.

It gives two buckets at least before it makes them wider, so that one bucket that is asked for again
comes in narrower ones.
"""


@dataclass(frozen=True, slots=True)
class Side:
    """The bad side of a threshold."""

    threshold: float
    is_above: bool

    def touched(self, curve: MetricCurve) -> NDArray[np.bool_]:
        """Return which buckets hold a value on the bad side [P]."""
        if self.is_above:
            return np.asarray(curve.maxima > self.threshold)
        return np.asarray(curve.minima < self.threshold)

    def spared(self, curve: MetricCurve) -> NDArray[np.bool_]:
        """Return which buckets hold a value on the good side [P]."""
        if self.is_above:
            return np.asarray(curve.minima <= self.threshold)
        return np.asarray(curve.maxima >= self.threshold)


async def find_first(query: Query, metric: str, side: Side) -> MetricTurn:
    """Return the first step at which a metric is on the bad side.

    Raises:
        NotFoundError: If it never is.
    """
    low: int = 0
    high: int | None = None
    while True:
        reading = await query(low, high)
        found = [] if reading is None else np.flatnonzero(side.touched(reading.curve)).tolist()
        if reading is None or not found:
            word = "above" if side.is_above else "below"
            raise NotFoundError(f"{metric} was never {word} {side.threshold:g}")
        low = int(reading.curve.steps[found[0]])
        if reading.width == 1:
            return await _turn(query, metric, side.threshold, reading.curve, found[0])
        high = low + reading.width - 1


async def find_crossing(query: Query, metric: str, good: int, bad: int) -> MetricTurn:
    """Return the first step from which on a metric was nearer to its value at `bad`, until there.

    Raises:
        ConfigurationError: If the two are not in order, or the metric is the same at both.
        NotFoundError: If it was not recorded at one of them.
    """
    if good >= bad:
        raise ConfigurationError(f"the good step has to be before the bad one, got {good}, {bad}")
    at_good, at_bad = [await _value_at(query, metric, step) for step in (good, bad)]
    if at_good == at_bad:
        raise ConfigurationError(f"{metric} is {at_good:g} at both steps; name two that differ")
    side = Side((at_good + at_bad) / 2, is_above=at_bad > at_good)
    low, high, width = good, bad, 0
    while width != 1:
        reading = await _read(query, metric, low, high)
        # The good step is in the range, so one bucket at least has a value on its side.
        last = int(np.flatnonzero(side.spared(reading.curve))[-1])
        low, high, width = _within(reading, last, low, high)
    low, high, width = low + 1, bad, 0
    while width != 1:
        reading = await _read(query, metric, low, high)
        low, high, width = _within(reading, 0, low, high)
    return await _turn(query, metric, side.threshold, reading.curve, 0)


def _within(reading: Reading, index: int, low: int, high: int) -> tuple[int, int, int]:
    """Return the steps of a bucket as far as they were asked for, and the width of buckets."""
    start = int(reading.curve.steps[index])
    return max(low, start), min(high, start + reading.width - 1), reading.width


async def _read(query: Query, metric: str, low: int, high: int) -> Reading:
    reading = await query(low, high)
    if reading is None:
        raise NotFoundError(f"{metric} is not recorded between steps {low} and {high}")
    return reading


async def _value_at(query: Query, metric: str, step: int) -> float:
    reading = await query(step, step)
    if reading is None or not np.isfinite(reading.curve.means[0]):
        raise NotFoundError(f"{metric} is not recorded at step {step}")
    return float(reading.curve.means[0])


async def _turn(
    query: Query, metric: str, threshold: float, curve: MetricCurve, index: int
) -> MetricTurn:
    step = int(curve.steps[index])
    before = await query(0, step - 1) if step else None
    while before is not None and before.width > 1:
        before = await query(int(before.curve.steps[-1]), step - 1)
    return MetricTurn(
        metric=metric,
        threshold=threshold,
        step=step,
        value=float(curve.means[index]),
        previous_step=None if before is None else int(before.curve.steps[-1]),
        previous_value=None if before is None else float(before.curve.means[-1]),
    )
