"""What of a run's queue may go into one cycle, and in which parts.

A slice is a stretch of consecutive operations of one run: forwards and forward_backwards, up to and
including its next optimizer step, so that a run passes at most one optimizer boundary in a cycle.
It may be cut between operations, where the cycle's budget ends, but not between the last gradient
and its step: the two share one commit. A save or a load is a slice of its own.

An operation that may be what killed the process, or broke an engine call, is *suspect*: it is
computed alone, so that it takes no other run with it, and its part ends with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_runtime.fairness.deficit_round_robin import Backlog
from tinsmith_trainer.runs.operations import ForwardWork, OptimStepWork
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.run_queue import QueuedOperation

FIXED_COST = 64
"""What an optimizer step, a save or a load costs, in tokens: little, but not nothing."""


@dataclass(frozen=True, slots=True)
class Part:
    """Operations that are not cut apart, and what they cost in tokens."""

    operations: tuple[QueuedOperation, ...]
    cost: int


@dataclass(frozen=True, slots=True)
class Slice:
    """What one run does in a cycle; at least one operation."""

    run: LiveRun
    operations: Sequence[QueuedOperation]

    @property
    def first(self) -> QueuedOperation:
        """The operation that is next in the run."""
        return self.operations[0]

    @property
    def is_computed(self) -> bool:
        """Whether it goes through the engine's packed pass, rather than being a save or load."""
        return isinstance(self.first.work, ForwardWork | OptimStepWork)


def next_parts(run: LiveRun, *, max_cost: int) -> list[Part]:
    """Return what may be computed next, in order, after what runs now.

    Args:
        run: A run.
        max_cost: Ends the list once it costs this much; more would not go into one cycle.
    """
    parts: list[Part] = []
    cost = 0
    number = max(run.queue.running, default=run.queue.next_sequence_number - 1) + 1
    while number in run.queue and cost < max_cost:
        operation = run.queue[number]
        is_computed = isinstance(operation.work, ForwardWork | OptimStepWork)
        if parts and (not is_computed or is_suspect(run, operation)):
            break
        if isinstance(operation.work, OptimStepWork) and parts:
            gradient = parts.pop()
            parts.append(Part((*gradient.operations, operation), gradient.cost + FIXED_COST))
            break
        parts.append(Part((operation,), operation.num_tokens or FIXED_COST))
        cost += parts[-1].cost
        number += 1
        if not isinstance(operation.work, ForwardWork) or is_suspect(run, operation):
            break
    return parts


def backlog_of(run: LiveRun, parts: Sequence[Part], *, is_ready: bool = True) -> Backlog:
    """Return the parts as the fair queue sees them."""
    return Backlog(
        run=run.name,
        project=run.project,
        costs=[part.cost for part in parts],
        is_alone=is_suspect(run, parts[0].operations[0]),
        is_ready=is_ready,
    )


def cut(run: LiveRun, parts: Sequence[Part], num_parts: int) -> Slice:
    """Return the slice of a run that may compute so many of its parts."""
    return Slice(run, [each for part in parts[:num_parts] for each in part.operations])


def is_suspect(run: LiveRun, operation: QueuedOperation) -> bool:
    """Whether an operation was begun before and did not end."""
    is_computed = isinstance(operation.work, ForwardWork | OptimStepWork)
    was_begun = operation.record.num_attempts > 0
    return is_computed and (was_begun or operation.sequence_number <= run.queue.suspect_number)


def step_behind(run: LiveRun, last: QueuedOperation) -> QueuedOperation | None:
    """Return the optimizer step that arrived while the gradient before it was computed.

    It joins the slice, so that a gradient and its step share a commit however they arrive.
    """
    behind = run.queue.get(last.sequence_number + 1)
    is_joined = (
        behind is not None
        and isinstance(last.work, ForwardWork)
        and isinstance(behind.work, OptimStepWork)
        and not is_suspect(run, behind)
    )
    return behind if is_joined else None
