"""From operations to engine calls and back: what becomes of the slices of one cycle.

A cycle is a long job on the engine's thread: all batches of all slices by passes, then the
optimizer steps. Steps that came meanwhile are a call of their own. What fails is the operation, not
the run: an error comes back in the place of its result, and the engine leaves the run as the
error's meaning says. The one decision made here is whether a step may use its gradient: not if a
part of it failed unseen by the step's sender.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tinsmith_engine import (
    AdamParams,
    BatchRequest,
    BatchResult,
    Engine,
    OptimStepResult,
    Parts,
    timed,
)
from tinsmith_runtime.errors import GradientIncompleteError, TinsmithError
from tinsmith_trainer.execution.slices import Slice
from tinsmith_trainer.metrics import ENGINE_SECONDS
from tinsmith_trainer.runs.accumulation import Accumulation
from tinsmith_trainer.runs.operations import ForwardWork, OptimStepWork
from tinsmith_trainer.runs.run_queue import QueuedOperation

Answer = BatchResult | OptimStepResult | TinsmithError
"""What the engine says of one operation."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What became of one operation on the engine.

    Attributes:
        duration_s: Its part of the time of the engine's call, by tokens.
    """

    operation: QueuedOperation
    answer: Answer
    duration_s: float


@dataclass(slots=True)
class SliceResult:
    """What became of a slice so far.

    Attributes:
        accumulation: What became of the parts of the gradient, up to this point.
        computed: One entry for each operation that was computed, in order.
    """

    slice: Slice
    accumulation: Accumulation
    computed: list[Computed] = field(default_factory=list)

    @property
    def is_boundary(self) -> bool:
        """Whether the slice ended with an optimizer step."""
        return bool(self.computed) and isinstance(self.computed[-1].operation.work, OptimStepWork)

    @property
    def duration_s(self) -> float:
        """Time on the engine."""
        return sum(entry.duration_s for entry in self.computed)

    def note(self, operation: QueuedOperation, answer: Answer, duration_s: float) -> None:
        """Add what became of the next operation."""
        self.computed.append(Computed(operation, answer, duration_s))
        if isinstance(operation.work, OptimStepWork):
            # Whatever became of the step, the accumulation is over.
            self.accumulation = Accumulation()
        elif not is_gradient(operation):
            return
        elif isinstance(answer, TinsmithError):
            self.accumulation = self.accumulation.fail(operation.sequence_number)
        else:
            self.accumulation = self.accumulation.add_part(operation.record.seen_through)


def is_gradient(operation: QueuedOperation) -> bool:
    """Whether an operation adds to the gradient."""
    return isinstance(operation.work, ForwardWork) and operation.work.is_backward


def request_of(
    run: str, work: ForwardWork, *, micro_batch_tokens: int | None = None
) -> BatchRequest:
    """Return the engine's form of a batch."""
    return BatchRequest(
        run=run,
        batch=work.batch,
        loss=work.loss,
        loss_config=work.loss_config,
        is_backward=work.is_backward,
        micro_batch_tokens=micro_batch_tokens,
    )


def note_batches(
    results: Sequence[SliceResult],
    answers: Sequence[BatchResult | TinsmithError],
    duration_s: float,
) -> None:
    """Give each slice what the engine said of its batches, which were sent in this order."""
    batches = [
        (result, operation)
        for result in results
        for operation in result.slice.operations
        if isinstance(operation.work, ForwardWork)
    ]
    num_tokens = sum(operation.num_tokens for _, operation in batches)
    for (result, operation), answer in zip(batches, answers, strict=True):
        result.note(operation, answer, duration_s * operation.num_tokens / max(1, num_tokens))


def compute_slices(engine: Engine, results: Sequence[SliceResult]) -> Parts[float]:
    """Compute slices by passes, and with the last pass the optimizer steps that end them.

    Runs on the engine's thread; nothing else touches the results meanwhile.

    Returns:
        The seconds that it took, without what came between the passes.
    """
    requests = [
        request_of(result.slice.run.name, operation.work)
        for result in results
        for operation in result.slice.operations
        if isinstance(operation.work, ForwardWork)
    ]
    busy_s = 0.0
    if requests:
        answers, busy_s = yield from timed(engine.compute_by_pass(requests))
        ENGINE_SECONDS.labels("passes").inc(busy_s)
        note_batches(results, answers, busy_s)
    ending = [(result, result.slice.operations[-1]) for result in results]
    return busy_s + step_slices(
        engine, [one for one in ending if isinstance(one[1].work, OptimStepWork)]
    )


def step_slices(engine: Engine, ending: Sequence[tuple[SliceResult, QueuedOperation]]) -> float:
    """Apply the optimizer steps that end slices, and return how many seconds that took.

    Runs on the engine's thread.
    """
    steps = Steps()
    for result, step in ending:
        if isinstance(step.work, OptimStepWork):
            seen_through = step.record.seen_through
            steps.add(result.slice.run.name, step.work, result.accumulation, seen_through)
    begin_s = time.perf_counter()
    applied = apply_steps(engine, steps)
    duration_s = time.perf_counter() - begin_s
    ENGINE_SECONDS.labels("steps").inc(duration_s)
    for result, step in ending:
        result.note(step, applied[result.slice.run.name], duration_s / len(ending))
    return duration_s


@dataclass(slots=True)
class Steps:
    """The optimizer steps of a cycle: those to apply, and those that lack a part."""

    to_apply: dict[str, AdamParams] = field(default_factory=dict)
    incomplete: dict[str, GradientIncompleteError] = field(default_factory=dict)

    def add(
        self, run: str, work: OptimStepWork, accumulation: Accumulation, seen_through: int
    ) -> None:
        """Add the step of a run, with what became of its parts and what its sender could know."""
        unseen = accumulation.unseen_failures(work.observed_sequence_number, seen_through)
        if not unseen:
            self.to_apply[run] = work.adam
            return
        self.incomplete[run] = GradientIncompleteError(
            f"forward_backward {unseen[0]} of {run} failed before the sender of this optim_step "
            "had seen it; the gradient was cleared and the version kept, send the whole "
            "accumulation again",
            run=run,
            failed=unseen[0],
        )


def apply_steps(engine: Engine, steps: Steps) -> Mapping[str, OptimStepResult | TinsmithError]:
    """Apply the steps of a cycle, by run; runs on the engine's thread.

    A step that fails, for whatever reason, ends its accumulation: the gradient is cleared.
    """
    answers: dict[str, OptimStepResult | TinsmithError] = dict(steps.incomplete)
    if steps.to_apply:
        applied = engine.optim_steps(list(steps.to_apply.items()))
        answers |= zip(steps.to_apply, applied, strict=True)
    for run, answer in answers.items():
        if isinstance(answer, TinsmithError):
            engine.clear_gradient(run)
    return answers
