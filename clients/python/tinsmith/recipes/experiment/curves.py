"""Curves of metrics as pictures, by matplotlib if it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Curve:
    """What an experiment is drawn and compared by.

    Attributes:
        metric: Name of the metric.
        label: What it is, in words.
        rises: Whether more of it is better.
    """

    metric: str
    label: str
    rises: bool = False


def plot_curve(
    path: Path,
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str = "step",
    y_label: str = "",
    has_log_x: bool = False,
) -> Path | None:
    """Draw lines into a PNG and return its path; None if matplotlib is not installed.

    Points of a logarithmic axis are marked: they are few, and far apart.
    """
    try:
        from matplotlib import figure as figures
    except ImportError:
        return None
    # Without pyplot, whose state threads share.
    figure = figures.Figure(figsize=(7, 4), dpi=120)
    axes = figure.subplots()
    for label, points in series.items():
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=label,
            linewidth=1.6,
            marker="o" if has_log_x else None,
        )
    if has_log_x:
        axes.set_xscale("log")
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def describe_picture(path: Path | None) -> str:
    """Return where a picture is, or why there is none."""
    return str(path or "none: matplotlib is not installed (pip install matplotlib)")
