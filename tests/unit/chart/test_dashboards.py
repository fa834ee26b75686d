"""Dashboards, alerts and the page of metrics: generated, current, and about metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from grafana_foundation_sdk.models.dashboard import Dashboard as GrafanaDashboard
from helm.observability.__main__ import generated_files
from helm.observability.dashboards import DASHBOARDS
from helm.observability.expressions import in_namespace, metrics_of
from helm.observability.laptop import write_folder
from helm.observability.panels import PAGE, to_json
from helm.observability.rules import ALERTS, rules_text
from tests.fakes.chart_harness import CHART, ROOT, load_values, merge, of_kind, render

_OTHERS = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total", "le"}


@pytest.fixture(scope="module")
def metrics_page() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "docs/metrics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def _expressions() -> dict[str, str]:
    of_panels = {
        f"{page.uid}: {plot.title}: {query.legend}": query.expression
        for page in DASHBOARDS
        for plot in page.plots
        for query in plot.queries
    }
    return of_panels | {alert.name: alert.expression for alert in ALERTS}


def test_what_is_committed_is_current() -> None:
    files = generated_files()
    assert {path for path, text in files.items() if path.read_text() != text} == set()
    assert {*(CHART / "dashboards").iterdir()} < files.keys()


def test_panels_and_alerts_use_declared_metrics_alone(metrics_page: ModuleType) -> None:
    declared = {name for metric in metrics_page.declared() for name in metric.series}
    used = {where: metrics_of(text) for where, text in _expressions().items()}
    assert {where: names - declared for where, names in used.items() if names - declared} == {}
    assert {where for where, names in used.items() if not names} <= {
        where for where, text in _expressions().items() if any(name in text for name in _OTHERS)
    }


def test_labels_of_expressions_are_those_of_their_metrics(metrics_page: ModuleType) -> None:
    labels = {name: set(m.labels) for m in metrics_page.declared() for name in m.series}
    wrong = {}
    for where, text in _expressions().items():
        for name, matchers in re.findall(r"(tinsmith_\w+)\{([^}]*)\}", text):
            asked = set(re.findall(r"(\w+)=~?\"", matchers)) - {"tinsmith_dev_workload"}
            if asked - labels[name]:
                wrong[where] = asked - labels[name]
    assert wrong == {}


def test_every_metric_is_shown_or_told(metrics_page: ModuleType) -> None:
    used = set().union(*map(metrics_of, _expressions().values()))
    unseen = [m.name for m in metrics_page.declared() if not used & set(m.series)]
    assert unseen == []


def test_the_page_of_metrics_is_current(metrics_page: ModuleType) -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.page()


@pytest.mark.parametrize("page", DASHBOARDS, ids=lambda page: page.uid)
def test_a_page_is_what_grafana_reads(page: object) -> None:
    given = json.loads(to_json(page))  # type: ignore[arg-type]
    read = GrafanaDashboard.from_json(given)
    assert read.uid == given["uid"]
    panels = [panel for panel in given["panels"] if panel["type"] != "row"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    assert all(panel["description"] and panel["title"] for panel in panels)
    for panel in given["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24


def test_plots_of_runs_lead_to_their_pages_and_limits_are_those_of_alerts() -> None:
    panels = [
        (plot, panel)
        for page in DASHBOARDS
        for plot, panel in zip(
            page.plots,
            [each for each in json.loads(to_json(page))["panels"] if each["type"] != "row"],
            strict=True,
        )
    ]
    for plot, panel in panels:
        defaults = panel["fieldConfig"]["defaults"]
        links = [link["url"] for link in defaults.get("links", [])]
        expected = ["${page}/#/runs/${__field.labels.run}"] if plot.is_of_runs else []
        assert links == expected, plot.title
    drawn = {
        plot.limit_of: panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        for plot, panel in panels
        if plot.limit_of
    }
    assert drawn["TinsmithKlHigh"] == [
        {"value": None, "color": "green"},
        {"value": 0.01, "color": "red"},
    ]
    assert len(drawn) > 10


def test_a_plot_says_what_the_runbook_says_of_its_alerts() -> None:
    kl = next(plot for page in DASHBOARDS for plot in page.plots if plot.title.startswith("KL("))
    told = {alert.name for alert in ALERTS if f"**{alert.name}**: {alert.means}" in kl.description}
    assert told == {"TinsmithRewardHack", "TinsmithKlHigh", "TinsmithKlSpike"}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("sum(tinsmith_a)", 'sum(tinsmith_a{namespace=~"$namespace"})'),
        (
            'tinsmith_a{b="c"} / tinsmith_a_total',
            'tinsmith_a{namespace=~"$namespace",b="c"} / tinsmith_a_total{namespace=~"$namespace"}',
        ),
        ('up{job="x"} == 0', 'up{namespace=~"$namespace",job="x"} == 0'),
        (
            'max by (b) (tinsmith_a{tinsmith_dev_workload=~"$pool"})',
            'max by (b) (tinsmith_a{namespace=~"$namespace",tinsmith_dev_workload=~"$pool"})',
        ),
    ],
)
def test_expressions_are_of_the_namespaces_that_are_chosen(expression: str, expected: str) -> None:
    assert in_namespace(expression) == expected


def test_the_folder_of_a_laptop_is_whole(tmp_path: Path) -> None:
    write_folder(tmp_path)
    settings = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    assert (tmp_path / settings["rule_files"][0]).read_text() == rules_text()
    [source] = yaml.safe_load((tmp_path / "provisioning/datasources/tinsmith.yaml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    [provider] = yaml.safe_load((tmp_path / "provisioning/dashboards/tinsmith.yaml").read_text())[
        "providers"
    ]
    pages = sorted(path.name for path in Path(provider["options"]["path"]).iterdir())
    assert pages == sorted(f"{page.uid}.json" for page in DASHBOARDS)


def test_names_are_given_once() -> None:
    for names in ([page.uid for page in DASHBOARDS], [alert.name for alert in ALERTS]):
        assert len(set(names)) == len(names)
    for page in DASHBOARDS:
        titles = [plot.title for plot in page.plots]
        assert len(set(titles)) == len(titles), page.uid


def test_each_alert_has_its_entry_in_the_runbook() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert headings == [alert.name for alert in ALERTS]


def test_the_chart_brings_pages_and_rules_where_they_are_wanted() -> None:
    values = merge(
        load_values("external-values"), {"monitoring": {"dashboards": {"enabled": True}}}
    )
    pages = [
        m for m in of_kind(render(values), "ConfigMap") if "dashboard" in m["metadata"]["name"]
    ]
    assert {m["metadata"]["labels"]["grafana_dashboard"] for m in pages} == {"1"}
    texts = {name: text for m in pages for name, text in m["data"].items()}
    assert texts == {
        path.name: path.read_text().strip() for path in (CHART / "dashboards").glob("*.json")
    }
    named = merge(values, {"gateway": {"publicUrl": "https://tinsmith.example.com"}})
    [of_runs] = [
        text
        for m in of_kind(render(named), "ConfigMap")
        for name, text in m["data"].items()
        if name == "tinsmith-run.json"
    ]
    assert PAGE not in of_runs
    assert '"query": "https://tinsmith.example.com"' in of_runs
    assert of_kind(render(values), "PrometheusRule") == []
    always = merge(values, {"monitoring": {"rules": "always"}})
    [rule] = of_kind(render(always), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(rules_text())
    off = merge(values, {"monitoring": {"dashboards": {"enabled": False}}})
    found = of_kind(render(off), "ConfigMap")
    assert not [m for m in found if "dashboard" in m["metadata"]["name"]]
