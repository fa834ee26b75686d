"""Curves of metrics as pictures, by matplotlib if it is installed."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.whole_files import write_whole

Points = Sequence[tuple[float, float]]
"""Values by step."""

_NUM_COLUMNS = 2
# Matplotlib keeps fonts and text for all threads, and variants of a sweep draw at once.
_DRAWING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Curve:
    """What an experiment is drawn and compared by.

    Attributes:
        metric: Name of the metric.
        label: What it is, in words.
        rises: Whether more of it is better.
        held_out: Name of the same figure of what was held out.
    """

    metric: str
    label: str
    rises: bool = False
    held_out: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the plots of a picture.

    Attributes:
        label: What the axis shows.
        lines: Values by what they are called.
        held_out: The same of scores, which are few: each is marked.
        right: Lines that have an axis of their own, on the right.
        right_label: What that axis shows.
    """

    label: str
    lines: Mapping[str, Points]
    held_out: Mapping[str, Points] = field(default_factory=dict)
    right: Mapping[str, Points] = field(default_factory=dict)
    right_label: str = ""


def plot_curve(
    path: Path,
    title: str,
    series: Mapping[str, Points],
    *,
    x_label: str = "step",
    y_label: str = "",
    has_log_x: bool = False,
) -> Path | None:
    """Draw lines into a PNG and return its path; None if matplotlib is not installed.

    Points of a logarithmic axis are marked: they are few, and far apart.
    """
    return plot_panels(path, title, [Panel(y_label, series)], x_label=x_label, has_log_x=has_log_x)


def plot_panels(
    path: Path,
    title: str,
    panels: Sequence[Panel],
    *,
    x_label: str = "step",
    has_log_x: bool = False,
) -> Path | None:
    """Draw panels into a PNG, two beside each other, and return its path.

    A reader finds the earlier picture or the whole new one. Without matplotlib nothing is drawn,
    and None is returned.
    """
    num_columns = min(len(panels), _NUM_COLUMNS)
    num_rows = -(-len(panels) // _NUM_COLUMNS)

    def fill(figure: Any) -> None:
        for index, panel in enumerate(panels, 1):
            axes = figure.add_subplot(num_rows, num_columns, index)
            _draw(axes, panel, has_log_x=has_log_x)
            axes.set_xlabel(x_label)

    size = (7, 4) if len(panels) == 1 else (11, 3.6 * num_rows)
    return draw_figure(path, title, size, fill)


def draw_figure(
    path: Path, title: str, size: tuple[float, float], fill: Callable[[Any], None]
) -> Path | None:
    """Draw a figure into a PNG, and return its path; None if matplotlib is not installed.

    Args:
        path: Of the picture; a reader finds the earlier one or the whole new one.
        title: Above it.
        size: Width and height in inches.
        fill: Draws into the figure of matplotlib.
    """
    try:
        from matplotlib import figure as figures
    except ImportError:
        return None
    with _DRAWING:
        # Without pyplot, whose state threads share.
        figure = figures.Figure(figsize=size, dpi=120)
        fill(figure)
        # Two dollars are mathematics to matplotlib, and part of a name here.
        figure.suptitle(title.replace("$", r"\$"))
        figure.tight_layout()
        content = io.BytesIO()
        figure.savefig(content, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content.getvalue())
    return path


def _draw(axes: Any, panel: Panel, *, has_log_x: bool) -> None:
    """Draw a panel; equal colours are of equal policies."""
    for label, points in panel.lines.items():
        _add(axes, label, points, linewidth=1.6, marker="o" if has_log_x else None)
    for index, (label, points) in enumerate(panel.held_out.items()):
        _add(axes, label, points, color=f"C{index}", linestyle=":", marker="o", markersize=5)
    drawn = list(axes.get_lines())
    if panel.right:
        right = axes.twinx()
        for label, points in panel.right.items():
            _add(right, label, points, color=f"C{len(right.lines) + 3}", linestyle="--")
        right.set_ylabel(panel.right_label)
        right.set_ylim(-0.02, 1.02)
        drawn += right.get_lines()
    if has_log_x:
        axes.set_xscale("log")
    axes.set_ylabel(panel.label)
    axes.grid(alpha=0.3)
    if len(drawn) > 1:
        axes.legend(handles=drawn, fontsize="small")


def _add(axes: Any, label: str, points: Points, **style: Any) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], label=label, **style)


def describe_picture(path: Path | None) -> str:
    """Return where a picture is, or why there is none."""
    return str(path or "none: matplotlib is not installed (pip install matplotlib)")
