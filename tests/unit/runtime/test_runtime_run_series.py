"""Metrics by run are bounded: the runs that were active last have series, and no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge

from tinsmith_runtime.observability.run_series import RUN_LABELS, RunSeries


def _run(number: int) -> str:
    return f"projects/p/trainingRuns/r{number}"


def _runs_of(registry: CollectorRegistry) -> set[str]:
    return {sample.labels["run"] for metric in registry.collect() for sample in metric.samples}


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60))
def test_the_runs_that_were_active_last_have_series(active: list[int]) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("loss", "Loss.", RUN_LABELS, registry=registry)
    counter = Counter("ends", "Ends.", [*RUN_LABELS, "outcome"], registry=registry)
    series = RunSeries(max_runs=3)
    for number in active:
        series.labels(gauge, _run(number)).set(number)
        series.labels(counter, _run(number), "succeeded").inc()
    last = list(dict.fromkeys(reversed(active)))[:3]
    assert _runs_of(registry) == {f"r{number}" for number in last}
    assert (
        registry.get_sample_value("loss", {"project": "p", "run": f"r{active[-1]}"}) == active[-1]
    )


def test_a_run_that_is_forgotten_has_no_series() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("loss", "Loss.", RUN_LABELS, registry=registry)
    series = RunSeries()
    series.labels(gauge, _run(1)).set(1)
    series.labels(gauge, _run(2)).set(2)
    series.forget(_run(1))
    series.forget(_run(3))
    assert _runs_of(registry) == {"r2"}
