"""Where a metric turned, found in curves that come in buckets."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import ConfigurationError, NotFoundError
from tinsmith.training.metric_turns import Query, Reading, Side, find_crossing, find_first
from tinsmith.types import MetricCurve


def recorded(values: dict[int, float], *, max_points: int) -> Query:
    """Return what answers as the server does: buckets of a power of two, few enough."""

    async def query(low: int, high: int | None) -> Reading | None:
        steps = sorted(step for step in values if low <= step and (high is None or step <= high))
        if not steps:
            return None
        width = 1
        while steps[-1] // width - steps[0] // width + 1 > max_points:
            width *= 2
        buckets: dict[int, list[int]] = {}
        for step in steps:
            buckets.setdefault(step // width, []).append(step)
        lists = [np.array([values[step] for step in each]) for each in buckets.values()]
        curve = MetricCurve(
            name="loss",
            # The bucket itself begins at a multiple of its width.
            steps=np.array([index * width if width > 1 else index for index in buckets]),
            means=np.array([each.mean() for each in lists]),
            minima=np.array([each.min() for each in lists]),
            maxima=np.array([each.max() for each in lists]),
            times=np.zeros(len(lists)),
        )
        return Reading(curve, width)

    return query


_CURVES = st.dictionaries(
    st.integers(0, 200), st.floats(-10, 10, allow_nan=False), min_size=2, max_size=60
)


@given(_CURVES, st.floats(-10, 10, allow_nan=False), st.booleans(), st.integers(2, 8))
def test_the_first_step_beyond_a_threshold_is_found(
    values: dict[int, float], threshold: float, is_above: bool, max_points: int
) -> None:
    beyond = [
        step
        for step in sorted(values)
        if (values[step] > threshold if is_above else values[step] < threshold)
    ]
    query = recorded(values, max_points=max_points)
    search = find_first(query, "loss", Side(threshold, is_above))
    if not beyond:
        with pytest.raises(NotFoundError, match="was never"):
            asyncio.run(search)
        return
    turn = asyncio.run(search)
    before = [step for step in sorted(values) if step < beyond[0]]
    assert (turn.step, turn.value) == (beyond[0], values[beyond[0]])
    assert turn.previous_step == (before[-1] if before else None)
    assert turn.previous_value == (values[before[-1]] if before else None)


@given(_CURVES, st.integers(2, 8))
def test_between_a_good_and_a_bad_step_the_last_crossing_is_found(
    values: dict[int, float], max_points: int
) -> None:
    good, bad = min(values), max(values)
    search = find_crossing(recorded(values, max_points=max_points), "loss", good, bad)
    if values[good] == values[bad]:
        with pytest.raises(ConfigurationError, match="at both steps"):
            asyncio.run(search)
        return
    middle = (values[good] + values[bad]) / 2
    if not min(values[good], values[bad]) < middle < max(values[good], values[bad]):
        search.close()
        return  # Two neighbours: no number lies between them.
    turn = asyncio.run(search)
    is_bad = {
        step: value > middle if values[bad] > values[good] else value < middle
        for step, value in values.items()
    }
    last_good = max(step for step, turned in is_bad.items() if not turned)
    assert turn.step == min(step for step in values if step > last_good)
    assert turn.previous_step == last_good


def test_what_cannot_be_searched_is_said() -> None:
    query = recorded({0: 1.0, 5: 2.0}, max_points=10)
    with pytest.raises(ConfigurationError, match="before the bad one"):
        asyncio.run(find_crossing(query, "loss", 5, 0))
    with pytest.raises(NotFoundError, match="not recorded at step 3"):
        asyncio.run(find_crossing(query, "loss", 0, 3))
