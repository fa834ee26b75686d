"""How the variants of a sweep ended: a file, a picture and a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rich.console
import rich.table

from tinsmith.recipes.experiment.curves import Curve, describe_picture, plot_curve
from tinsmith.recipes.experiment.json_files import write_json

_FILE, _PICTURE = "sweep.json", "sweep.png"


@dataclass(frozen=True, slots=True)
class VariantOutcome:
    """How a variant ended.

    Attributes:
        values: What it differs in.
        score: Mean of the metric over the last tenth of its steps; None if it did not come there.
        folder: Its files.
        error: Why it failed; empty if it did not.
    """

    values: Mapping[str, str]
    score: float | None
    folder: Path
    error: str = ""


def compare(
    recipe: str,
    axes: Sequence[str],
    curve: Curve,
    outcomes: Sequence[VariantOutcome],
    folder: Path,
    console: rich.console.Console,
) -> None:
    """Write the comparison, draw it and show it as a table, the best first.

    Args:
        recipe: Its name.
        axes: The settings that have several values; the first is the axis of the picture.
        curve: What is compared.
        outcomes: One for each variant.
        folder: Where it goes.
        console: Shows the table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {**outcome.values, curve.metric: outcome.score, "folder": str(outcome.folder)}
        | ({"error": outcome.error} if outcome.error else {})
        for outcome in outcomes
    ]
    write_json(folder / _FILE, rows)
    picture = _draw(recipe, axes, curve, outcomes, folder)
    table = rich.table.Table(title=f"{recipe}: {curve.label}, mean of the last steps")
    for name in [*axes, curve.metric]:
        table.add_column(name)
    for outcome in sorted(outcomes, key=lambda each: _rank(each, curve)):
        score = outcome.error if outcome.score is None else f"{outcome.score:.4g}"
        table.add_row(*outcome.values.values(), score)
    console.print(table)
    for line in (
        f"table    {folder / _FILE}",
        f"picture  {describe_picture(picture)}",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _draw(
    recipe: str, axes: Sequence[str], curve: Curve, outcomes: Sequence[VariantOutcome], folder: Path
) -> Path | None:
    """Draw the metric over the first setting, with a line for each combination of the others."""
    first, *others = axes
    series: dict[str, list[tuple[float, float]]] = {}
    for outcome in outcomes:
        if outcome.score is not None:
            label = ", ".join(f"{name} {outcome.values[name]}" for name in others)
            series.setdefault(label, []).append((float(outcome.values[first]), outcome.score))
    points = [x for line in series.values() for x, _ in line]
    return plot_curve(
        folder / _PICTURE,
        f"sweep of {recipe}",
        {label: sorted(line) for label, line in series.items()},
        x_label=first,
        y_label=curve.label,
        has_log_x=bool(points) and min(points) > 0,
    )


def _rank(outcome: VariantOutcome, curve: Curve) -> float:
    if outcome.score is None or math.isnan(outcome.score):
        return math.inf
    return -outcome.score if curve.rises else outcome.score
