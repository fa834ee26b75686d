"""Metrics of runs: recorded once, read as curves of few points, listed, limited, forgotten."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.scheduler_fake_trainer import Metadata, Rig, running_rig
from tests.fakes.trainer_harness import refusal
from tests.support.pod_keys import pod
from tests.support.wait import eventually

from tinsmith.v1 import run_metrics_pb2 as m

_SWEEP_S = 601.0
_LIMITS = {
    "max_metrics_per_run": 4,
    "max_metric_bytes_per_run": 40_000,
    "max_metric_bytes_per_project": 60_000,
    "session_timeout_s": 1e9,
    "worker_timeout_s": 1e9,
}


class Recorder:
    """A user with a run."""

    def __init__(self, rig: Rig, who: Metadata, run: str) -> None:
        self.rig, self.who, self.run = rig, who, run

    async def record(
        self, *steps: tuple[int, Mapping[str, float]], who: Metadata | None = None, run: str = ""
    ) -> int:
        request = m.RecordRunMetricsRequest(run=run or self.run)
        for step, metrics in steps:
            request.records.add(step=step, metrics=metrics)
        answer = await self.rig.run_metrics.RecordRunMetrics(
            request, metadata=who or self.who, timeout=5
        )
        return int(answer.revision)

    async def query(self, **fields: Any) -> m.QueryRunMetricsResponse:
        request = m.QueryRunMetricsRequest(**{"run": self.run, **fields})
        answer: m.QueryRunMetricsResponse = await self.rig.run_metrics.QueryRunMetrics(
            request, metadata=self.who, timeout=5
        )
        return answer

    async def list(self, parent: str = "", **fields: Any) -> m.ListRunMetricsResponse:
        request = m.ListRunMetricsRequest(parent=parent or self.run, **fields)
        answer: m.ListRunMetricsResponse = await self.rig.run_metrics.ListRunMetrics(
            request, metadata=self.who, timeout=5
        )
        return answer


@pytest.fixture
async def mine(tmp_path: Path, database_url: str) -> AsyncIterator[Recorder]:
    async with running_rig(tmp_path, database_url=database_url, **_LIMITS) as rig:
        await rig.register()
        who = await rig.user()
        run = await rig.create_run(who, await rig.session(who))
        yield Recorder(rig, who, run.name)


def only(answer: m.QueryRunMetricsResponse) -> m.MetricCurve:
    (curve,) = answer.curves
    return curve


def line(values: Sequence[float]) -> list[tuple[int, Mapping[str, float]]]:
    return [(step, {"loss": value}) for step, value in enumerate(values)]


async def test_what_was_recorded_is_read_back_by_name_and_step(mine: Recorder) -> None:
    await mine.record((0, {"loss": 2.0, "env/reward": 0.5}), (1, {"loss": 1.0}))
    answer = await mine.query()
    curves = {curve.name: (list(curve.steps), list(curve.means)) for curve in answer.curves}
    assert curves == {"loss": ([0, 1], [2.0, 1.0]), "env/reward": ([0], [0.5])}
    assert answer.bucket_steps == 1
    assert [c.name for c in (await mine.query(names=["loss", "none"])).curves] == ["loss"]


async def test_a_repeat_changes_nothing_and_another_value_replaces(mine: Recorder) -> None:
    first = await mine.record(*line([2.0, 1.0]))
    before = await mine.query()
    assert await mine.record(*line([2.0, 1.0])) == first
    assert await mine.query() == before
    assert await mine.record((1, {"loss": 7.0}), (1, {"loss": 8.0})) == first + 1
    assert list(only(await mine.query()).means) == [2.0, 8.0]


async def test_what_is_no_number_is_kept_apart_from_means(mine: Recorder) -> None:
    await mine.record(*line([math.nan, 1.0, math.inf, 3.0]))
    assert await mine.record((0, {"loss": math.nan})) == 1
    fine = only(await mine.query())
    assert math.isnan(fine.means[0])
    assert math.isnan(fine.minima[2])
    coarse = only(await mine.query(max_points=1))
    assert (coarse.means[0], coarse.minima[0], coarse.maxima[0]) == (2.0, 1.0, 3.0)


@pytest.mark.parametrize("max_points", [500, 100, 10, 3, 1])
async def test_a_long_curve_is_read_in_few_buckets(mine: Recorder, max_points: int) -> None:
    values = [float((step * 7919) % 1000) for step in range(1000)]
    await mine.record(*line(values))
    answer = await mine.query(max_points=max_points)
    curve, width = only(answer), answer.bucket_steps
    assert len(curve.steps) <= max_points < 2 * max(len(curve.steps), 1) + 1
    parts = [values[first : first + width] for first in range(0, len(values), width)]
    assert list(curve.steps) == list(range(0, len(values), width))
    assert list(curve.means) == pytest.approx([sum(part) / len(part) for part in parts])
    assert list(curve.minima) == [min(part) for part in parts]
    assert list(curve.maxima) == [max(part) for part in parts]


async def test_a_range_of_steps_is_read_alone(mine: Recorder) -> None:
    await mine.record(*line([float(step) for step in range(400)]))
    curve = only(await mine.query(min_step=200, max_step=209))
    assert list(curve.means) == [float(step) for step in range(200, 210)]


@pytest.mark.parametrize("width", [1, 4, 256])
async def test_a_reader_gets_what_changed_since_and_no_more(mine: Recorder, width: int) -> None:
    await mine.record(*line([1.0] * 600), (0, {"rate": 1.0}))
    before = await mine.query(bucket_steps=width)
    assert not (await mine.query(bucket_steps=width, after_revision=before.revision)).curves
    await mine.record((600, {"loss": 5.0}))
    after = await mine.query(bucket_steps=width, after_revision=before.revision)
    curve = only(after)
    assert curve.name == "loss"
    assert curve.steps[-1] == 600 // width * width
    assert len(curve.steps) <= 128 // width + 1
    # Put over what was read before, it is what a new reader gets.
    known = dict(zip(before.curves[0].steps, before.curves[0].means, strict=True))
    known |= dict(zip(curve.steps, curve.means, strict=True))
    whole = next(c for c in (await mine.query(bucket_steps=width)).curves if c.name == "loss")
    assert known == dict(zip(whole.steps, whole.means, strict=True))


async def test_metrics_are_listed_by_run_in_pages(mine: Recorder) -> None:
    other = await mine.rig.create_run(mine.who, await mine.rig.session(mine.who))
    await mine.record(*line([3.0, 2.0]), (0, {"reward": 1.0}))
    await mine.record((5, {"loss": 9.0}), run=other.name)
    every = mine.run.rpartition("/")[0] + "/-"
    found: list[m.RunMetric] = []
    token = ""
    while True:
        page = await mine.list(every, page_size=1, page_token=token)
        found += page.metrics
        token = page.next_page_token
        if not token:
            break
    expected = [(mine.run, "loss", 2, 1, 2.0), (mine.run, "reward", 1, 0, 1.0)]
    expected += [(other.name, "loss", 1, 5, 9.0)]
    shown = [(e.run, e.name, e.num_points, e.last_step, e.last_value) for e in found]
    assert sorted(shown) == sorted(expected)
    named = await mine.list(every, names=["reward"])
    assert [(e.run, e.name) for e in named.metrics] == [(mine.run, "reward")]
    chosen = await mine.list(every, run_ids=[other.name.rpartition("/")[2]])
    assert [(e.run, e.name) for e in chosen.metrics] == [(other.name, "loss")]
    assert (await refusal(mine.list(every, run_ids=["-"]))).reason == "INVALID_FIELD"
    assert [e.name for e in (await mine.list()).metrics] == ["loss", "reward"]
    refused = await refusal(mine.list(page_token=token or "x"))
    assert refused.reason == "INVALID_FIELD"


async def test_limits_refuse_a_request_as_a_whole(mine: Recorder) -> None:
    await mine.record((0, {"a": 1.0, "b": 1.0}))
    refused = await refusal(mine.record((1, {"a": 2.0, "c": 1.0, "d": 1.0, "e": 1.0})))
    assert refused.reason == "LIMIT_EXCEEDED"
    assert "5 metrics" in refused.message
    # A block for each point.
    sparse = [(step * 128, {"a": 1.0}) for step in range(1, 300)]
    refused = await refusal(mine.record(*sparse))
    assert refused.reason == "LIMIT_EXCEEDED"
    assert "fewer" in refused.message
    curves = {c.name: list(c.steps) for c in (await mine.query()).curves}
    assert curves == {"a": [0], "b": [0]}
    await mine.record(*sparse[:200])
    other = await mine.rig.create_run(mine.who, await mine.rig.session(mine.who))
    refused = await refusal(mine.record(*sparse[:200], run=other.name))
    assert refused.reason == "LIMIT_EXCEEDED"
    assert "project default" in refused.message


async def test_a_project_that_records_too_fast_is_told_to_wait(mine: Recorder) -> None:
    mine.rig.settings["max_metric_points_per_s"] = 10.0
    await mine.rig.restart()
    for _ in range(4):
        await mine.record(*line([1.0] * 150))
    refused = await refusal(mine.record(*line([2.0] * 150)))
    assert refused.reason == "RATE_LIMITED"
    assert refused.retry_after_s
    mine.rig.clock.now_s += refused.retry_after_s
    await mine.record(*line([2.0] * 150))


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"step": -1, "metrics": {"a": 1.0}}, "records[0].step"),
        ({"step": 2**48 + 1, "metrics": {"a": 1.0}}, "records[0].step"),
        ({"step": 1, "metrics": {"": 1.0}}, "records[0].metrics"),
        ({"step": 1, "metrics": {"a" * 129: 1.0}}, "records[0].metrics"),
        ({"step": 1, "metrics": {"ä": 1.0}}, "records[0].metrics"),
        ({"step": 1, "metrics": {"trainer/loss": 1.0}}, "records[0].metrics"),
        ({"step": 1, "metrics": {}}, "records"),
        ({"step": 1, "metrics": {str(i): 1.0 for i in range(10_001)}}, "records"),
    ],
    ids=["negative", "far", "empty-name", "long", "no-ascii", "of-trainer", "none", "many"],
)
async def test_bad_records_are_refused(
    mine: Recorder, record: Mapping[str, Any], field: str
) -> None:
    request = m.RecordRunMetricsRequest(run=mine.run, records=[m.MetricRecord(**record)])
    refused = await refusal(
        mine.rig.run_metrics.RecordRunMetrics(request, metadata=mine.who, timeout=60)
    )
    assert refused.reason == "INVALID_FIELD"
    assert field in refused.message


@pytest.mark.parametrize(
    "fields",
    [
        {"min_step": -1},
        {"max_step": -1},
        {"max_points": 10_001},
        {"bucket_steps": 3},
        {"bucket_steps": -2},
        {"after_revision": -1},
        {"names": ["a"] * 64 + [str(i) for i in range(64)]},
        {"run": "nonsense"},
    ],
    ids=str,
)
async def test_bad_queries_are_refused(mine: Recorder, fields: Mapping[str, Any]) -> None:
    assert (await refusal(mine.query(**fields))).reason == "INVALID_FIELD"


async def test_runs_of_others_are_not_found_and_trainers_record_for_all(mine: Recorder) -> None:
    stranger = await mine.rig.user("other")
    theirs = Recorder(mine.rig, stranger, mine.run)
    for call in (theirs.record((0, {"a": 1.0})), theirs.query(), theirs.list()):
        assert (await refusal(call)).reason == "RUN_NOT_FOUND"
    await mine.record((0, {"trainer/loss": 1.0}), who=pod("trainer"))
    assert only(await mine.query()).name == "trainer/loss"
    refused = await refusal(mine.record((0, {"a": 1.0}), who=pod("sampler")))
    assert refused.reason == "ROLE_MISSING"


async def test_metrics_go_with_their_run(mine: Recorder) -> None:
    sparse = [(step * 128, {"a": 1.0}) for step in range(200)]
    await mine.record(*sparse)
    await mine.rig.delete_run(mine.who, mine.run)
    for call in (mine.record((0, {"a": 1.0})), mine.query(), mine.list()):
        assert (await refusal(call)).reason == "RUN_NOT_FOUND"
    other = await mine.rig.create_run(mine.who, await mine.rig.session(mine.who))

    async def has_room() -> bool:
        mine.rig.clock.now_s += _SWEEP_S
        try:
            await mine.record(*sparse, run=other.name)
        except Exception:
            return False
        return True

    await eventually(has_room)


async def test_metrics_outlive_a_restart(mine: Recorder) -> None:
    await mine.record(*line([2.0, 1.0]))
    await mine.rig.restart()
    assert list(only(await mine.query()).means) == [2.0, 1.0]
