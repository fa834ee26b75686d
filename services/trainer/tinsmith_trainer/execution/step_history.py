"""Which operation made which version of a run, and from where each can be computed again.

The ledger records operations by number; people speak of steps. A step is the state right after the
operation that made a version: an optimizer step, or a load. Versions are counted along the rows. A
snapshot says the version where rows before it were deleted.

A state can be computed again from a snapshot at or before it, or from the initial weights. Every
request in between must still be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tinsmith_runtime.errors import StepExpiredError, StepNotFoundError
from tinsmith_runtime.ledger import EndedOperation, RunHistory, SnapshotRecord
from tinsmith_trainer.runs.operations import Kind

BOUNDARY_KINDS = frozenset({Kind.OPTIM_STEP.value, Kind.LOAD_CHECKPOINT.value})
"""Kinds that end an accumulation, and so separate steps."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The end of an accumulation.

    Attributes:
        sequence_number: Of the operation; 0 for the beginning of the run.
        version: Optimizer steps after it; None if that is not known any more.
        kind: Of the operation; empty for the beginning.
        makes_version: Whether it is the end of a step; one that failed only clears the gradient.
    """

    sequence_number: int
    version: int | None
    kind: str
    makes_version: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """How the state at a step is made again.

    Attributes:
        bases: What a replay may begin with, the nearest first; None stands for initial weights.
        begin: The operation after which nothing of the step has been done.
        through: The operation that ends the step.
        step: The version after it.
    """

    bases: tuple[SnapshotRecord | None, ...]
    begin: int
    through: int
    step: int


class StepHistory:
    """The steps of a run, as far as they are kept.

    Args:
        history: What the ledger has; its operations are those of `BOUNDARY_KINDS`.
        loaded_version: Decodes the version that a load left.
    """

    def __init__(self, history: RunHistory, loaded_version: Callable[[bytes], int]) -> None:
        self._history = history
        self._boundaries = _boundaries(history, loaded_version)
        self._by_step = {
            boundary.version: boundary
            for boundary in self._boundaries
            if boundary.makes_version and boundary.version is not None
        }

    def find(self, step: int) -> Origin:
        """Return how the latest state of this version is made again.

        Raises:
            StepNotFoundError: If the run never had it.
            StepExpiredError: If it had, or may have had, and that is not kept.
        """
        name = self._history.run.name
        boundary = self._by_step.get(step)
        bases = () if boundary is None else self._bases(boundary.sequence_number)
        if boundary is not None and bases:
            begin = self.begin_of(boundary.sequence_number)
            return Origin(bases, begin, boundary.sequence_number, step)
        if boundary is None and step > self._history.run.version:
            raise StepNotFoundError(
                f"{name} has no step {step}; {self._kept()}", run=name, step=step
            )
        raise StepExpiredError(
            f"step {step} of {name} is not kept any more; {self._kept()}", run=name, step=step
        )

    def find_rerun(self, step: int) -> Origin:
        """Return how the state before an optimizer step is made again.

        Raises:
            StepNotFoundError: If no optimizer step of the run made this version.
            StepExpiredError: As `find`.
        """
        name = self._history.run.name
        origin = self.find(step)
        if self._by_step[step].kind != Kind.OPTIM_STEP:
            raise StepNotFoundError(
                f"step {step} of {name} was not trained: it was loaded, or is the beginning; "
                "rerun a later step",
                run=name,
                step=step,
            )
        bases = self._bases(origin.begin)
        if origin.begin < 0 or not bases:
            raise StepExpiredError(
                f"what {name} was before step {step} is not kept any more; {self._kept()}",
                run=name,
                step=step,
            )
        return Origin(bases, origin.begin, origin.through, step)

    def begin_of(self, number: int) -> int:
        """Return the last boundary before a number; -1 if it is not kept."""
        before = [b.sequence_number for b in self._boundaries if b.sequence_number < number]
        return before[-1] if before else -1

    def loads_between(self, after: int, through: int) -> list[int]:
        """Return the numbers of the loads that a replay of these operations repeats."""
        return [
            boundary.sequence_number
            for boundary in self._boundaries
            if after < boundary.sequence_number <= through
            and boundary.kind == Kind.LOAD_CHECKPOINT
            and boundary.makes_version
        ]

    def _bases(self, number: int) -> tuple[SnapshotRecord | None, ...]:
        """Return what a replay up to a number may begin with, the nearest first."""
        history = self._history
        found: list[SnapshotRecord | None] = [
            snapshot
            for snapshot in history.snapshots
            if history.payloads_through <= snapshot.sequence_number <= number
        ]
        if not history.payloads_through and not history.expired_through and number >= 0:
            found.append(None)
        return tuple(found)

    def _kept(self) -> str:
        steps = sorted(
            step
            for step, boundary in self._by_step.items()
            if self._bases(boundary.sequence_number)
        )
        return f"it has {_ranges(steps)}" if steps else "none of its steps is kept"


def _boundaries(history: RunHistory, loaded_version: Callable[[bytes], int]) -> list[Boundary]:
    """Return the boundaries of a run in order, each with its version if that is known."""
    # A snapshot between two boundaries has the version of the first of them.
    snapshots = sorted(history.snapshots, key=lambda each: each.sequence_number)
    begins = [] if history.expired_through else [Boundary(0, 0, "", makes_version=True)]
    found: list[Boundary] = begins
    ended = [
        operation for operation in history.ended if operation.is_success or _is_step(operation)
    ]
    for index, operation in enumerate(ended):
        before = found[-1].version if found else None
        version = _version_after(operation, before, loaded_version)
        if version is None:
            following = ended[index + 1].sequence_number if index + 1 < len(ended) else None
            version = _told_by(snapshots, operation.sequence_number, following)
        found.append(
            Boundary(
                operation.sequence_number,
                version,
                operation.kind,
                makes_version=operation.is_success,
            )
        )
    return found


def _is_step(operation: EndedOperation) -> bool:
    """Whether an operation is an optimizer step that was begun: it then cleared the gradient."""
    return operation.kind == Kind.OPTIM_STEP and operation.was_begun


def _version_after(
    operation: EndedOperation, before: int | None, loaded_version: Callable[[bytes], int]
) -> int | None:
    if not operation.is_success:
        return before
    if operation.kind == Kind.OPTIM_STEP:
        return None if before is None else before + 1
    return None if operation.result is None else loaded_version(operation.result)


def _told_by(snapshots: Iterable[SnapshotRecord], number: int, following: int | None) -> int | None:
    """Return the version that a snapshot says, which was taken before the next boundary."""
    for snapshot in snapshots:
        is_before_next = following is None or snapshot.sequence_number < following
        if number <= snapshot.sequence_number and is_before_next:
            return snapshot.version
    return None


def _ranges(steps: list[int]) -> str:
    """Return steps in words, such as `steps 0 to 4 and 7`."""
    parts: list[str] = []
    first = steps[0]
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if following == step + 1:
            continue
        parts.append(str(first) if first == step else f"{first} to {step}")
        first = following if following is not None else step
    if len(parts) > 1:
        parts = [", ".join(parts[:-1]), parts[-1]]
    noun = "steps" if len(steps) > 1 else "step"
    return f"{noun} {' and '.join(parts)}"
