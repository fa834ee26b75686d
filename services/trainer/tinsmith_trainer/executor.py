"""Computes a slice of operations on the engine; runs on the engine's thread.

What fails is the operation, not the run: a typed error leaves the engine's state as the error's
meaning says, anything else makes the state untrustworthy, and the caller then restores it from the
ledger.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinsmith_engine import Engine, ForwardResult, OptimStepResult
from tinsmith_runtime.errors import (
    GradientIncompleteError,
    InternalError,
    OutOfMemoryError,
    TinsmithError,
)
from tinsmith_runtime.status import internal_error
from tinsmith_trainer.work import ForwardWork, OptimStepWork, Work

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True, slots=True)
class Computed:
    """What became of one operation on the engine: exactly one of `result` and `error` is set."""

    sequence_number: int
    result: ForwardResult | OptimStepResult | None
    error: TinsmithError | None
    version: int
    duration_s: float


@dataclass(slots=True)
class SliceResult:
    """What became of a slice.

    Attributes:
        computed: One entry for each operation, in order; shorter if the state was lost.
        failures: The failed forward_backward calls of the accumulation after the slice.
        is_state_lost: Whether a bug or lack of memory left the engine in an unknown state.
    """

    failures: list[int]
    computed: list[Computed] = field(default_factory=list)
    is_state_lost: bool = False


def compute_slice(
    engine: Engine, run: str, operations: Sequence[tuple[int, Work]], failures: Sequence[int]
) -> SliceResult:
    """Compute operations in order.

    Args:
        engine: The engine that holds the run.
        run: Its name.
        operations: Sequence number and work of each.
        failures: Failed forward_backward calls of the accumulation so far.
    """
    outcome = SliceResult(list(failures))
    for sequence_number, work in operations:
        begin_s = time.perf_counter()
        result: ForwardResult | OptimStepResult | None = None
        error: TinsmithError | None = None
        try:
            result = _compute(engine, run, work, outcome.failures)
        except TinsmithError as typed:
            error = typed
        except Exception as unexpected:
            error = _type_of(unexpected)
            outcome.is_state_lost = True
        if isinstance(work, OptimStepWork):
            # Whatever became of the step, the accumulation is over.
            outcome.failures.clear()
        elif error is not None and isinstance(work, ForwardWork) and work.is_backward:
            outcome.failures.append(sequence_number)
        version = 0 if outcome.is_state_lost else engine.version(run)
        duration_s = time.perf_counter() - begin_s
        outcome.computed.append(Computed(sequence_number, result, error, version, duration_s))
        if outcome.is_state_lost:
            break
    return outcome


def _compute(
    engine: Engine, run: str, work: Work, failures: Sequence[int]
) -> ForwardResult | OptimStepResult:
    match work:
        case ForwardWork(is_backward=True):
            return engine.forward_backward(run, work.batch, work.loss, work.loss_config)
        case ForwardWork():
            return engine.forward(run, work.batch, work.loss, work.loss_config)
        case OptimStepWork():
            return _optim_step(engine, run, work, failures)
        case _:
            raise TypeError(f"{type(work).__name__} is not computed on the engine")


def _optim_step(
    engine: Engine, run: str, work: OptimStepWork, failures: Sequence[int]
) -> OptimStepResult:
    unseen = [number for number in failures if number > work.observed_sequence_number]
    if unseen:
        engine.clear_gradient(run)
        raise GradientIncompleteError(
            f"forward_backward {unseen[0]} of {run} failed before the sender of this optim_step "
            "had seen it; the gradient was cleared and the version kept, send the whole "
            "accumulation again",
            run=run,
            failed=unseen[0],
        )
    return engine.optim_step(run, work.adam)


def _type_of(error: Exception) -> TinsmithError:
    text = str(error).lower()
    if isinstance(error, MemoryError) or any(part in text for part in _OUT_OF_MEMORY_PHRASES):
        return OutOfMemoryError(
            "the operation does not fit into memory; send fewer or shorter sequences"
        )
    logger.error("operation failed by a bug", exc_info=error)
    bug: InternalError = internal_error()
    return bug
