"""What a recipe leaves behind: `metrics.jsonl`, a curve, and a progress bar while it runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tinsmith.recipes.observer import Observer

METRICS = "metrics.jsonl"


class RunLog(AbstractContextManager["RunLog"]):
    """Writes one line of metrics for each step and shows the progress.

    Args:
        directory: Where `metrics.jsonl` goes; lines of an earlier part of the run are kept up to
            `first_step`.
        title: What the progress bar says.
        num_steps: Steps in all.
        first_step: Steps that an earlier part of the run did.
        observer: Told of each step, in the place of a progress bar.
    """

    def __init__(
        self,
        directory: Path,
        *,
        title: str,
        num_steps: int,
        first_step: int = 0,
        observer: Observer | None = None,
    ) -> None:
        self._num_steps = num_steps
        self._observer = observer or Observer()
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / METRICS
        self.rows = [row for row in read_metrics(self._path) if row["step"] < first_step]
        _write_lines(self._path, self.rows)
        self._file = self._path.open("a", encoding="utf-8")
        self._begin_s = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}"),
            disable=observer is not None,
        )
        self._task = self._progress.add_task(
            title, total=num_steps, completed=first_step, metrics=""
        )

    def __enter__(self) -> RunLog:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._file.close()

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step, counted from 0, and move the bar.

        Raises:
            KeyboardInterrupt: If the observer wants the recipe to save and stop.
        """
        row = {
            "step": step,
            "time_s": round(time.monotonic() - self._begin_s, 3),
            **{key: round(value, 6) for key, value in metrics.items()},
        }
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        shown = "  ".join(f"{key} {value:.3g}" for key, value in metrics.items())
        self._progress.update(self._task, completed=step + 1, metrics=shown)
        self._observer.step_done(step + 1, self._num_steps, metrics)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a `metrics.jsonl`; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def plot_curve(
    path: Path,
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    x_label: str = "step",
    y_label: str = "",
) -> bool:
    """Draw lines into a PNG; return False if matplotlib is not installed."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    try:
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    for label, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=label, linewidth=1.6)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _write_lines(path: Path, rows: Sequence[Mapping[str, float]]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    temporary.replace(path)
