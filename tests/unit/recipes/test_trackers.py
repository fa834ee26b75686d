"""Metrics go to trackers as their documentation has it, and to files of the experiment.

The packages are not installed here: modules with their documented interfaces stand in for them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.recipes import dpo, rl, supervised
from tinsmith.recipes.experiment.run_log import RunLog
from tinsmith.recipes.experiment.trackers import TrackedRun, open_trackers

Calls = list[tuple[Any, ...]]


class FakeWriter:
    """`tensorboardX.SummaryWriter`."""

    def __init__(self, calls: Calls, logdir: str, purge_step: int) -> None:
        self._calls = calls
        calls.append(("open", logdir, purge_step))

    def add_text(self, tag: str, text: str) -> None:
        """Note a text."""
        self._calls.append(("text", tag, text))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Note a value."""
        self._calls.append(("scalar", tag, value, step))

    def close(self) -> None:
        """Note the end."""
        self._calls.append(("close",))


class FakeRun:
    """What `wandb.init` and `trackio.init` return."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Note the metrics of a step."""
        self._calls.append(("log", metrics, step))

    def finish(self) -> None:
        """Note the end."""
        self._calls.append(("finish",))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Install the packages; return what they are told."""
    noted: Calls = []

    def init(**arguments: Any) -> FakeRun:
        noted.append(("init", arguments))
        return FakeRun(noted)

    tensorboard = SimpleNamespace(
        SummaryWriter=lambda logdir, purge_step: FakeWriter(noted, logdir, purge_step)
    )
    monkeypatch.setitem(sys.modules, "tensorboardX", tensorboard)
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init))
    return noted


def log_two_steps(folder: Path, log_to: str, first_step: int = 0) -> None:
    run = TrackedRun("run-1", "supervised chat", folder, {"rank": 8}, first_step)
    trackers = open_trackers(log_to, run)
    with RunLog(folder, title="t", num_steps=2, trackers=trackers) as log:
        log.add(0, {"loss": 2.0})
        log.add(1, {"loss": 1.0})


def test_tensorboard_gets_a_folder_and_a_scalar_for_each_metric(
    tmp_path: Path, calls: Calls
) -> None:
    log_two_steps(tmp_path, "tensorboard", first_step=4)
    assert calls == [
        ("open", str(tmp_path / "tensorboard"), 4),
        ("text", "config", "    rank=8"),
        ("scalar", "loss", 2.0, 0),
        ("scalar", "loss", 1.0, 1),
        ("close",),
    ]


@pytest.mark.parametrize(
    ("log_to", "expected"),
    [
        (
            "wandb:mine",
            {"project": "mine", "id": "run-1", "name": "supervised chat", "reinit": "create_new"},
        ),
        ("trackio", {"project": "tinsmith", "name": "run-1"}),
    ],
)
def test_a_run_of_wandb_or_trackio_goes_on_under_its_name(
    tmp_path: Path, calls: Calls, log_to: str, expected: dict[str, Any]
) -> None:
    log_two_steps(tmp_path, log_to)
    kind, arguments = calls[0]
    assert kind == "init"
    assert expected.items() <= arguments.items()
    assert (arguments["config"], arguments["resume"]) == ({"rank": 8}, "allow")
    assert calls[1:] == [("log", {"loss": 2.0}, 0), ("log", {"loss": 1.0}, 1), ("finish",)]


def test_several_trackers_get_the_same(tmp_path: Path, calls: Calls) -> None:
    log_two_steps(tmp_path, "tensorboard, trackio:p")
    assert [call[0] for call in calls].count("scalar") == [call[0] for call in calls].count("log")


@pytest.mark.parametrize("recipe", [supervised, dpo, rl])
def test_what_is_not_installed_or_not_known_is_refused_before_anything_is_made(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match="not installed; pip install wandb"):
        recipe.Config(log_to="wandb")
    with pytest.raises(ConfigurationError, match="log_to is 'mlflow'; give some of tensorboard"):
        recipe.Config(log_to="mlflow")
