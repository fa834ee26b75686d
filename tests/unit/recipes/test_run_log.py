"""What a recipe shows while it runs and at its end, on a terminal and without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tinsmith.recipes.experiment.curves import Curve
from tinsmith.recipes.experiment.display import show_weights
from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.pictures import Picture
from tinsmith.recipes.experiment.run_log import RunLog
from tinsmith.types import Datum, ModelInput

METRICS = {"loss": 0.0241, "grad_norm": 0.00279, "learning_rate": 0.00535}
CHECKPOINT = "projects/default/trainingRuns/run-1/checkpoints/final"


def run(folder: Path, *, num_steps: int = 4, observer: Observer | None = None) -> None:
    log = RunLog(
        folder,
        title="supervised a-long-name.jsonl",
        num_steps=num_steps,
        observer=observer,
        picture=Picture("a", Curve("loss", "loss")),
    )
    with log:
        for step in range(num_steps):
            log.add(step, METRICS)
        log.say_end(["score: 0 -> 1"], "projects/default/trainingRuns/run-1", CHECKPOINT)


def test_without_a_terminal_progress_is_lines_of_which_the_first_comes_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1/4  loss 0.0241  grad_norm 0.00279  learning_rate 0.00535"
    assert lines[1].startswith("step 4/4  ")
    # One every few seconds in between.
    monkeypatch.setattr("tinsmith.recipes.experiment.run_log._LINE_INTERVAL_S", 0.0)
    run(tmp_path)
    assert [line[:8] for line in capsys.readouterr().out.splitlines()[:4]] == [
        f"step {step}/4" for step in (1, 2, 3, 4)
    ]


def test_a_job_prints_no_progress_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, observer=Observer())
    shown = capsys.readouterr().out
    assert "step " not in shown
    assert "next " not in shown


def test_a_training_does_not_end_for_want_of_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr("tinsmith.recipes.experiment.run_log.PICTURE_INTERVAL_S", 0.0)
    monkeypatch.setattr(Picture, "draw", fail)
    log = RunLog(tmp_path, title="a", num_steps=2, picture=Picture("a", Curve("loss", "loss")))
    with log:
        log.add(0, METRICS)
        log.add(1, METRICS)
    shown = capsys.readouterr().out
    assert "the picture cannot be drawn: OSError: no space left on device" in shown
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("width", [80, 60])
def test_on_a_terminal_the_step_is_never_crushed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", str(width))
    run(tmp_path, num_steps=240)
    shown = capsys.readouterr().out
    assert "240/240" in shown
    assert "loss 0.0241  grad_norm 0.00279" in shown


def test_the_end_says_where_everything_is_and_what_comes_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path)
    end = capsys.readouterr().out
    for said in (
        "score: 0 -> 1",
        "trainingRuns/run-1",
        CHECKPOINT,
        str(tmp_path / "metrics.jsonl"),
        str(tmp_path / "loss.png"),
        'tinsmith sample --checkpoint run-1/final "a prompt"',
    ):
        assert said in end
    # Not of a server that commands would have to be told of.
    with RunLog(tmp_path, title="t", num_steps=1, is_found=False) as log:
        log.say_end([], "run-1", CHECKPOINT)
    assert "tinsmith sample" not in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run(tmp_path)
    assert "picture     none: matplotlib is not installed" in capsys.readouterr().out


class Bytes:
    """A tokenizer of bytes."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of bytes."""
        del skip_special_tokens
        return bytes(tokens).decode()


def test_first_data_show_what_is_trained_on_with_colours_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list("2+3=5 é".encode())
    weights = np.array([0, 0, 0, 1, 1, -1, -1], np.float32)
    datum = Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": np.array(tokens[1:], np.int64), "weights": weights},
    )
    tokenizer: Any = Bytes()
    text = show_weights(tokenizer, datum)
    assert text.plain == "2+3=⟦5 ⟧⟦é⟧"
    styles = [text.get_style_at_offset(Console(), index).color for index in (0, 5, 9)]
    assert [style.name for style in styles if style] == ["yellow", "green", "red"]
    with RunLog(tmp_path, title="t", num_steps=1) as log:
        log.show("data:", text)
    assert capsys.readouterr().out == "data:\n2+3=⟦5 ⟧⟦é⟧\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    with RunLog(tmp_path, title="t", num_steps=1) as log:
        log.show("data:", text)
    assert "\x1b[" in capsys.readouterr().out


def test_what_a_variant_says_begins_with_its_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observer = Observer()
    observer.label = "rank=8: "
    with RunLog(tmp_path, title="t", num_steps=1, observer=observer) as log:
        log.say("begins")
    assert capsys.readouterr().out == "rank=8: begins\n"
