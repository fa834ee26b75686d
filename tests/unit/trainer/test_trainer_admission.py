"""What is refused before it is stored, and the time to retry after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.fakes.live_runs import make_run, queued

from tinsmith_runtime.errors import ConfigError, QueueFullError
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.runs.queue_limits import Pace, QueueAdmission
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.run_queue import OperationSize

SIZE = OperationSize(num_tokens=100, num_bytes=10)


def make(**limits: Any) -> QueueAdmission:
    defaults = {"data_dir": Path(), "max_batch_tokens": 1}
    return QueueAdmission(TrainerConfig(**{**defaults, **limits}), Pace())


def run_of(project: str, name: str = "r") -> LiveRun:
    return make_run("", name=f"projects/{project}/trainingRuns/{name}")


def fill(
    admission: QueueAdmission, run: LiveRun, num_operations: int, size: OperationSize = SIZE
) -> None:
    for number in range(1, num_operations + 1):
        admission.admit(run, number, size)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_queued_operations": 3}, "3 operations of projects/p/trainingRuns/r wait"),
        ({"max_project_queued_operations": 3}, "3 operations of your project wait"),
        ({"max_queued_tokens": 399}, "300 tokens of projects/p/trainingRuns/r wait"),
        ({"max_project_queued_tokens": 399}, "300 tokens of your project wait"),
        ({"max_project_queued_bytes": 39}, "30 bytes of requests of your project wait"),
        ({"max_queued_bytes": 39}, "30 bytes of requests of all projects wait"),
    ],
)
def test_each_limit_refuses_what_is_too_much_and_counts_nothing(
    limits: dict[str, int], words: str
) -> None:
    admission = make(**limits)
    run = run_of("p")
    fill(admission, run, 3)
    for _ in range(2):
        with pytest.raises(QueueFullError, match=words) as refused:
            admission.admit(run, 3, SIZE)
        assert refused.value.retry_after_s is not None
    admission.release(run, SIZE)
    admission.admit(run, 3, SIZE)


@pytest.mark.parametrize("limit", ["max_project_queued_operations", "max_project_queued_tokens"])
def test_limits_of_a_project_hold_for_its_runs_together_and_for_nobody_else(limit: str) -> None:
    admission = make(**{limit: 3 if "operations" in limit else 300})
    fill(admission, run_of("p", "a"), 2)
    fill(admission, run_of("p", "b"), 1)
    with pytest.raises(QueueFullError, match="your project"):
        admission.admit(run_of("p", "c"), 1, SIZE)
    admission.admit(run_of("q"), 1, SIZE)


def test_a_number_far_ahead_is_refused_as_those_before_it_would_wait_too() -> None:
    admission = make(max_queued_operations=3)
    admission.admit(run_of("p"), 3, SIZE)
    with pytest.raises(QueueFullError) as refused:
        admission.admit(run_of("p"), 4, SIZE)
    assert refused.value.metadata["next_sequence_number"] == "1"


def test_the_number_that_others_wait_for_is_admitted_over_the_limit() -> None:
    admission = make(max_project_queued_operations=2)
    run = run_of("p")
    for number in (2, 3):
        admission.admit(run, number, SIZE)
        run.queue.accept(queued(number, "b"))
    with pytest.raises(QueueFullError):
        admission.admit(run_of("p", "other"), 1, SIZE)
    admission.admit(run, 1, SIZE)


def test_what_ended_leaves_nothing_behind() -> None:
    admission = make()
    fill(admission, run_of("p"), 2)
    assert set(admission.projects) == {"p"}
    for _ in range(2):
        admission.release(run_of("p"), SIZE)
    assert not admission.projects


def hint(admission: QueueAdmission, run: LiveRun, size: OperationSize = SIZE) -> float:
    with pytest.raises(QueueFullError) as refused:
        admission.admit(run, 1, size)
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


@pytest.mark.parametrize(
    ("pace", "num_projects", "wanted"),
    [
        pytest.param(0, 1, 1.0, id="not-measured-yet"),
        pytest.param(100, 1, 1.0, id="one-operation-of-100-tokens"),
        pytest.param(100, 3, 3.0, id="a-third-of-the-pace"),
        pytest.param(1e9, 1, 0.1, id="at-least"),
        pytest.param(1, 1, 30.0, id="at-most"),
    ],
)
def test_the_hint_is_the_time_in_which_room_comes(
    pace: float, num_projects: int, wanted: float
) -> None:
    measured = Pace()
    measured.note(int(pace), 1.0)
    config = TrainerConfig(data_dir=Path(), max_batch_tokens=1, max_queued_operations=4)
    admission = QueueAdmission(config, measured)
    fill(admission, run_of("p"), 4)
    for index in range(num_projects - 1):
        fill(admission, run_of(f"q{index}"), 1)
    assert hint(admission, run_of("p")) == pytest.approx(wanted)


def test_the_hint_of_a_token_limit_is_that_of_the_excess() -> None:
    measured = Pace()
    measured.note(100, 1.0)
    config = TrainerConfig(data_dir=Path(), max_batch_tokens=1, max_queued_tokens=400)
    admission = QueueAdmission(config, measured)
    fill(admission, run_of("p"), 4)
    assert hint(admission, run_of("p"), OperationSize(250, 1)) == pytest.approx(2.5)


def test_the_pace_follows_slowly_and_ignores_empty_cycles() -> None:
    pace = Pace()
    for num_tokens, duration_s in ((100, 1.0), (0, 5.0), (200, 1.0)):
        pace.note(num_tokens, duration_s)
    assert pace.tokens_per_s == pytest.approx(120)


@pytest.mark.parametrize("limit", ["max_queued_tokens", "max_project_queued_tokens"])
def test_a_limit_below_the_largest_batch_is_a_mistake(limit: str) -> None:
    with pytest.raises(ConfigError, match=limit):
        TrainerConfig(data_dir=Path(), max_batch_tokens=1000, **{limit: 999})  # type: ignore[arg-type]
