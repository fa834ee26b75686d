"""A real Prometheus scrapes the real services while they train: panels and alerts have data.

Data are asked for with the variables of the pages set to all, over a time that covers the day.
What the day cannot make is listed, with the reason; an entry that has data fails.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helm.observability.dashboards import DASHBOARDS
from helm.observability.expressions import metrics_of
from helm.observability.rules import ALERTS

from tests.integration.conftest import model_dir  # noqa: F401 - a fixture
from tests.integration.servers import EmbeddedThread
from tests.observability.day import live_one
from tests.observability.pictures import draw
from tests.observability.prometheus_server import Prometheus, scraping
from tests.support.wait import until
from tinsmith_local.process import free_port

pytestmark = pytest.mark.timeout(600)

_CRASH, _LIMIT = "needs a crash", "needs a bound that is passed"
_WITHOUT = {
    "tinsmith_controller_": "needs a cluster",
    "tinsmith_certificate_expiry": "needs TLS",
    "tinsmith_rpc_limited_total": _LIMIT,
    "tinsmith_gateway_refused_connections_total": _LIMIT,
    "tinsmith_coordinator_expired_limits_total": _LIMIT,
    "tinsmith_coordinator_fenced_calls_total": "needs an agent that comes late",
    "tinsmith_environment_failures_total": _CRASH,
    "tinsmith_environment_worker_restarts_total": _CRASH,
    "tinsmith_run_replay_diverged": "needs other bits after a crash",
    "tinsmith_trainer_replayed_operations_total": _CRASH,
    "tinsmith_sampler_weight_loads_total": "needs a sampler in another process",
}
"""Metrics that the day does not make, by the beginning of their names, and why."""
_VARIABLE = re.compile(r"\$(?:project|run|pool)\b")


@dataclass(frozen=True)
class Day:
    """A day that was scraped."""

    prometheus: Prometheus
    begin_s: float
    end_s: float

    def lines(self, expression: str) -> list[Mapping[str, Any]]:
        """Return what an expression of a panel shows."""
        asked = _VARIABLE.sub(".*", expression)
        window = f"{int(self.end_s - self.begin_s)}s"
        asked = asked.replace("$__rate_interval", "15s").replace("$__range", window)
        return self.prometheus.query_range(asked, start_s=self.begin_s, end_s=self.end_s, step_s=1)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Day]:  # noqa: F811
    work = tmp_path_factory.mktemp("day")
    metrics_address = f"127.0.0.1:{free_port()}"
    server = EmbeddedThread(work / "data", model_dir, metrics_address=metrics_address)
    deployment = server.start()
    try:
        with scraping(work, metrics_address) as prometheus:
            begin_s = time.time()
            live_one(server, deployment, work / "out")
            # A rate needs two scrapes behind the last call.
            seen_s = time.time() + 3
            until(lambda: float(prometheus.query("timestamp(up)")[0]["value"][1]) > seen_s)
            yield Day(prometheus, begin_s, time.time())
    finally:
        server.stop()


def _reasons(expression: str) -> set[str]:
    return {
        reason
        for name in metrics_of(expression)
        for beginning, reason in _WITHOUT.items()
        if name.startswith(beginning)
    }


def test_every_panel_shows_data(day: Day) -> None:
    empty, unexpected = [], []
    for page in DASHBOARDS:
        for plot in page.plots:
            for query in plot.queries:
                has_data = bool(day.lines(query.expression))
                is_excused = bool(_reasons(query.expression))
                if not has_data and not is_excused:
                    empty.append(f"{page.uid}: {plot.title}: {query.expression}")
                if has_data and is_excused:
                    unexpected.append(query.expression)
    assert empty == [], "\n".join(empty)
    assert unexpected == []


def test_every_alert_is_evaluated_on_data(day: Day) -> None:
    def evaluated() -> Sequence[Mapping[str, Any]]:
        found = day.prometheus.rules()
        return found if all(rule["health"] == "ok" for rule in found) else ()

    rules = until(evaluated)
    assert {rule["name"] for rule in rules} == {alert.name for alert in ALERTS}
    without = [
        (alert.name, name)
        for alert in ALERTS
        for name in sorted(metrics_of(alert.expression))
        if not _reasons(name) and not day.lines(name)
    ]
    assert without == []


def test_pages_can_be_drawn(day: Day, tmp_path: Path) -> None:
    target = Path(os.environ.get("TINSMITH_DASHBOARD_PICTURES", tmp_path))
    for page in DASHBOARDS:
        picture = draw(page, day.lines, target / f"{page.uid}.png")
        assert picture.read_bytes().startswith(b"\x89PNG")
