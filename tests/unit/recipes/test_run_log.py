"""What a recipe shows while it runs and at its end, on a terminal and without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tinsmith.recipes.experiment.observer import Observer
from tinsmith.recipes.experiment.run_log import RunLog

METRICS = {"loss": 0.0241, "grad_norm": 0.00279, "learning_rate": 0.00535}
CHECKPOINT = "projects/default/trainingRuns/run-1/checkpoints/final"


def run(folder: Path, *, num_steps: int = 4, observer: Observer | None = None) -> None:
    log = RunLog(
        folder, title="supervised a-long-name.jsonl", num_steps=num_steps, observer=observer
    )
    with log:
        for step in range(num_steps):
            log.add(step, METRICS)
        log.plot("a", "loss", y_label="loss")
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
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run(tmp_path)
    assert "picture     none: matplotlib is not installed" in capsys.readouterr().out
