"""Points of metrics in blocks and buckets, and what a run and a project may keep of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import sqlalchemy as sa

from tinsmith_runtime.errors import ResourceExhaustedError
from tinsmith_scheduler.run_metrics import blocks, metric_store
from tinsmith_scheduler.run_metrics.blocks import BLOCK_STEPS, Points
from tinsmith_scheduler.run_metrics.metric_store import CurveQuery, Curves, MetricLimits
from tinsmith_scheduler.store.tables import metadata, metric_series

PLENTY = MetricLimits(max_names=9, max_run_bytes=10**9, max_project_bytes=10**9)
POINT_BYTES = 17


def points(*rows: tuple[int, float], time_s: float = 5.0) -> Points:
    found: Points = np.array([(step, value, time_s) for step, value in rows], dtype=blocks.POINT)
    return found


def pairs(found: Points) -> list[tuple[int, float]]:
    return list(zip(found["step"].tolist(), found["value"].tolist(), strict=True))


def test_points_come_back_from_their_blocks() -> None:
    whole = points((0, 1.0), (127, 2.0), (128, 3.0), (500, math.inf))
    parts = blocks.split_blocks(whole)
    assert {block: len(part) for block, part in parts.items()} == {0: 2, 1: 1, 3: 1}
    for block, part in parts.items():
        back = blocks.decode_block(block, blocks.encode_block(part))
        np.testing.assert_array_equal(back, part)
        assert blocks.block_bytes(len(part)) == 160 + len(blocks.encode_block(part))


def test_of_several_points_at_a_step_the_last_counts() -> None:
    found = blocks.latest_points(points((3, 1.0), (1, 2.0), (3, 4.0)))
    assert pairs(found) == [(1, 2.0), (3, 4.0)]


def test_what_is_recorded_again_keeps_its_time() -> None:
    known = points((1, 2.0), (2, math.nan))
    assert blocks.merge(known, points((1, 2.0), (2, math.nan), time_s=9.0)) is None
    merged = blocks.merge(known, points((1, 2.0), (2, 4.0), (3, 5.0), time_s=9.0))
    assert merged is not None
    assert pairs(merged) == [(1, 2.0), (2, 4.0), (3, 5.0)]
    assert merged["time_s"].tolist() == [5.0, 9.0, 9.0]


@pytest.mark.parametrize(
    ("first", "last", "max_points", "width"),
    [(0, 9, 10, 1), (0, 10, 10, 2), (7, 16, 10, 1), (0, 999, 1, 1024), (1023, 1024, 1, 2048)],
)
def test_buckets_are_as_narrow_as_their_number_allows(
    first: int, last: int, max_points: int, width: int
) -> None:
    assert blocks.bucket_width(first, last, max_points) == width


def test_a_bucket_tells_of_its_finite_values_alone() -> None:
    spans = blocks.summarize_points(points((0, 1.0), (1, 3.0), (2, math.nan), (5, math.inf)))
    curve = blocks.draw("loss", spans, 4)
    assert (curve.name, curve.steps.tolist()) == ("loss", [0, 4])
    assert (curve.means[0], curve.minima[0], curve.maxima[0]) == (2.0, 1.0, 3.0)
    assert all(math.isnan(each[1]) for each in (curve.means, curve.minima, curve.maxima))
    fine = blocks.draw("loss", spans, 1)
    assert fine.steps.tolist() == [0, 1, 2, 5]


@pytest.fixture
def connection() -> sa.Connection:
    """A connection to an empty database."""
    found = sa.create_engine("sqlite://").connect()
    metadata.create_all(found)
    return found


def record(
    connection: sa.Connection,
    given: Mapping[str, Points],
    limits: MetricLimits = PLENTY,
    run: str = "r",
) -> int:
    return metric_store.record(connection, run, "p", given, limits)


def query(
    connection: sa.Connection, names: Sequence[str] = (), run: str = "r", **fields: int
) -> Curves:
    values = {"min_step": 0, "max_points": 100, "bucket_steps": 0, "after_revision": 0, **fields}
    wanted = CurveQuery(names=frozenset(names), max_step=values.pop("max_step", None), **values)
    return metric_store.query(connection, run, wanted)


def test_a_metric_has_the_figures_of_all_its_points(connection: sa.Connection) -> None:
    assert record(connection, {"loss": points((0, 3.0), (1, 2.0))}) == 1
    assert record(connection, {"loss": points((BLOCK_STEPS, 1.0), time_s=9.0)}) == 2
    assert record(connection, {"loss": points((0, 3.0))}) == 2
    # An older step that comes late is not the last one.
    assert record(connection, {"loss": points((2, math.nan), time_s=7.0)}) == 3
    row = connection.execute(sa.select(metric_series)).one()
    assert (row.num_points, row.last_step, row.last_value) == (4, BLOCK_STEPS, 1.0)
    assert (row.update_time_s, row.revision) == (9.0, 3)
    assert row.size_bytes == 2 * blocks.block_bytes(0) + 4 * POINT_BYTES
    record(connection, {"loss": points((BLOCK_STEPS, math.nan))})
    assert connection.execute(sa.select(metric_series)).one().last_value is None


def test_limits_are_reached_and_not_passed(connection: sa.Connection) -> None:
    one = blocks.block_bytes(1)
    both = {"a": points((0, 1.0)), "b": points((0, 1.0))}
    exact = MetricLimits(max_names=2, max_run_bytes=2 * one, max_project_bytes=3 * one)
    assert record(connection, both, exact) == 1
    for given, words in (
        ({"c": points((0, 1.0))}, "would have 3 metrics, of 2"),
        ({"a": points((1, 1.0))}, f"would take {2 * one + POINT_BYTES} bytes, of {2 * one}"),
    ):
        with pytest.raises(ResourceExhaustedError, match=words):
            record(connection, given, exact)
    # Another value takes no more room.
    assert record(connection, {"a": points((0, 2.0))}, exact) == 2
    assert record(connection, {"a": points((0, 1.0))}, exact, run="other") == 1
    with pytest.raises(ResourceExhaustedError, match=f"project p take all of {3 * one}"):
        record(connection, {"a": points((1, 1.0))}, exact, run="other")


@pytest.mark.parametrize("width", [1, 2 * BLOCK_STEPS])
def test_curves_are_of_the_run_the_names_and_the_steps_that_are_asked_for(
    connection: sa.Connection, width: int
) -> None:
    whole = points(*((step, float(step)) for step in range(600)))
    record(connection, {"b": whole, "a": points((0, 1.0)), "c": points((0, math.nan))})
    record(connection, {"a": points((0, 9.0))}, run="other")
    every = query(connection, bucket_steps=width)
    assert [curve.name for curve in every.curves] == ["a", "b", "c"]
    assert (every.bucket_steps, every.revision) == (width, 1)
    assert every.curves[0].means.tolist() == [1.0]
    part = query(connection, ["b", "none"], bucket_steps=width, min_step=256, max_step=511)
    (curve,) = part.curves
    assert curve.steps.tolist() == list(range(256, 512, width))
    assert curve.maxima[-1] == 511
    assert math.isnan(every.curves[2].minima[0])
    assert not query(connection, run="none").curves
    assert not query(connection, after_revision=1).curves
