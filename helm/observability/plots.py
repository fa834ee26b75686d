"""Short forms for the plots that most pages consist of."""

from __future__ import annotations

from helm.observability.expressions import quantile
from helm.observability.panels import Plot, Query

RUN_NAME = "{{project}}/{{run}}"
"""What the line of a run is called."""
RUN = "tinsmith_run"
TRAINER = "tinsmith_trainer"
SAMPLER = "tinsmith_sampler"
SCHEDULER = "tinsmith_scheduler"
COORDINATOR = "tinsmith_coordinator"
ENVIRONMENT = "tinsmith_environment"
GATEWAY = "tinsmith_gateway"
CONTROLLER = "tinsmith_controller"


def one(
    title: str,
    expression: str,
    legend: str = "",
    unit: str = "short",
    note: str = "",
    limit_of: str = "",
) -> Plot:
    """Show one expression, and the limit of an alert."""
    return Plot(title, [Query(expression, legend)], unit, note, limit_of)


def spread(
    title: str, histogram: str, matchers: str = "", unit: str = "s", limit_of: str = ""
) -> Plot:
    """Show median and tail of a histogram, and the limit of an alert."""
    quantiles = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    queries = [Query(quantile(q, histogram, matchers), name) for q, name in quantiles]
    return Plot(title, queries, unit, limit_of=limit_of)


def by_label(title: str, expression: str, label: str, unit: str = "short") -> Plot:
    """Show one expression with a line for each value of a label."""
    return one(title, expression, f"{{{{{label}}}}}", unit)
