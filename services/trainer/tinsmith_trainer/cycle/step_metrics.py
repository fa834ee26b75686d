"""What each optimizer step measured, by run: put together from the results that were committed.

The results are in the ledger too, but with the log-probabilities of every token, until they expire,
and reading them counts as delivery. What people look at later is a few numbers for each step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tinsmith_engine import BatchResult, OptimStepResult
from tinsmith_trainer.execution.engine_calls import Computed, is_gradient
from tinsmith_trainer.runs.operations import ForwardWork, OptimStepWork

_MAX_WAITING = 20_000
"""Steps that wait to be recorded; beyond these the oldest are given up."""
_MAX_OPEN = 10_000
"""Runs whose step is under way; beyond these the oldest step is recorded without its losses."""
_TOKENS = "num_loss_tokens:sum"


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """What one optimizer step measured.

    Attributes:
        run: Which run.
        step: Version that the gradient was computed at.
        metrics: Values by name, without a prefix.
        sequence_number: Of the step among the operations of the run.
    """

    run: str
    step: int
    metrics: Mapping[str, float]
    sequence_number: int


@dataclass(slots=True)
class _Accumulated:
    """Metrics of the parts of a gradient: sums, and means times the tokens they are of."""

    num_tokens: float = 0.0
    num_sequences: int = 0
    num_input_tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    weighted: dict[str, float] = field(default_factory=dict)

    def add(self, work: ForwardWork, metrics: Mapping[str, float]) -> None:
        tokens = metrics.get(_TOKENS, 0.0)
        self.num_tokens += tokens
        self.num_sequences += len(work.batch)
        self.num_input_tokens += work.num_tokens
        for name, value in metrics.items():
            base, _, reduction = name.rpartition(":")
            if reduction == "sum":
                self.sums[base] = self.sums.get(base, 0.0) + value
            elif reduction == "mean":
                self.weighted[base] = self.weighted.get(base, 0.0) + value * tokens

    def metrics(self) -> dict[str, float]:
        if not self.num_sequences:
            return {}
        found = {name: total for name, total in self.sums.items() if name != "loss"}
        if self.num_tokens:
            found["loss"] = self.sums.get("loss", 0.0) / self.num_tokens
            found |= {name: total / self.num_tokens for name, total in self.weighted.items()}
        found["sequence_length"] = self.num_input_tokens / self.num_sequences
        return found


class StepMetrics:
    """Collects what steps measured, until it is taken to be recorded.

    A step whose trainer was replaced in the middle of its gradient is measured by its later parts.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Accumulated] = OrderedDict()
        self._waiting: OrderedDict[tuple[str, int], StepMeasurement] = OrderedDict()

    def note(self, run: str, computed: Sequence[Computed]) -> None:
        """Note results of a run that are durable, in order."""
        for entry in computed:
            work, answer = entry.operation.work, entry.answer
            if isinstance(work, OptimStepWork):
                parts = self._open.pop(run, None)
                if isinstance(answer, OptimStepResult):
                    metrics = {
                        **(parts or _Accumulated()).metrics(),
                        **answer.metrics,
                        "learning_rate": work.adam.learning_rate,
                    }
                    number = entry.operation.sequence_number
                    self.put_back([StepMeasurement(run, answer.version - 1, metrics, number)])
            elif (
                isinstance(work, ForwardWork)
                and isinstance(answer, BatchResult)
                and is_gradient(entry.operation)
            ):
                self._open.setdefault(run, _Accumulated()).add(work, answer.metrics)
                if len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)

    def take(self, limit: int) -> list[StepMeasurement]:
        """Return steps that are to be recorded, the oldest first, and forget them."""
        count = min(limit, len(self._waiting))
        return [self._waiting.popitem(last=False)[1] for _ in range(count)]

    def put_back(self, measurements: Sequence[StepMeasurement]) -> None:
        """Let steps wait to be recorded, again if they were not taken.

        Of two measurements of a step the one that was made later stays.
        """
        for each in measurements:
            waiting = self._waiting.get((each.run, each.step))
            if waiting is None or waiting.sequence_number <= each.sequence_number:
                self._waiting[each.run, each.step] = each
        while len(self._waiting) > _MAX_WAITING:
            self._waiting.popitem(last=False)
