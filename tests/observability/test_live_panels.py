"""A real Prometheus scrapes the real services while they train: panels and alerts have data.

The first day is quiet, in one process. On the second pods die, with certificates between them, and
callers pass their bounds. What only a cluster shows is in tests/e2e/test_controller_faults.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from helm.observability.dashboards import DASHBOARDS
from helm.observability.expressions import metrics_of
from helm.observability.rules import ALERTS

from tests.integration.conftest import model_dir  # noqa: F401 - a fixture
from tests.integration.servers import EmbeddedThread
from tests.observability.bad_day import UNRULY, bad_pods, live_a_bad_one
from tests.observability.day import live_one
from tests.observability.pictures import draw
from tests.observability.prometheus_server import scraping
from tests.observability.scraped import Day, Scraped, day_of
from tests.support.wait import until
from tinsmith_local.process import free_port

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Scraped]:  # noqa: F811
    work = tmp_path_factory.mktemp("day")
    metrics_address = f"127.0.0.1:{free_port()}"
    server = EmbeddedThread(work / "data", model_dir, metrics_address=metrics_address)
    deployment = server.start()
    try:
        with scraping(work, [metrics_address]) as prometheus:
            begin_s = time.time()
            live_one(server, deployment, work / "out")
            yield Scraped.since(prometheus, begin_s)
    finally:
        server.stop()


def test_every_panel_shows_data(day: Scraped) -> None:
    assert day.empty(Day.QUIET) == []


def test_a_quiet_day_shows_nothing_of_a_bad_one(day: Scraped) -> None:
    later = [
        query.expression
        for page in DASHBOARDS
        for plot in page.plots
        for query in plot.queries
        if day_of(query.expression) is not Day.QUIET and day.lines(query.expression)
    ]
    assert later == []


def test_every_alert_is_evaluated_on_data(day: Scraped) -> None:
    def evaluated() -> Sequence[Mapping[str, Any]]:
        found = day.prometheus.rules()
        return found if all(rule["health"] == "ok" for rule in found) else ()

    rules = until(evaluated)
    assert {rule["name"] for rule in rules} == {alert.name for alert in ALERTS}
    without = [
        (alert.name, name)
        for alert in ALERTS
        for name in sorted(metrics_of(alert.expression))
        if day_of(name) is Day.QUIET and not day.lines(name)
    ]
    assert without == []


def test_pages_can_be_drawn(day: Scraped, tmp_path: Path) -> None:
    target = Path(os.environ.get("TINSMITH_DASHBOARD_PICTURES", tmp_path))
    for page in DASHBOARDS:
        picture = draw(page, day.lines, target / f"{page.uid}.png")
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_bad_day_fills_the_panels_of_a_bad_day(
    tmp_path: Path,
    model_dir: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(UNRULY))
    with bad_pods(tmp_path, model_dir) as (deployment, processes):
        targets = [process.metrics_address for process in processes.values()]
        with scraping(tmp_path, targets) as prometheus:
            begin_s = time.time()
            live_a_bad_one(deployment, processes)
            assert Scraped.since(prometheus, begin_s).empty(Day.BAD) == []
