"""From what a dashboard shows to Grafana's JSON, by Grafana's own builder.

Each plot says how the metrics that it uses are read (docs/metrics.toml): the text is there where
the question comes up.
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from helm.observability.expressions import in_namespace, metrics_of
from helm.observability.rules import ALERTS

ROOT = Path(__file__).parents[2]
SUFFIXES = ("_bucket", "_sum", "_count")
_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_COLUMNS, _HEIGHT = 3, 8
_NOTES: dict[str, str] = tomllib.loads((ROOT / "docs/metrics.toml").read_text())["read"]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a plot, and what its lines are called."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture: its title, what it shows, and in which of Grafana's units."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    note: str = ""
    """How it is read, where it uses no metric of ours."""
    limit_of: str = ""
    """The alert whose limit is drawn."""

    @property
    def description(self) -> str:
        """How its metrics are read, and what the runbook says of alerts about them."""
        series = [name for query in self.queries for name in sorted(metrics_of(query.expression))]
        names = [metric_name(name) for name in series]
        notes = [_NOTES[name] for name in names] or [self.note]
        alerts = [
            f"**{alert.name}**: {alert.means} {alert.remedy}"
            for alert in ALERTS
            if {metric_name(name) for name in metrics_of(alert.expression)} & {*names}
        ]
        return "\n\n".join([*dict.fromkeys(notes), *alerts])

    @property
    def is_of_runs(self) -> bool:
        """Whether each line is of one run."""
        return all("{{run}}" in query.legend for query in self.queries)


@dataclass(frozen=True, slots=True)
class Row:
    """A heading with the plots below it."""

    title: str
    plots: Sequence[Plot]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of plots.

    Attributes:
        uid: Names the page in links, and its file.
        variables: Which of `pool`, `project` and `run` can be chosen.
    """

    uid: str
    title: str
    description: str
    variables: Sequence[str]
    rows: Sequence[Row]

    @property
    def plots(self) -> list[Plot]:
        """All pictures."""
        return [plot for row in self.rows for plot in row.plots]


def metric_name(series: str) -> str:
    """Return the metric that a name in an expression is of."""
    if series in _NOTES:
        return series
    return next(name for suffix in SUFFIXES if (name := series.removesuffix(suffix)) in _NOTES)


# The address of `tinsmith up`; the chart puts its own in its place.
PAGE = "http://127.0.0.1:7077"
# The values of each variable come from a metric that has the label.
_OF_RUNS = '__name__=~"tinsmith_run_(version|reward|sampled_tokens_total)"'
_VARIABLES = {
    "namespace": "label_values(tinsmith_build_info, namespace)",
    "pool": "label_values(tinsmith_rpc_requests_in_flight, tinsmith_dev_workload)",
    "project": f"label_values({{{_OF_RUNS}}}, project)",
    "run": f'label_values({{{_OF_RUNS}, project=~"$project"}}, run)',
}


def to_json(page: Dashboard) -> str:
    """Return a page as Grafana imports it."""
    builder = (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .description(page.description)
        .tags(["tinsmith"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .editable()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(_link())
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for name in ("namespace", *page.variables):
        builder.with_variable(_variable(name))
    if any(plot.is_of_runs for plot in page.plots):
        builder.with_variable(
            dashboard.TextBoxVariable("page").label("Address of the page").default_value(PAGE)
        )
    numbers = itertools.count(1)
    for row in page.rows:
        builder.with_row(dashboard.Row(row.title).id(next(numbers)))
        for plot in row.plots:
            builder.with_panel(_panel(plot).id(next(numbers)))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _variable(name: str) -> Any:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(_VARIABLES[name])
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )


def _link() -> Any:
    return (
        dashboard.DashboardLink("Tinsmith")
        .type(models.DashboardLinkType.DASHBOARDS)
        .tags(["tinsmith"])
        .as_dropdown(True)
        .include_vars(True)
        .keep_time(True)
    )


def _panel(plot: Plot) -> Any:
    panel = (
        timeseries.Panel()
        .title(plot.title)
        .description(plot.description)
        .datasource(_SOURCE)
        .unit(plot.unit)
        .height(_HEIGHT)
        .span(24 // _COLUMNS)
        .line_width(1)
        .fill_opacity(8)
        .show_points(common_models.VisibilityMode.AUTO)
        .span_nulls(False)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    if plot.is_of_runs:
        panel.data_links([_run_link()])
    if plot.limit_of:
        panel.thresholds(_thresholds(plot.limit_of))
        panel.thresholds_style(
            common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        )
    for number, query in enumerate(plot.queries):
        panel.with_target(
            prometheus.Dataquery()
            .datasource(_SOURCE)
            .expr(in_namespace(query.expression))
            .legend_format(query.legend or "__auto")
            .ref_id(chr(ord("A") + number))
            .exemplar("_bucket" in query.expression)
            .range()
        )
    return panel


def _run_link() -> Any:
    return (
        dashboard.DashboardLink("The run's page")
        .url("${page}/#/runs/${__field.labels.run}")
        .target_blank(True)
    )


def _thresholds(name: str) -> Any:
    limit = next(alert.limit for alert in ALERTS if alert.name == name)
    below, above = ("red", "green") if limit.is_least else ("green", "red")
    steps = [models.Threshold(None, below), models.Threshold(limit.value, above)]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
