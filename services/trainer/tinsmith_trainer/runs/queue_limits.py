"""Limits of the queues: what is refused before anything is stored, and when to come again.

A queue is limited three ways, for a run, a project and the pod: operations (what a restart has to
read), tokens (how long the last of them would wait) and bytes (what they hold of the memory). What
is admitted counts at once, before it is durable, so that a thousand calls at the same moment cannot
pass the same gap. A refusal is `QueueFullError`, always with a time to retry after: it consumes
no sequence number, so the client sends the same request again.

The hint is the time in which the queue shrinks to where the call fits: the tokens that have to be
computed first, at the pace last measured, of which a project gets its share. It is an estimate and
bounded on both sides.

An operation that carries the number which others of its run wait for is admitted over the limits of
operations and tokens: refusing it would keep the queue full until the gap expires.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith_runtime.errors import QueueFullError
from tinsmith_runtime.usage import Quantity
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.run_queue import OperationSize

_MIN_HINT_S = 0.1
_MAX_HINT_S = 30.0
_DEFAULT_HINT_S = 1.0
_PACE_WEIGHT = 0.2


class Pace:
    """How fast the engines compute, in tokens each second; 0 before the first cycle."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def note(self, num_tokens: int, duration_s: float) -> None:
        """Take a cycle into the moving average."""
        if num_tokens <= 0 or duration_s <= 0:
            return
        newest = num_tokens / duration_s
        weight = _PACE_WEIGHT if self.tokens_per_s else 1.0
        self.tokens_per_s += weight * (newest - self.tokens_per_s)


@dataclass(slots=True)
class QueuedCounts:
    """What waits in a queue."""

    num_operations: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_trained_tokens: int = 0

    def add(self, size: OperationSize, sign: int = 1) -> None:
        """Count an operation, or with -1 take it out."""
        self.num_operations += sign
        self.num_tokens += sign * size.num_tokens
        self.num_bytes += sign * size.num_bytes
        self.num_trained_tokens += sign * size.num_trained_tokens

    def of(self, quantity: Quantity) -> float:
        """Return what of it is going to be charged; time is not known before."""
        if quantity is Quantity.TRAINED_TOKENS:
            return self.num_trained_tokens
        if quantity is Quantity.PREFILLED_TOKENS:
            return self.num_tokens - self.num_trained_tokens
        return 0


class QueueAdmission:
    """Counts what waits, and refuses what would be too much.

    Args:
        config: Limits.
        pace: For the time to retry after.
    """

    def __init__(self, config: TrainerConfig, pace: Pace) -> None:
        self._config = config
        self._pace = pace
        self._all = QueuedCounts()
        self._projects: defaultdict[str, QueuedCounts] = defaultdict(QueuedCounts)
        self._runs: defaultdict[str, QueuedCounts] = defaultdict(QueuedCounts)

    @property
    def projects(self) -> Mapping[str, QueuedCounts]:
        """What waits of each project that has something waiting."""
        return self._projects

    def waiting(self, project: str) -> QueuedCounts:
        """Return what waits of a project."""
        return self._projects.get(project, QueuedCounts())

    def admit(self, run: LiveRun, sequence_number: int, size: OperationSize) -> None:
        """Count an operation that is about to be stored.

        Raises:
            QueueFullError: If it would be too much; nothing was counted.
        """
        self.check_distance(run, sequence_number)
        is_awaited = bool(run.queue) and sequence_number == run.queue.next_sequence_number
        if not is_awaited:
            self._check_counts(run, size)
        self._check_bytes(run, size)
        self.count(run, size)

    def check_distance(self, run: LiveRun, sequence_number: int) -> None:
        """Refuse a number that is further ahead than may wait.

        Refusals of such numbers would fill the ledger, and put the run's next number out of reach.

        Raises:
            QueueFullError: If it is; the same number is good once those before it have ended.
        """
        limit = self._config.max_queued_operations
        # The numbers before it would have to wait as well.
        num_before = sequence_number - run.queue.next_sequence_number
        if num_before < limit:
            return
        queued = self._runs.get(run.name, QueuedCounts())
        raise QueueFullError(
            f"sequence number {sequence_number} of {run.name} is {num_before} ahead of the next "
            f"one, {run.queue.next_sequence_number}; at most {limit} operations may wait, retry "
            "later",
            retry_after_s=self._hint_s(queued, num_operations=num_before - limit + 1),
            run=run.name,
            next_sequence_number=run.queue.next_sequence_number,
        )

    def count(self, run: LiveRun, size: OperationSize) -> None:
        """Count an operation without a check: it was accepted before."""
        for queued in self._counts_of(run):
            queued.add(size)

    def release(self, run: LiveRun, size: OperationSize) -> None:
        """Take an operation out that has ended, or was not stored after all."""
        for queued in self._counts_of(run):
            queued.add(size, -1)
        for counts, name in ((self._projects, run.project), (self._runs, run.name)):
            if not counts[name].num_operations:
                del counts[name]

    def _counts_of(self, run: LiveRun) -> tuple[QueuedCounts, QueuedCounts, QueuedCounts]:
        return self._all, self._projects[run.project], self._runs[run.name]

    def _check_counts(self, run: LiveRun, size: OperationSize) -> None:
        config = self._config
        for queued, whose, max_operations, max_tokens in (
            (
                self._runs.get(run.name, QueuedCounts()),
                run.name,
                config.max_queued_operations,
                config.max_queued_tokens,
            ),
            (
                self._projects.get(run.project, QueuedCounts()),
                "your project",
                config.max_project_queued_operations,
                config.max_project_queued_tokens,
            ),
        ):
            if queued.num_operations >= max_operations:
                raise QueueFullError(
                    f"{queued.num_operations} operations of {whose} wait, as many as may; retry "
                    "when some have finished",
                    retry_after_s=self._hint_s(
                        queued, num_operations=queued.num_operations - max_operations + 1
                    ),
                    run=run.name,
                    limit=max_operations,
                )
            if queued.num_tokens + size.num_tokens > max_tokens:
                raise QueueFullError(
                    f"{queued.num_tokens} tokens of {whose} wait and {size.num_tokens} more would "
                    f"exceed the limit of {max_tokens}; retry when some have finished",
                    retry_after_s=self._hint_s(
                        queued, num_tokens=queued.num_tokens + size.num_tokens - max_tokens
                    ),
                    run=run.name,
                    limit=max_tokens,
                )

    def _check_bytes(self, run: LiveRun, size: OperationSize) -> None:
        for queued, whose, limit in (
            (
                self._projects.get(run.project, QueuedCounts()),
                "your project",
                self._config.max_project_queued_bytes,
            ),
            (self._all, "all projects", self._config.max_queued_bytes),
        ):
            excess = queued.num_bytes + size.num_bytes - limit
            if excess > 0:
                tokens_of_excess = queued.num_tokens * excess // max(1, queued.num_bytes)
                raise QueueFullError(
                    f"{queued.num_bytes} bytes of requests of {whose} wait; retry when some have "
                    "finished",
                    retry_after_s=self._hint_s(queued, num_tokens=tokens_of_excess),
                    run=run.name,
                    limit=limit,
                )

    def _hint_s(
        self, queued: QueuedCounts, *, num_operations: int = 0, num_tokens: int = 0
    ) -> float:
        """Return the time in which so many of the operations or tokens of a queue are done."""
        if not self._pace.tokens_per_s:
            return _DEFAULT_HINT_S
        if queued.num_operations:
            num_tokens += num_operations * queued.num_tokens // queued.num_operations
        hint_s = num_tokens * max(1, len(self._projects)) / self._pace.tokens_per_s
        return min(max(hint_s, _MIN_HINT_S), _MAX_HINT_S)
