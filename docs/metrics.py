"""Writes metrics.md: every metric that a pod declares, with its labels and how to read it.

Names, kinds, labels and meanings come from the code. How to read each is said in metrics.toml,
which the dashboards show beside the plot; a metric that is not in it, and an entry of no metric,
fail.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from tinsmith_runtime.observability.run_series import MAX_RUNS

PAGE = Path(__file__).parent / "metrics.md"
NOTES = Path(__file__).parent / "metrics.toml"
MODULES = {
    "every pod": "tinsmith_runtime.observability.metrics",
    "trainer": "tinsmith_trainer.metrics",
    "sampler": "tinsmith_sampler.metrics",
    "scheduler": "tinsmith_scheduler.metrics",
    "gateway": "tinsmith_gateway.metrics",
    "coordinator": "tinsmith_coordinator.metrics",
    "environment": "tinsmith_environment.metrics",
    "controller": "tinsmith_controller.metrics",
}
_RUN = "tinsmith_run_"
_HEAD = f"""# Metrics

Generated from the code by `make docs`. Pods serve them at `/metrics` of their `metrics_address`
(port 9090 in the chart), in Prometheus' and OpenMetrics' format. A histogram has `_bucket`, `_sum`
and `_count`. Process and Python metrics (`process_*`, `python_*`) come with the client library.

Metrics whose name begins with `{_RUN}` are by `project` and `run`. A pod has series of the
{MAX_RUNS} runs that were active last: a further run takes the place of the one that was idle
longest, whose series end. A gauge by run holds what the last operation found, so a window in an
expression should be several steps long.
"""


@dataclass(frozen=True, slots=True)
class Declared:
    """A metric as a pod declares it."""

    name: str
    """As expressions use it; of a histogram, without its suffix."""
    kind: str
    labels: tuple[str, ...]
    meaning: str
    pod: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names that expressions may use."""
        if self.kind == "summary":
            return (f"{self.name}_sum", f"{self.name}_count")
        if self.kind == "histogram":
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.name,)


def declared() -> list[Declared]:
    """Return all metrics, by pod and in the order of the code."""
    return [metric for pod, module in MODULES.items() for metric in _of_module(pod, module)]


def _of_module(pod: str, module: str) -> Iterator[Declared]:
    for value in vars(importlib.import_module(module)).values():
        if not isinstance(value, MetricWrapperBase):
            continue
        [family] = value.describe()
        name = f"{family.name}_total" if family.type == "counter" else family.name
        # The library has no public way to ask for the labels.
        labels = tuple(value._labelnames)
        yield Declared(name, family.type, labels, family.documentation, pod)


def reading_notes() -> Mapping[str, str]:
    """Return how to read each metric, by its name."""
    return {name: str(text) for name, text in tomllib.loads(NOTES.read_text())["read"].items()}


def genai_names() -> Mapping[str, str]:
    """Return the names of OpenTelemetry's conventions for generative AI, with ours for each."""
    return {name: str(text) for name, text in tomllib.loads(NOTES.read_text())["genai"].items()}


def page() -> str:
    """Return the text of the page.

    Raises:
        ValueError: If a metric has no note, or a note no metric.
    """
    metrics, notes = declared(), reading_notes()
    names = {metric.name for metric in metrics}
    problems = [f"{name} says not how to read it" for name in sorted(names - notes.keys())]
    problems += [f"{name} is no metric" for name in sorted(notes.keys() - names)]
    if problems:
        raise ValueError("docs/metrics.toml: " + "; ".join(problems))
    lines = [_HEAD]
    by_run = [metric for metric in metrics if metric.name.startswith(_RUN)]
    lines += [*_table("By run", by_run, notes, with_pod=True)]
    for pod in MODULES:
        of_pod = [one for one in metrics if one.pod == pod and one not in by_run]
        lines += _table(pod[0].upper() + pod[1:], of_pod, notes)
    lines += [
        "## OpenTelemetry's names for generative AI\n",
        "Where the conventions (`gen_ai.*`) name the same thing, this table says which metric it "
        "is here. Prometheus has our names: the conventions are in development and change.\n",
        "| convention | here |",
        "| --- | --- |",
    ]
    lines += [f"| `{name}` | {ours} |" for name, ours in genai_names().items()]
    return "\n".join(lines) + "\n"


def _table(
    title: str, metrics: list[Declared], notes: Mapping[str, str], *, with_pod: bool = False
) -> list[str]:
    pod, rule = (" pod |", " --- |") if with_pod else ("", "")
    lines = [f"## {title}\n", f"| metric | kind |{pod} labels | meaning | how to read it |"]
    lines.append(f"| --- | --- |{rule} --- | --- | --- |")
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        where = f" {metric.pod} |" if with_pod else ""
        cells = [f"`{metric.name}`", metric.kind]
        rest = [labels, metric.meaning, notes[metric.name]]
        lines.append(f"| {' | '.join(cells)} |{where} {' | '.join(map(_cell, rest))} |")
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
