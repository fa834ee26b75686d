"""What the client says of past steps of a run: where a metric turned, and a step played again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricTurn:
    """The step where a metric of a run turned.

    Attributes:
        metric: Its name.
        threshold: What it went beyond.
        step: As the metric counts steps: the version that the step began with.
        value: The metric at that step.
        previous_step: The step that was recorded before; None if it is the first.
        previous_value: The metric there.
    """

    metric: str
    threshold: float
    step: int
    value: float
    previous_step: int | None
    previous_value: float | None


@dataclass(frozen=True, slots=True)
class ReplayedOperation:
    """An operation of a step that was played again.

    Attributes:
        sequence_number: Its number in the run.
        kind: `forward`, `forward_backward` or `optim_step`.
        num_datums: Datums of its batch; 0 for an optimizer step.
        num_tokens: Tokens of its batch.
        recorded: Its metrics as they are recorded; empty if they are not kept.
        replayed: Its metrics now.
        differences: Where the two results differ, in words; empty if they are equal bits.
    """

    sequence_number: int
    kind: str
    num_datums: int
    num_tokens: int
    recorded: dict[str, float]
    replayed: dict[str, float]
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepReplay:
    """A step of a run that was played again.

    Attributes:
        run: Resource name of the run.
        step: The step, by the version that it made.
        operations: Its operations, in their order.
    """

    run: str
    step: int
    operations: tuple[ReplayedOperation, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every result is that which is recorded, to the bit."""
        return not any(operation.differences for operation in self.operations)
