"""What a Prometheus saw of a day, and which day makes which metrics.

A page is whole if each of its expressions has data on one of the days: in one process, in processes
of which some die, on a cluster.
"""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from helm.observability.dashboards import DASHBOARDS
from helm.observability.expressions import in_namespace, metrics_of

from tests.observability.prometheus_server import Prometheus
from tests.support.wait import until

_VARIABLE = re.compile(r"\$(?:namespace|project|run|pool)\b")


class Day(enum.Enum):
    """Where a metric has values."""

    QUIET = "one process, in which nothing dies"
    BAD = "processes with certificates, of which some die, and callers past their bounds"
    CLUSTER = "a controller on an API server"
    NEVER = "what a service that keeps its promises never shows"


_DAYS = {
    "tinsmith_controller_": Day.CLUSTER,
    "tinsmith_certificate_expiry": Day.BAD,
    "tinsmith_confined_ends_total": Day.BAD,
    "tinsmith_rpc_limited_total": Day.BAD,
    "tinsmith_gateway_refused_connections_total": Day.BAD,
    "tinsmith_coordinator_expired_limits_total": Day.BAD,
    "tinsmith_coordinator_fenced_calls_total": Day.BAD,
    "tinsmith_environment_failures_total": Day.BAD,
    "tinsmith_environment_worker_restarts_total": Day.BAD,
    "tinsmith_run_replay_diverged": Day.NEVER,
    "tinsmith_trainer_replayed_operations_total": Day.BAD,
    "tinsmith_sampler_weight_loads_total": Day.BAD,
}
"""By the beginnings of names; all others have values on a quiet day."""


def day_of(expression: str) -> Day:
    """Return the day on which an expression has data."""
    days = {
        day
        for name in metrics_of(expression)
        for beginning, day in _DAYS.items()
        if name.startswith(beginning)
    }
    assert len(days) < 2, f"{expression} needs more than one day: {days}"
    return days.pop() if days else Day.QUIET


@dataclass(frozen=True)
class Scraped:
    """A day that was scraped, in seconds since the epoch."""

    prometheus: Prometheus
    begin_s: float
    end_s: float

    @classmethod
    def since(cls, prometheus: Prometheus, begin_s: float) -> Scraped:
        """Return the day that ends now, once a rate sees its last call: after two scrapes."""
        seen_s = time.time() + 3
        until(lambda: float(prometheus.query("min(timestamp(up))")[0]["value"][1]) > seen_s)
        return cls(prometheus, begin_s, time.time())

    def lines(self, expression: str) -> list[Mapping[str, Any]]:
        """Return what an expression of a panel shows, with all variables set to all."""
        asked = _VARIABLE.sub(".*", in_namespace(expression))
        window = f"{int(self.end_s - self.begin_s)}s"
        asked = asked.replace("$__rate_interval", "15s").replace("$__range", window)
        return self.prometheus.query_range(asked, start_s=self.begin_s, end_s=self.end_s, step_s=1)

    def empty(self, day: Day) -> list[str]:
        """Return the expressions of the pages that should have data on a day and have none."""
        return [
            f"{page.uid}: {plot.title}: {query.expression}"
            for page in DASHBOARDS
            for plot in page.plots
            for query in plot.queries
            if day_of(query.expression) is day and not self.lines(query.expression)
        ]
