"""What expressions of PromQL name, and the short forms that dashboards are written in."""

from __future__ import annotations

import re

PROJECT = 'project=~"$project"'
RUN = 'project=~"$project",run=~"$run"'
POOL = 'tinsmith_dev_workload=~"$pool"'
"""The label that the PodMonitor gives to pods of jobs and pools; others match the empty one."""

NAMESPACE = 'namespace=~"$namespace"'
"""The label that Prometheus gives to what it finds in a cluster; others match the empty one."""

_METRIC = re.compile(r"\btinsmith_[a-z0-9_]+\b(?!\s*=)")


def metrics_of(expression: str) -> set[str]:
    """Return the series of ours that an expression names, as `tinsmith_..._bucket` and so on."""
    without_labels = re.sub(r"\b(?:by|on|without|ignoring|group_left)\s*\([^)]*\)", "", expression)
    return {
        name
        for name in _METRIC.findall(re.sub(r"\{[^}]*\}", "", without_labels))
        if not name.startswith("tinsmith_dev_")
    }


def in_namespace(expression: str) -> str:
    """Return the expression for the series of the namespaces that are chosen alone."""
    of_pods = r"\b(?:up|process_[a-z_]+)(?=\{)"
    ours = "|".join(sorted(metrics_of(expression), key=len, reverse=True))
    names = rf"(?:\b(?:{ours})\b|{of_pods})" if ours else of_pods
    return re.sub(
        rf"({names})(\{{?)",
        lambda found: f"{found[1]}{{{NAMESPACE}{',' if found[2] else '}'}",
        expression,
    )


def rate(metric: str, matchers: str = "", by: str = "") -> str:
    """Return the rate of a counter, summed."""
    return f"sum{_by(by)}(rate({metric}{_braces(matchers)}[$__rate_interval]))"


def quantile(q: float, histogram: str, matchers: str = "", by: str = "") -> str:
    """Return a quantile of a histogram, over all series of the same labels."""
    labels = ", ".join(filter(None, ["le", by]))
    inner = f"rate({histogram}_bucket{_braces(matchers)}[$__rate_interval])"
    return f"histogram_quantile({q}, sum by ({labels}) ({inner}))"


def mean(histogram: str, matchers: str = "", by: str = "") -> str:
    """Return the mean of a histogram."""
    return ratio(rate(f"{histogram}_sum", matchers, by), rate(f"{histogram}_count", matchers, by))


def ratio(part: str, whole: str) -> str:
    """Return a quotient."""
    return f"{part} / {whole}"


def total(metric: str, matchers: str = "", by: str = "") -> str:
    """Return the sum of a gauge."""
    return f"sum{_by(by)}({metric}{_braces(matchers)})"


def by_run(metric: str, matchers: str = "", by: str = "") -> str:
    """Return a gauge of the runs that are chosen, one line for each."""
    labels = ", ".join(filter(None, ["project, run", by]))
    return f"max by ({labels}) ({metric}{_braces(_and(matchers))})"


def rate_by_run(metric: str, matchers: str = "", by: str = "") -> str:
    """Return the rate of a counter of the runs that are chosen."""
    return rate(metric, _and(matchers), ", ".join(filter(None, ["project, run", by])))


def _and(matchers: str) -> str:
    return ",".join(filter(None, [RUN, matchers]))


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def _braces(matchers: str) -> str:
    return f"{{{matchers}}}" if matchers else ""
