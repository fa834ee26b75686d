"""A sweep splits a command into variants, runs them at once, and compares how they ended."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.recipes import supervised
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.run_log import METRICS
from tinsmith.recipes.sweep import MAX_VARIANTS, Sweep, read_axes, run_sweep

TIMEOUT_S = 60.0
CLIENT: Any = None


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_sweep(*words: str, module: ModuleType = supervised) -> Sweep:
    axes, rest = read_axes(module.Config, words)
    return Sweep("supervised", module, axes, rest)


def test_numbers_with_commas_are_axes_and_other_commas_are_not() -> None:
    axes, rest = read_axes(
        supervised.Config,
        ["learning_rate=1e-3, 1e-2", "rank=8,8,16", "data=a,b.jsonl", "batch_size=4", "what"],
    )
    assert axes == {"learning_rate": ["1e-3", "1e-2"], "rank": ["8", "16"]}
    assert rest == ["data=a,b.jsonl", "batch_size=4", "what"]


def test_every_combination_is_a_variant_with_a_folder_of_its_own() -> None:
    sweep = make_sweep("learning_rate=1e-3,1e-2", "rank=8,16", "data=chat.jsonl")
    variants = sweep.variants()
    assert [(v.config.learning_rate, v.config.rank) for v in variants] == [
        (1e-3, 8),
        (1e-3, 16),
        (1e-2, 8),
        (1e-2, 16),
    ]
    folders = [variant.config.output_dir for variant in variants]
    assert folders[0].name == "learning_rate=1e-3,rank=8"
    assert len(set(folders)) == 4
    assert folders[0].parent.name.startswith("sweep-supervised-chat-")
    # The same command finds its folders again; another one does not.
    again = make_sweep("data=chat.jsonl", "learning_rate=1e-3,1e-2", "rank=8,16", "overwrite=true")
    assert [variant.config.output_dir for variant in again.variants()] == folders
    other = make_sweep("learning_rate=1e-3,1e-2", "rank=8,16", "data=chat.jsonl", "seed=1")
    assert other.variants()[0].config.output_dir not in folders
    named = make_sweep("learning_rate=1e-3,1e-2", "output_dir=mine")
    assert named.variants()[0].config.output_dir == Path("mine/learning_rate=1e-3")


def test_what_cannot_be_swept_is_refused_before_anything_runs() -> None:
    values = ",".join(map(str, range(1, MAX_VARIANTS + 2)))
    with pytest.raises(ConfigurationError, match="65 variants are more than a sweep may have, 64"):
        make_sweep(f"batch_size={values}").variants()
    with pytest.raises(ConfigurationError, match=r"rank is 1000; give a whole number"):
        make_sweep("rank=8,1000").variants()


class Recipe:
    """A recipe whose loss is least at a rate of 1e-2; all variants meet before the first step.

    Args:
        num_variants: How many meet; a sweep that ran them one by one would never come on.
    """

    def __init__(self, num_variants: int) -> None:
        self._meeting = threading.Barrier(num_variants, timeout=TIMEOUT_S)
        self.stopped: list[float] = []

    def run(self, config: supervised.Config, client: Any, observer: Observer) -> None:
        """Write metrics as a recipe does."""
        del client
        assert config.learning_rate is not None
        assert config.output_dir is not None
        self._meeting.wait()
        if config.seed:
            raise ConfigurationError("nothing to train on")
        config.output_dir.mkdir(parents=True, exist_ok=True)
        distance = abs(config.learning_rate - 1e-2)
        rows = [{"step": step, "loss": distance + 1 / (step + 1)} for step in range(20)]
        (config.output_dir / METRICS).write_text("\n".join(map(json.dumps, rows)))
        observer.began("run", 0)
        for step in range(len(rows)):
            try:
                observer.step_done(step + 1, len(rows), rows[step])
            except KeyboardInterrupt:
                self.stopped.append(config.learning_rate)
                raise


def test_variants_run_at_once_and_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = make_sweep("learning_rate=1e-3,1e-2,3e-2", "rank=8,16", "output_dir=out")
    outcomes = run_sweep(sweep, CLIENT, Recipe(6).run)
    best = min(outcomes, key=lambda outcome: outcome.score or 0)
    assert best.values["learning_rate"] == "1e-2"
    # The mean of the last two of twenty steps.
    assert best.score == pytest.approx((1 / 19 + 1 / 20) / 2)
    rows = json.loads(Path("out/sweep.json").read_text())
    assert [row["rank"] for row in rows] == ["8", "16"] * 3
    assert Path("out/sweep.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert table.index("1e-2") < table.index("1e-3")
    assert "out/sweep.png" in table


def test_a_variant_that_fails_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = make_sweep("learning_rate=1e-2,3e-2", "seed=0,1", "output_dir=out")
    with pytest.raises(ConfigurationError, match="nothing to train on"):
        run_sweep(sweep, CLIENT, Recipe(4).run)
    rows = json.loads(Path("out/sweep.json").read_text())
    assert [row["loss"] is None for row in rows] == [False, True, False, True]
    assert rows[1]["error"] == "nothing to train on"
    assert "nothing to train on" in capsys.readouterr().out


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Raise Ctrl-C in the thread that waits for the variants, once; set the event by then."""
    happened = threading.Event()
    join = threading.Thread.join

    def interrupt(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout is not None and not happened.is_set():
            happened.set()
            raise KeyboardInterrupt
        join(thread, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupt)
        yield happened


def test_ctrl_c_stops_every_variant_behind_a_step(interrupted: threading.Event) -> None:
    sweep = make_sweep("learning_rate=1e-3,1e-2", "output_dir=out")
    recipe = Recipe(2)

    def run(config: supervised.Config, client: Any, observer: Any) -> None:
        # It is stopped while it runs, not before.
        assert interrupted.wait(TIMEOUT_S)
        assert observer.should_stop.wait(TIMEOUT_S)
        recipe.run(config, client, observer)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, CLIENT, run)
    assert sorted(recipe.stopped) == [1e-3, 1e-2]


def test_settings_of_a_variant_are_those_of_the_recipe() -> None:
    [first, _] = make_sweep("learning_rate=1e-3,1e-2", "batch_size=4").variants()
    assert first.config == dataclasses.replace(
        supervised.Config(learning_rate=1e-3, batch_size=4), output_dir=first.config.output_dir
    )
