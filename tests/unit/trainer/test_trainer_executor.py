"""From operations to engine calls and back, on an engine that does what the test says."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tests.fakes.live_runs import RUN, TOKENS, make_run

from tinsmith_engine import AdamParams, BatchResult, Engine, OptimStepResult
from tinsmith_runtime.errors import NoGradientError, NonFiniteLossError, TinsmithError
from tinsmith_trainer.execution.engine_calls import (
    SliceResult,
    Steps,
    apply_steps,
    note_batches,
    request_of,
)
from tinsmith_trainer.execution.slices import Slice
from tinsmith_trainer.runs.accumulation import Accumulation
from tinsmith_trainer.runs.operations import ForwardWork, OptimStepWork

OTHER = "projects/p/trainingRuns/other"


class FakeEngine:
    """Answers each step with what the test says."""

    def __init__(self, **answers: TinsmithError) -> None:
        self.answers = answers
        self.calls: list[list[str]] = []
        self.cleared: list[str] = []

    def optim_steps(self, steps: Any) -> list[Any]:
        self.calls.append([run for run, _ in steps])
        default = OptimStepResult(version=1, metrics={})
        return [self.answers.get(run.rpartition("/")[2], default) for run, _ in steps]

    def clear_gradient(self, run: str) -> None:
        self.cleared.append(run)


def result_of(letters: str, failures: tuple[int, ...] = (), first: int = 1) -> SliceResult:
    run = make_run(letters, first)
    return SliceResult(Slice(run, list(run.queue.values())), Accumulation(tuple(failures)))


def scored() -> BatchResult:
    return BatchResult([], {"loss:sum": 0.0})


def bad_loss() -> NonFiniteLossError:
    return NonFiniteLossError("the loss is NaN", run=RUN)


def step(observed: int = 0) -> OptimStepWork:
    return OptimStepWork(AdamParams(), observed)


def apply(engine: FakeEngine, steps: Steps) -> Any:
    return apply_steps(cast(Engine, engine), steps)


def test_answers_go_to_the_slices_whose_batches_were_sent() -> None:
    results = [result_of("bfo"), result_of("s"), result_of("b")]
    answers = [scored(), bad_loss(), scored()]
    note_batches(results, answers, duration_s=3.0)
    found = [[(e.operation.sequence_number, e.answer) for e in r.computed] for r in results]
    assert found == [[(1, answers[0]), (2, answers[1])], [], [(1, answers[2])]]
    assert [result.duration_s for result in results] == [2.0, 0.0, 1.0]


def test_an_answer_too_many_is_a_bug() -> None:
    with pytest.raises(ValueError, match="zip"):
        note_batches([result_of("b")], [scored(), scored()], 1.0)


def test_a_failed_gradient_fails_the_accumulation_and_a_failed_forward_does_not() -> None:
    result = result_of("bfb", failures=(9,), first=10)
    note_batches([result], [bad_loss(), bad_loss(), scored()], 1.0)
    assert result.accumulation == Accumulation((9, 10), 0)


@pytest.mark.parametrize("answer", [OptimStepResult(1, {}), NoGradientError("none"), bad_loss()])
def test_a_step_ends_the_accumulation_whatever_became_of_it(answer: Any) -> None:
    result = result_of("bo", failures=(1,))
    note_batches([result], [scored()], 1.0)
    assert not result.is_boundary
    result.note(result.slice.operations[1], answer, 1.0)
    assert (result.accumulation, result.is_boundary) == (Accumulation(), True)
    assert result.duration_s == 2.0


@pytest.mark.parametrize(("observed", "is_incomplete"), [(0, True), (6, True), (7, False)])
def test_a_step_behind_a_failure_needs_to_have_seen_it(observed: int, is_incomplete: bool) -> None:
    engine, steps = FakeEngine(), Steps()
    steps.add(RUN, step(observed), Accumulation((6, 7)), 0)
    answer = apply(engine, steps)[RUN]
    assert isinstance(answer, TinsmithError) == is_incomplete
    assert engine.cleared == ([RUN] if is_incomplete else [])
    assert engine.calls == ([] if is_incomplete else [[RUN]])
    if isinstance(answer, TinsmithError):
        wanted = {"run": RUN, "failed": "6" if observed == 0 else "7"}
        assert (answer.reason, answer.metadata) == ("GRADIENT_INCOMPLETE", wanted)


def test_steps_of_all_runs_are_one_call_and_failures_clear_their_own_gradient() -> None:
    engine, steps = FakeEngine(other=bad_loss()), Steps()
    steps.add(RUN, step(), Accumulation(), 0)
    steps.add(OTHER, step(), Accumulation(), 0)
    steps.add("projects/p/trainingRuns/incomplete", step(), Accumulation((1,)), 0)
    answers = apply(engine, steps)
    assert engine.calls == [[RUN, OTHER]]
    assert isinstance(answers[RUN], OptimStepResult)
    assert sorted(engine.cleared) == ["projects/p/trainingRuns/incomplete", OTHER]


def test_a_request_carries_the_split_of_the_plan() -> None:
    [operation] = make_run("b").queue.values()
    assert isinstance(operation.work, ForwardWork)
    assert request_of(RUN, operation.work).micro_batch_tokens is None
    request = request_of(RUN, operation.work, micro_batch_tokens=512)
    assert (request.run, request.micro_batch_tokens, request.is_backward) == (RUN, 512, True)
    assert sum(datum.tokens_T.size for datum in request.batch) == TOKENS
