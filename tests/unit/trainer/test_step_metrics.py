"""What optimizer steps measured, put together from the results of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinsmith_engine import AdamParams, BatchResult, OptimStepResult
from tinsmith_runtime.errors import GradientIncompleteError
from tinsmith_trainer.cycle.step_metrics import StepMeasurement, StepMetrics
from tinsmith_trainer.execution.engine_calls import Answer, Computed
from tinsmith_trainer.runs.operations import ForwardWork, OptimStepWork, Work


def computed(work: Work, answer: Answer, number: int = 1) -> Computed:
    operation = SimpleNamespace(work=work, sequence_number=number)
    return Computed(cast(Any, operation), answer, 0.1)


def part(metrics: Mapping[str, float], *, is_backward: bool = True) -> Computed:
    work = ForwardWork([], "ppo", {}, is_backward)
    datum = SimpleNamespace(tokens_T=SimpleNamespace(size=6), targets_T=[0] * 6)
    object.__setattr__(work, "batch", [datum, datum])
    return computed(work, BatchResult([], dict(metrics)))


def step(version: int, number: int = 1) -> Computed:
    work = OptimStepWork(AdamParams(learning_rate=0.5), None)
    return computed(work, OptimStepResult(version, {"grad_norm": 2.0}), number)


def test_means_are_over_the_tokens_of_all_parts() -> None:
    metrics = StepMetrics()
    metrics.note("r", [part({"loss:sum": 6.0, "num_loss_tokens:sum": 2.0, "entropy:mean": 1.0})])
    # What only looks is no part of the step.
    metrics.note("r", [part({"loss:sum": 9.0, "num_loss_tokens:sum": 1.0}, is_backward=False)])
    metrics.note(
        "r",
        [part({"loss:sum": 3.0, "num_loss_tokens:sum": 1.0, "entropy:mean": 4.0}), step(8, 21)],
    )
    (found,) = metrics.take(10)
    assert (found.run, found.step, found.sequence_number) == ("r", 7, 21)
    assert found.metrics == pytest.approx(
        {
            "loss": 3.0,
            "entropy": 2.0,
            "num_loss_tokens": 3.0,
            "sequence_length": 6.0,
            "grad_norm": 2.0,
            "learning_rate": 0.5,
        }
    )
    assert not metrics.take(10)


def test_a_step_that_failed_measures_nothing_and_ends_its_parts() -> None:
    metrics = StepMetrics()
    metrics.note("r", [part({"loss:sum": 6.0, "num_loss_tokens:sum": 2.0})])
    failed = GradientIncompleteError("a part failed")
    metrics.note("r", [computed(OptimStepWork(AdamParams(learning_rate=1.0), None), failed)])
    metrics.note("r", [part({"loss:sum": 1.0, "num_loss_tokens:sum": 1.0}), step(1)])
    (found,) = metrics.take(10)
    assert found.metrics["loss"] == 1.0


def test_what_was_not_taken_waits_and_what_was_repeated_is_there_once() -> None:
    metrics = StepMetrics()
    for version in (1, 2, 2, 3):
        metrics.note("r", [step(version)])
    taken = metrics.take(2)
    assert [each.step for each in taken] == [0, 1]
    metrics.put_back(taken)
    assert sorted(each.step for each in metrics.take(10)) == [0, 1, 2]


def test_a_step_that_was_made_again_is_not_taken_back() -> None:
    metrics = StepMetrics()
    older, newer = (
        StepMeasurement("r", 3, {"loss": loss}, number) for loss, number in [(1.0, 7), (2.0, 9)]
    )
    metrics.put_back([newer])
    metrics.put_back([older])
    assert metrics.take(10) == [newer]
