"""Still pictures of dashboards, drawn by matplotlib from what Prometheus answers.

They show what Grafana would show of the same data, and are not Grafana's own drawing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from helm.observability.panels import Dashboard, Query
from matplotlib.figure import Figure

Lines = Callable[[str], Sequence[Mapping[str, Any]]]
_COLUMNS, _MOST_LINES = 3, 8
mpl.use("Agg")


def draw(page: Dashboard, lines: Lines, target: Path) -> Path:
    """Draw a page, and return its file."""
    plots = page.plots
    num_rows = -(-len(plots) // _COLUMNS)
    figure = Figure(figsize=(15, 2.6 * num_rows + 0.6), layout="constrained")
    figure.suptitle(page.title, fontsize=13)
    for number, plot in enumerate(plots):
        axes = figure.add_subplot(num_rows, _COLUMNS, number + 1)
        axes.set_title(f"{plot.title} [{plot.unit}]", fontsize=8)
        axes.tick_params(labelsize=6)
        axes.set_xticks([])
        num_lines = 0
        for query in plot.queries:
            for found in lines(query.expression)[:_MOST_LINES]:
                points = [(float(at), float(value)) for at, value in found["values"]]
                label = _legend(query, found["metric"])
                axes.plot(
                    *zip(*points, strict=True), linewidth=0.9, marker=".", ms=1.5, label=label
                )
                num_lines += 1
        if num_lines:
            axes.legend(fontsize=5, loc="upper left", frameon=False)
        else:
            axes.text(0.5, 0.5, "No data", ha="center", transform=axes.transAxes, fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=70)
    return target


def _legend(query: Query, labels: Mapping[str, str]) -> str:
    if not query.legend:
        return ", ".join(labels.values())
    return re.sub(r"\{\{(\w+)\}\}", lambda name: labels.get(name[1], ""), query.legend)[:48]
