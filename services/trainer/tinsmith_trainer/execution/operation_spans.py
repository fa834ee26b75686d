"""Operations and cycles as spans.

The span of an operation lasts from its acceptance to its result. It holds its wait in the queue,
its part in a cycle and its commit. A cycle serves operations of many traces: it begins a trace of
its own and is linked with each of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from tinsmith.tracing import spans
from tinsmith_trainer.runs.operations import Submission
from tinsmith_trainer.runs.run_queue import QueuedOperation

_SERVICE = "trainer"


def begin_operation(submission: Submission, submit_time_s: float) -> spans.Span | None:
    """Begin the span of an accepted operation; None if it belongs to no trace."""
    if not spans.is_on() or spans.current() is None:
        return None
    attributes: dict[str, spans.Value] = {
        "tinsmith.run": submission.run,
        "tinsmith.sequence_number": submission.sequence_number,
    }
    return spans.begin(
        str(submission.kind), service=_SERVICE, attributes=attributes, begin_s=submit_time_s
    )


class CycleSpans:
    """The spans of one cycle and of the operations that it computes.

    Without traces, or if no operation has one, nothing happens.
    """

    def __init__(self, operations: Iterable[QueuedOperation], num_runs: int) -> None:
        self._cycle: spans.Span | None = None
        self._computing: dict[int, spans.Span] = {}
        self._committing: dict[int, spans.Span] = {}
        if not spans.is_on():
            return
        traced = [operation for operation in operations if operation.span is not None]
        links = [operation.span for operation in traced if operation.span is not None]
        if not links:
            return
        self._cycle = spans.begin(
            "cycle",
            service=_SERVICE,
            is_root=True,
            links=links,
            attributes={"tinsmith.num_runs": num_runs},
        )
        self.compute(traced)

    def compute(self, operations: Iterable[QueuedOperation]) -> None:
        """Note that operations waited until now and are computed from now on."""
        if self._cycle is None:
            return
        for operation in operations:
            if operation.span is None:
                continue
            waited = spans.begin(
                "wait in the queue",
                service=_SERVICE,
                parent=operation.span,
                begin_s=operation.record.submit_time_s,
            )
            waited.end()
            self._computing[id(operation)] = spans.begin(
                "compute",
                service=_SERVICE,
                parent=operation.span,
                links=[self._cycle],
                attributes={"tinsmith.num_tokens": operation.num_tokens},
            )

    def commit(self, operations: Iterable[QueuedOperation]) -> None:
        """Note that operations are computed, and are committed from now on."""
        if self._cycle is None:
            return
        for operation in operations:
            computed = self._computing.pop(id(operation), None)
            if computed is not None and operation.span is not None:
                computed.end()
                self._committing[id(operation)] = spans.begin(
                    "commit", service=_SERVICE, parent=operation.span
                )

    def note_committed(self, operations: Iterable[QueuedOperation], problem: str = "") -> None:
        """Note that operations are durable, or why they are not."""
        for operation in operations:
            committed = self._committing.pop(id(operation), None)
            if committed is not None:
                committed.end(problem=problem)

    def end(self, problem: str = "") -> None:
        """Note the end of the cycle; what it did not get to has failed."""
        end_s = time.time()
        for span in (*self._computing.values(), *self._committing.values()):
            span.end(problem=problem or "given up", end_s=end_s)
        self._computing.clear()
        self._committing.clear()
        if self._cycle is not None:
            self._cycle.end(problem=problem, end_s=end_s)
