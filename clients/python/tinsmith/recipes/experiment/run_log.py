"""What a recipe leaves behind and what it shows: `metrics.jsonl`, a picture, its progress, its end.

On a terminal the progress is a bar with the last metrics below it. Anywhere else it is lines: the
first and the last step, and one every few seconds. The picture is drawn anew on the way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from tinsmith.errors import ConfigurationError
from tinsmith.names import shorten
from tinsmith.recipes.experiment.curves import describe_picture
from tinsmith.recipes.experiment.experiment import Experiment
from tinsmith.recipes.experiment.health import Health
from tinsmith.recipes.experiment.json_files import write_lines
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.pictures import Picture
from tinsmith.recipes.experiment.resume import ResumableRun
from tinsmith.recipes.experiment.trackers import TrackedRun, Tracker, open_trackers
from tinsmith.settings import resolve_settings
from tinsmith.training.run_forms import TrainingRun

METRICS = "metrics.jsonl"

_LINE_INTERVAL_S = 5.0
"""Between lines of progress where there is no terminal."""
PICTURE_INTERVAL_S = 10.0
"""Between pictures: one takes half a second, in which no step is sent."""


class _Bar(Progress):
    """A bar, and a line of metrics below it: beside it they would crush it."""

    def get_renderables(self) -> Iterable[rich.console.RenderableType]:
        """Return what is drawn."""
        yield from super().get_renderables()
        for task in self.tasks:
            yield Text(task.fields["metrics"], no_wrap=True, overflow="ellipsis")


class RunLog(AbstractContextManager["RunLog"]):
    """Writes one line of metrics for each step and shows the progress.

    Args:
        directory: Where `metrics.jsonl` goes; lines of an earlier part of the run are kept up to
            `first_step`.
        title: What the progress bar says.
        num_steps: Steps in all.
        first_step: Steps that an earlier part of the run did.
        observer: Told of each step, in the place of a progress bar.
        run: Has the server keep the metrics too, which never holds up a step.
        trackers: Get the metrics too.
        picture: What is drawn.
        is_found: Whether commands find the server by themselves, and a next one can be named.

    Attributes:
        health: Finds steps that teach nothing.
    """

    def __init__(
        self,
        directory: Path,
        *,
        title: str,
        num_steps: int,
        first_step: int = 0,
        observer: Observer | None = None,
        run: TrainingRun | None = None,
        trackers: Sequence[Tracker] = (),
        picture: Picture | None = None,
        is_found: bool = True,
    ) -> None:
        self._run = run
        self._trackers = trackers
        self._num_steps = num_steps
        self._observer = observer or Observer()
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / METRICS
        self.rows = [row for row in read_metrics(self._path) if row["step"] < first_step]
        write_lines(self._path, self.rows)
        self._file = self._path.open("a", encoding="utf-8")
        self._begin_s = time.monotonic()
        self._names_next = observer is None and is_found
        self._picture = picture
        self._scored: list[tuple[int, Mapping[str, float]]] = []
        self._drawn_s = self._begin_s
        self.health = Health(self.say)
        self._console = rich.console.Console()
        self._shows_lines = observer is None and not self._console.is_terminal
        self._line_s = float("-inf")
        self._progress = _Bar(
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            # The one that gives way where the terminal is narrow.
            TextColumn("{task.description}", table_column=Column(overflow="ellipsis", ratio=1)),
            console=self._console,
            disable=observer is not None or not self._console.is_terminal,
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
        for tracker in self._trackers:
            tracker.close()

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
        if self._run is not None:
            self._run.log_metrics(metrics, step=step)
        for tracker in self._trackers:
            tracker.log(metrics, step)
        shown = "  ".join(f"{key} {value:.3g}" for key, value in metrics.items())
        self._progress.update(self._task, completed=step + 1, metrics=shown)
        now_s = time.monotonic()
        is_due = now_s - self._line_s >= _LINE_INTERVAL_S or step + 1 == self._num_steps
        if self._shows_lines and is_due:
            self._line_s = now_s
            self.say(f"step {step + 1}/{self._num_steps}  {shown}")
        if now_s - self._drawn_s >= PICTURE_INTERVAL_S:
            self._draw_on_the_way()
        self._observer.step_done(step + 1, self._num_steps, metrics)

    def say_begin(self, *lines: str) -> None:
        """Print what begins."""
        for line in lines:
            self.say(line)

    def note_scores(self, num_done: int, metrics: Mapping[str, float]) -> None:
        """Note scores of what was held out that belong to no step; the picture has them too."""
        self._scored.append((num_done, metrics))

    def _draw_on_the_way(self) -> None:
        """Draw the picture; a training does not end for want of one."""
        try:
            self._draw()
        except Exception as error:
            self._drawn_s = time.monotonic()
            self.say(f"the picture cannot be drawn: {type(error).__name__}: {error}")

    def _draw(self) -> Path | None:
        """Draw the picture, if there is one to draw."""
        if self._picture is None:
            return None
        path = self._picture.draw(self._path.parent, self.rows, self._scored)
        self._drawn_s = time.monotonic()
        return path

    def say_end(self, results: Sequence[str], run: str, checkpoint: str) -> None:
        """Print what came out, where it is, and what to do next."""
        picture = describe_picture(self._draw())
        for line in (
            *results,
            f"run         {run}",
            f"checkpoint  {checkpoint}",
            f"metrics     {self._path}",
            f"picture     {picture}",
            *(
                [f'next        tinsmith sample --checkpoint {shorten(checkpoint)} "a prompt"']
                * self._names_next
            ),
        ):
            self.say(line)

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._show(Text(f"{self._observer.label}{text}"))

    def show(self, title: str, text: Text) -> None:
        """Print a text below a title: in its colours on a terminal, else plain."""
        self.say(title)
        self._show(text)

    def _show(self, text: Text) -> None:
        """Print a text, above the bar if there is one."""
        if self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
            return
        # Rich prints a line twice that Ctrl-C finds half printed.
        self._console.file.write(f"{text.plain}\n")
        self._console.file.flush()


def open_log(
    experiment: Experiment,
    config: Any,
    title: str,
    progress: ResumableRun,
    observer: Observer | None,
    picture: Picture,
) -> RunLog:
    """Return the log of a run that begins or goes on in the folder of an experiment.

    Args:
        experiment: Whose folder it is.
        config: Settings of the recipe.
        title: What the progress bar says.
        progress: What is trained, and where it stands.
        observer: Of a job.
        picture: What is drawn.

    Raises:
        ConfigurationError: If a tracker cannot be opened.
    """
    run, first_step = progress.run, progress.first_step
    tracked = TrackedRun(
        run.name.rpartition("/")[2], title, experiment.folder, experiment.settings, first_step
    )
    return RunLog(
        experiment.folder,
        title=title,
        num_steps=config.num_steps,
        first_step=first_step,
        observer=observer,
        run=run,
        trackers=open_trackers(config.log_to, tracked),
        picture=picture,
        is_found=_is_found(progress.address),
    )


def _is_found(address: str) -> bool:
    """Return whether commands use a server unless they are told otherwise."""
    try:
        return resolve_settings().address == address
    except ConfigurationError:
        return False


def say_finished(experiment: Experiment, results: Sequence[str]) -> None:
    """Say that an experiment ended earlier, and what came out."""
    console = rich.console.Console()
    lines = [
        f"finished: {experiment.folder} holds this experiment, and there is nothing left to do",
        *results,
        "--overwrite trains it anew; a larger num_steps goes on from its end",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the rows of a `metrics.jsonl`; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
