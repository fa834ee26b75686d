"""The status of an operation: its position, and what it waits for, in words.

A client that waits for an operation is told the first thing that the operation waits for. That is a
number that has not arrived, operations of its own run, or the engine and what is before it there.
The figures are of this moment and count what is known to come first; work that arrives later, and
is within its share, may still be computed before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tinsmith_trainer.execution.slices import next_parts
from tinsmith_trainer.runs.run import LiveRun


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """The status of an operation.

    Attributes:
        position: Operations of its run that are executed before it; 0 if it is next or runs.
        num_tokens_ahead: About how many tokens, of all runs, are computed before it.
        waiting_for: In words; empty if it runs or is done.
    """

    position: int = 0
    num_tokens_ahead: int = 0
    waiting_for: str = ""
    is_running: bool = False
    is_held: bool = False


def status_of(
    run: LiveRun,
    sequence_number: int,
    runs: Iterable[LiveRun],
    *,
    cycle_tokens: int,
    obstacle: str = "",
    looks_around: bool = True,
) -> OperationStatus:
    """Return the status of an operation; nothing is said of one that is done.

    Args:
        run: Its run.
        sequence_number: Its number.
        runs: All runs of the trainer.
        cycle_tokens: About how much one run can do in one cycle.
        obstacle: What keeps the whole trainer from going on, in words.
        looks_around: Whether to look at what the other runs do, which takes the longer the more
            there are.
    """
    if sequence_number not in run.queue:
        return OperationStatus()
    if sequence_number in run.queue.running:
        return OperationStatus(waiting_for=run.obstacle, is_running=True)
    missing = next((n for n in run.queue.missing_numbers() if n < sequence_number), None)
    position = run.queue.num_before(sequence_number)
    num_runs, num_tokens = _ahead(run, runs, cycle_tokens) if looks_around else (0, 0)
    own_tokens = sum(o.num_tokens for n, o in run.queue.items() if n < sequence_number)
    if obstacle:
        waiting_for = obstacle
    elif run.obstacle:
        waiting_for = run.obstacle
    elif missing is not None:
        waiting_for = f"sequence number {missing}, which has not arrived"
    elif position:
        waiting_for = f"{_count(position, 'operation')} of this run before it"
    elif num_runs:
        waiting_for = (
            f"its turn on the engine: {_count(num_runs, 'run')} and about {_about(num_tokens)} "
            "tokens before it"
        )
    else:
        waiting_for = "its turn on the engine"
    return OperationStatus(
        position=position,
        num_tokens_ahead=own_tokens + num_tokens,
        waiting_for=waiting_for,
        is_held=missing is not None,
    )


def _ahead(run: LiveRun, runs: Iterable[LiveRun], cycle_tokens: int) -> tuple[int, int]:
    """Return how many other runs compute or could, and their tokens in this cycle."""
    num_runs = num_tokens = 0
    for other in runs:
        if other is run or other.engine is not run.engine:
            continue
        if other.queue.running:
            queued = (other.queue.get(number) for number in other.queue.running)
            num_runs += 1
            num_tokens += sum(each.num_tokens for each in queued if each is not None)
        elif other.is_ready:
            parts = next_parts(other, max_cost=cycle_tokens)
            num_runs += 1
            num_tokens += sum(each.num_tokens for part in parts for each in part.operations)
    return num_runs, num_tokens


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _about(number: int) -> str:
    """Return a number of two digits and zeros."""
    digits = len(str(number))
    return f"{round(number, min(0, 2 - digits)):,}"
