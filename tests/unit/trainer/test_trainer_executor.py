"""What becomes of a slice, on an engine that does what the test says."""

from __future__ import annotations

from typing import Any, cast

import pytest

from tinsmith_engine import AdamParams, Engine, ForwardResult, OptimStepResult
from tinsmith_runtime.errors import NoGradientError, NonFiniteLossError, OutOfMemoryError
from tinsmith_trainer.executor import SliceResult, compute_slice
from tinsmith_trainer.work import ForwardWork, OptimStepWork, SaveCheckpointWork, Work

RUN = "projects/p/trainingRuns/r"


class FakeEngine:
    """Counts gradients; each call raises the next error of its kind, if there is one."""

    def __init__(self, **errors: list[BaseException | None]) -> None:
        self.errors = errors
        self.num_gradients = 0
        self.steps: list[int] = []
        self.num_cleared = 0

    def _fail(self, kind: str) -> None:
        queue = self.errors.get(kind)
        error = queue.pop(0) if queue else None
        if error is not None:
            raise error

    def version(self, run: str) -> int:
        return len(self.steps)

    def forward(self, *_: Any) -> ForwardResult:
        self._fail("forward")
        return ForwardResult([], {"loss:sum": 0.0})

    def forward_backward(self, *_: Any) -> ForwardResult:
        self._fail("backward")
        self.num_gradients += 1
        return ForwardResult([], {"loss:sum": float(self.num_gradients)})

    def optim_step(self, *_: Any) -> OptimStepResult:
        self._fail("step")
        self.steps.append(self.num_gradients)
        self.num_gradients = 0
        return OptimStepResult(version=len(self.steps), metrics={})

    def clear_gradient(self, _: str) -> None:
        self.num_cleared += 1
        self.num_gradients = 0


def forward(*, is_backward: bool) -> ForwardWork:
    return ForwardWork([], "cross_entropy", {}, is_backward)


def step(observed: int = 0) -> OptimStepWork:
    return OptimStepWork(AdamParams(), observed)


BACKWARD, FORWARD = forward(is_backward=True), forward(is_backward=False)


def compute(
    engine: FakeEngine, *works: Work, first: int = 1, failures: tuple[int, ...] = ()
) -> SliceResult:
    operations = list(enumerate(works, first))
    return compute_slice(cast(Engine, engine), RUN, operations, failures)


def reasons(result: SliceResult) -> list[str]:
    return [entry.error.reason if entry.error else "" for entry in result.computed]


def bad_loss() -> NonFiniteLossError:
    return NonFiniteLossError("the loss is NaN", run=RUN)


def test_a_slice_is_computed_in_order() -> None:
    engine = FakeEngine()
    result = compute(engine, BACKWARD, FORWARD, BACKWARD, step(), first=5)
    assert [entry.sequence_number for entry in result.computed] == [5, 6, 7, 8]
    assert [entry.version for entry in result.computed] == [0, 0, 0, 1]
    assert engine.steps == [2]
    assert (reasons(result), result.failures, result.is_state_lost) == ([""] * 4, [], False)


@pytest.mark.parametrize(
    ("observed", "wanted"),
    [(0, "GRADIENT_INCOMPLETE"), (1, "GRADIENT_INCOMPLETE"), (2, ""), (9, "")],
)
def test_a_step_behind_a_failure_needs_to_have_seen_it(observed: int, wanted: str) -> None:
    engine = FakeEngine(backward=[None, bad_loss()])
    result = compute(engine, BACKWARD, BACKWARD, step(observed))
    assert reasons(result) == ["", "NON_FINITE_LOSS", wanted]
    assert engine.steps == ([1] if not wanted else [])
    assert engine.num_cleared == bool(wanted)
    error = result.computed[2].error
    if error is not None:
        assert error.metadata == {"run": RUN, "failed": "2"}
    assert result.failures == []


def test_failures_of_earlier_slices_count() -> None:
    result = compute(FakeEngine(), BACKWARD, step(observed=6), first=8, failures=(6, 7))
    error = result.computed[1].error
    assert error is not None
    assert error.metadata["failed"] == "7"


def test_failures_are_handed_on_to_the_next_slice() -> None:
    earlier = [1]
    result = compute(FakeEngine(backward=[bad_loss()]), BACKWARD, BACKWARD, first=2, failures=(1,))
    assert (result.failures, earlier) == ([1, 2], [1])


def test_a_failed_forward_is_no_part_of_the_gradient() -> None:
    engine = FakeEngine(forward=[OutOfMemoryError("too large")])
    result = compute(engine, BACKWARD, FORWARD, step())
    assert reasons(result) == ["", "OUT_OF_MEMORY", ""]
    assert engine.steps == [1]


@pytest.mark.parametrize("error", [NoGradientError("none"), bad_loss()])
def test_a_step_ends_the_accumulation_whatever_became_of_it(error: Exception) -> None:
    engine = FakeEngine(backward=[bad_loss()], step=[error])
    result = compute(engine, BACKWARD, step(observed=1), BACKWARD, step())
    assert reasons(result)[1:] == [error.reason, "", ""]  # type: ignore[attr-defined]
    assert result.failures == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(RuntimeError("bug: prompt was [1, 2]"), "INTERNAL", id="bug"),
        pytest.param(MemoryError(), "OUT_OF_MEMORY", id="memory"),
        pytest.param(RuntimeError("CUDA out of memory. Tried"), "OUT_OF_MEMORY", id="cuda"),
        pytest.param(RuntimeError("DefaultCPUAllocator: can't allocate memory"), "OUT_OF_MEMORY",
                     id="cpu"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["backward", "step"])
def test_an_unexpected_error_loses_the_state_and_ends_the_slice(
    error: Exception, reason: str, kind: str
) -> None:
    engine = FakeEngine(**{kind: [error]})
    works = [BACKWARD, step(), BACKWARD] if kind == "step" else [BACKWARD, step()]
    result = compute(engine, *works)
    assert result.is_state_lost
    assert reasons(result) == ([reason] if kind == "backward" else ["", reason])
    assert result.failures == ([1] if kind == "backward" else [])
    last = result.computed[-1]
    assert last.version == 0
    assert last.error is not None
    assert "prompt" not in last.error.message


def test_what_is_not_computed_here_is_a_bug() -> None:
    result = compute(FakeEngine(), SaveCheckpointWork("c", "training", {}))
    assert (reasons(result), result.is_state_lost) == (["INTERNAL"], True)


def test_an_interrupt_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        compute(FakeEngine(backward=[KeyboardInterrupt()]), BACKWARD)
