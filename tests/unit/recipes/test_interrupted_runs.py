"""What Ctrl-C says: at once what is saved, and the truth if it is pressed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tinsmith.recipes.experiment import resume
from tinsmith.recipes.experiment.resume import ResumableRun


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> ResumableRun:
    run = SimpleNamespace(name="run-1")
    monkeypatch.setattr(resume, "create_run", lambda *_: run)
    monkeypatch.setattr(resume, "save_named", lambda *_: "run-1/checkpoints/c")
    experiment: Any = SimpleNamespace(
        state=None, fingerprint="", weights="", begin=lambda _: None, save=lambda _: None
    )
    config: Any = SimpleNamespace(overwrite=False, num_steps=9, begin_from="")
    client: Any = SimpleNamespace()
    return ResumableRun(config, client, experiment)


def interrupt(progress: ResumableRun, step: int, *, saves: bool) -> list[str]:
    said: list[str] = []

    def work() -> None:
        with progress.explained(said.append):
            if step:
                progress.begin_last_save(step, said.append)
            if saves:
                progress.save(step)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    return said


def test_before_the_first_step_there_is_nothing_to_save(progress: ResumableRun) -> None:
    assert interrupt(progress, 0, saves=False) == [
        "stopped before the first step; there is nothing to save"
    ]


def test_what_was_trained_is_saved(progress: ResumableRun) -> None:
    assert interrupt(progress, 3, saves=True) == [
        "saving after step 3; Ctrl-C again gives it up, with all that was trained so far",
        "saved after step 3; the same command goes on",
    ]


def test_a_second_one_says_what_is_lost(progress: ResumableRun) -> None:
    assert interrupt(progress, 3, saves=False)[1] == (
        "stopped before step 3 was saved: lost is all that was trained so far"
    )
    progress.save(4)
    assert interrupt(progress, 6, saves=False) == [
        "saving after step 6; Ctrl-C again gives it up, with all that was trained since step 4",
        "stopped before step 6 was saved: lost is all that was trained since step 4; "
        "the same command goes on",
    ]
