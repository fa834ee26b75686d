"""Where metrics go besides the folder: TensorBoard, Weights & Biases, trackio.

`log_to=tensorboard`, `log_to=wandb:PROJECT`, `log_to=trackio:PROJECT`, or several with commas. None
of them is a dependency: each is imported when it is asked for. A run that goes on after Ctrl-C goes
on in the same curve.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tinsmith.errors import ConfigurationError

_DEFAULT_PROJECT = "tinsmith"


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told about a run.

    Attributes:
        name: Id of the run, the same after a restart.
        title: What it is called.
        folder: Of the experiment.
        settings: Of the experiment.
        first_step: Steps that an earlier part did.
    """

    name: str
    title: str
    folder: Path
    settings: Mapping[str, Any]
    first_step: int


class Tracker(Protocol):
    """Gets the metrics of each step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Note the metrics of a step."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class _TensorBoard:
    """Event files below the folder of the experiment, by tensorboardX."""

    def __init__(self, module: Any, project: str, run: TrackedRun) -> None:
        del project
        # What was logged behind the save that the run goes on from is taken back.
        self._writer = module.SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=run.first_step
        )
        self._writer.add_text("config", "\n".join(f"    {k}={v}" for k, v in run.settings.items()))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandbLike:
    """A run of Weights & Biases, or of trackio, which has the same interface."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _open_wandb(module: Any, project: str, run: TrackedRun) -> Tracker:
    return _WandbLike(
        module.init(
            project=project,
            id=run.name,
            name=run.title,
            dir=str(run.folder),
            config=dict(run.settings),
            resume="allow",
            # The variants of a sweep are runs of one process.
            reinit="create_new",
        )
    )


def _open_trackio(module: Any, project: str, run: TrackedRun) -> Tracker:
    return _WandbLike(
        module.init(project=project, name=run.name, config=dict(run.settings), resume="allow")
    )


_TRACKERS: Mapping[str, tuple[str, Callable[[Any, str, TrackedRun], Tracker]]] = {
    "tensorboard": ("tensorboardX", _TensorBoard),
    "wandb": ("wandb", _open_wandb),
    "trackio": ("trackio", _open_trackio),
}
"""By word: the package, and what opens it."""


def check_trackers(log_to: str) -> None:
    """Refuse trackers that cannot be opened, before anything is made on the server.

    Raises:
        ConfigurationError: If a word names none, or its package is not installed.
    """
    for word, _ in _words(log_to):
        _import(word)


def open_trackers(log_to: str, run: TrackedRun) -> list[Tracker]:
    """Return the trackers of a run.

    Raises:
        ConfigurationError: As `check_trackers`.
    """
    return [_TRACKERS[word][1](_import(word), project, run) for word, project in _words(log_to)]


def _words(log_to: str) -> list[tuple[str, str]]:
    """Return each tracker with its project."""
    found = []
    for part in filter(None, (part.strip() for part in log_to.split(","))):
        word, _, project = part.partition(":")
        if word not in _TRACKERS:
            raise ConfigurationError(
                f"log_to is {log_to!r}",
                remedy=f"give some of {', '.join(_TRACKERS)}, with commas, as wandb:PROJECT",
            )
        found.append((word, project or _DEFAULT_PROJECT))
    return found


def _import(word: str) -> Any:
    package = _TRACKERS[word][0]
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigurationError(
            f"log_to={word} needs {package}, which is not installed",
            remedy=f"pip install {package}",
        ) from error
