"""The picture of `bench.scenarios`: a panel for each scenario, and one of two policies' games."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.recipes.reinforcement import BEFORE, WARM_START

_AFTER = "after"
_SMOOTHED = 5
_COLOURS = {"": "#1f5fb4", "black": "#222222", "white": "#d1781f"}

Curves = Sequence[Sequence[Mapping[str, Any]]]


def draw_figure(path: Path, found: Mapping[str, Curves]) -> None:
    """Draw the validation curves of scenarios: each seed, their mean, and where a warm start ends.

    Args:
        path: Of the PNG.
        found: The curves of each scenario, as `bench.scenarios` writes them.
    """
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib import pyplot

    shared = [name for name, curves in found.items() if len(policies_of(curves)) > 1]
    num_panels = len(found) + len(shared)
    columns = min(3, num_panels)
    rows = -(-num_panels // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.3 * rows), dpi=120, squeeze=False
    )
    panels = list(grid.flat)
    for axes, (name, curves) in zip(panels, found.items(), strict=False):
        _draw_validation(axes, name, curves)
    for axes, name in zip(panels[len(found) :], shared, strict=False):
        _draw_zero_sum(axes, name, found[name])
    for axes in panels[num_panels:]:
        axes.set_axis_off()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def policies_of(curves: Curves) -> list[str]:
    """Return the names of the policies of a scenario; one without a name where it has one."""
    names = {
        key.rpartition("/")[0] for row in curves[0][1:] for key in row if key.endswith("validation")
    }
    return sorted(names)


def points_of(
    curve: Sequence[Mapping[str, Any]], policy: str, index: int
) -> list[tuple[int, float]]:
    """Return the steps done and the mean validation reward of a policy, first and last included."""
    rewards = curve[0]["rewards"]
    key = f"{policy}/validation" if policy else "validation"
    points = [(0, float(np.mean(rewards[BEFORE][index])))]
    points += [(int(row["step"]) + 1, row[key]) for row in curve[1:] if key in row]
    last = int(curve[-1]["step"]) + 1
    if points[-1][0] != last:
        points.append((last, float(np.mean(rewards[_AFTER][index]))))
    return points


def num_imitated(curve: Sequence[Mapping[str, Any]]) -> int:
    """Return the steps of the warm start."""
    return sum(any(key.endswith("imitation_loss") for key in row) for row in curve[1:])


def _draw_validation(axes: Any, name: str, curves: Curves) -> None:
    for index, policy in enumerate(policies_of(curves)):
        colour = _COLOURS.get(policy, "#1f5fb4")
        drawn = [points_of(curve, policy, index) for curve in curves]
        for points in drawn:
            axes.plot(*zip(*points, strict=True), color=colour, alpha=0.3, linewidth=0.9)
        steps = [step for step, _ in drawn[0]]
        mean = np.mean([[value for _, value in points] for points in drawn], axis=0)
        axes.plot(steps, mean, color=colour, linewidth=2.0, label=policy or None)
        begin = np.mean([np.mean(curve[0]["rewards"][WARM_START][index]) for curve in curves])
        axes.axhline(begin, color=colour, linewidth=0.7, linestyle=":")
    axes.axvspan(0, num_imitated(curves[0]), color="#999999", alpha=0.2, linewidth=0)
    axes.set_title(f"{name}, {len(curves)} seeds")
    axes.set_xlabel("step (grey: warm start)")
    axes.set_ylabel("validation reward")
    axes.grid(alpha=0.3)
    if len(policies_of(curves)) > 1:
        axes.legend()


def _draw_zero_sum(axes: Any, name: str, curves: Curves) -> None:
    """Draw what the two policies win from each other, behind warm start and practice."""
    for policy in policies_of(curves):
        key = f"{policy}/reward"
        colour = _COLOURS[policy]
        for curve in curves:
            # A game against a script may be begun again where the script forfeits it, and says so.
            points = [
                (int(row["step"]) + 1, row[key])
                for row in curve[1:]
                if key in row and f"{policy}/forfeited" not in row
            ]
            steps, values = zip(*points, strict=True)
            window = np.ones(_SMOOTHED) / _SMOOTHED
            smooth = np.convolve(values, window, mode="valid")
            axes.plot(steps[_SMOOTHED - 1 :], smooth, color=colour, alpha=0.5, linewidth=1.0)
        axes.plot([], [], color=colour, label=policy)
    axes.axhline(0.0, color="#999999", linewidth=0.7)
    axes.set_title(f"{name}: games against each other")
    axes.set_xlabel("step")
    axes.set_ylabel(f"reward, mean of {_SMOOTHED} steps")
    axes.grid(alpha=0.3)
    axes.legend()
