"""The operations of one run: what is queued, what is computed now, and which number is next.

Operations execute in the order of their sequence numbers, without gaps. One that arrives early is
*held* until the numbers before it have arrived; the number of a refused request counts as arrived.
The queue only keeps books, on the event loop: it never waits for the engine or the ledger.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tinsmith.tracing.spans import Span
from tinsmith_runtime.ledger import OperationRecord, OperationState
from tinsmith_runtime.ledger.records import GIVEN_UP_KIND
from tinsmith_trainer.runs.accumulation import Accumulation
from tinsmith_trainer.runs.operations import Kind, Work

_NUM_RECENT = 32


@dataclass(frozen=True, slots=True)
class OperationSize:
    """What an operation takes of the limits of a queue.

    Attributes:
        num_trained_tokens: Those of its tokens that go into a gradient.
    """

    num_tokens: int
    num_bytes: int
    num_trained_tokens: int = 0


@dataclass(frozen=True, slots=True)
class QueuedOperation:
    """An accepted operation that has no result yet.

    Attributes:
        record: Its row in the ledger.
        work: What it asks for.
        size: What it holds of the queue's limits.
        span: Of its trace, from its acceptance to its result; None without one.
    """

    record: OperationRecord
    work: Work
    size: OperationSize
    span: Span | None = None

    @property
    def sequence_number(self) -> int:
        """Its position in the run's order, from 1."""
        return self.record.sequence_number

    @property
    def num_tokens(self) -> int:
        """Tokens to compute; 0 for what is no batch."""
        return self.size.num_tokens


class RunQueue(Mapping[int, QueuedOperation]):
    """Accepted operations by sequence number; a mapping that only its own methods change.

    Attributes:
        next_sequence_number: The number that is executed next.
        running: Numbers of the operations that are being computed.
        accumulation: What became of the parts of the current gradient.
        suspect_number: Operations up to this number are computed alone: one of them may have broken
            an engine call.
        num_arrivals: Calls that were accepted or refused.
        latest_revision: Revision of the operation that finished last.

    Args:
        next_sequence_number: Where the ledger says that the run goes on.
        latest_revision: Likewise.
    """

    def __init__(self, *, next_sequence_number: int = 1, latest_revision: int = 0) -> None:
        self.next_sequence_number = next_sequence_number
        self.latest_revision = latest_revision
        self.running: frozenset[int] = frozenset()
        self.accumulation = Accumulation()
        self.suspect_number = 0
        self.num_arrivals = 0
        self._operations: dict[int, QueuedOperation] = {}
        self._finished_ahead: dict[int, str] = {}
        self._delivered_failures: frozenset[int] = frozenset()
        self._client_ends: list[int] = []
        self._recent: deque[OperationRecord] = deque(maxlen=_NUM_RECENT)
        self._changed = asyncio.Event()

    def __getitem__(self, sequence_number: int) -> QueuedOperation:
        return self._operations[sequence_number]

    def __contains__(self, sequence_number: object) -> bool:
        return sequence_number in self._operations

    def __iter__(self) -> Iterator[int]:
        return iter(self._operations)

    def __len__(self) -> int:
        return len(self._operations)

    @property
    def next_free_number(self) -> int:
        """The number that a client's next call carries."""
        number = self.next_sequence_number
        while number in self._operations or number in self._finished_ahead:
            number += 1
        return number

    @property
    def highest_number(self) -> int:
        """The highest number that has arrived; 0 if none has."""
        return max(self.next_sequence_number - 1, *self._operations, *self._finished_ahead, 0)

    @property
    def is_ready(self) -> bool:
        """Whether the operation that is next has arrived and none is being computed."""
        return self.next_sequence_number in self._operations and not self.running

    def accept(self, operation: QueuedOperation) -> None:
        """Add an operation to the queue."""
        self._operations[operation.sequence_number] = operation
        self.num_arrivals += 1
        self.notify()

    def consume(self, record: OperationRecord) -> None:
        """Note an operation that was refused, so that its number is not waited for."""
        self.num_arrivals += 1
        if record.sequence_number >= self.next_sequence_number:
            self._finished_ahead[record.sequence_number] = record.kind
        self._advance()
        self._remember(record)
        self.notify()

    def start(self, numbers: Iterable[int]) -> None:
        """Note which operations are computed from now on, beside those that already are."""
        self.running |= frozenset(numbers)

    def stop(self) -> None:
        """Note that no operation is computed any more."""
        self.running = frozenset()

    def finish(self, records: Iterable[OperationRecord]) -> None:
        """Take operations that have a result out of the queue."""
        for record in records:
            done = self._operations.pop(record.sequence_number, None)
            if done is not None and done.span is not None:
                is_failed = record.state is OperationState.FAILED
                done.span.end(problem="FAILED" if is_failed else "")
            self._finished_ahead[record.sequence_number] = ""
            self._remember(record)
        self._advance()
        self.notify()

    def give_up(self, numbers: Iterable[int]) -> None:
        """Stop waiting for numbers that never arrived; each may have been a gradient."""
        for number in numbers:
            self._finished_ahead[number] = Kind.FORWARD_BACKWARD
        self._advance()
        self.notify()

    def set_accumulation(self, accumulation: Accumulation) -> None:
        """Replace the accumulation, as a commit or a restored state has it."""
        self.accumulation = accumulation
        self._delivered_failures = frozenset(
            number
            for number in self._delivered_failures
            if number in accumulation.failures or number >= self.next_sequence_number
        )

    def add_failure(self, number: int) -> None:
        """Note that a forward_backward of the current accumulation failed."""
        self.accumulation = self.accumulation.fail(number)

    def note_delivered(self, records: Iterable[OperationRecord]) -> None:
        """Note that operations are told to a client: from now on it may know their failures."""
        failed = (
            record.sequence_number for record in records if record.state is OperationState.FAILED
        )
        self._delivered_failures |= frozenset(failed)

    def seen_through(self, sequence_number: int) -> int:
        """Return what the sender of a call that arrives now could know; see `OperationRecord`."""
        unseen = set(self.accumulation.failures) - self._delivered_failures
        return min(sequence_number, self.next_sequence_number, *unseen) - 1

    def suspect_running(self) -> None:
        """Have what is computed now, and all before it, computed alone next time."""
        self.suspect_number = max(self.running)

    def missing_numbers(self) -> list[int]:
        """Return the numbers that held operations wait for; empty if none is held."""
        if not self._operations or self.next_sequence_number in self._operations or self.running:
            return []
        highest = max(self._operations)
        return [
            number
            for number in range(self.next_sequence_number, highest)
            if number not in self._operations and number not in self._finished_ahead
        ]

    def note_client_gone(self) -> None:
        """Note that what has not arrived below the highest number never will."""
        ends = {end for end in self._client_ends if end >= self.next_sequence_number}
        self._client_ends = sorted({*ends, self.highest_number})

    def end_of_client(self, number: int) -> int | None:
        """Return the last number of the client that a number belonged to, if that is gone."""
        return next((end for end in self._client_ends if end >= number), None)

    def num_before(self, sequence_number: int) -> int:
        """Return how many operations are executed before one of the queue."""
        if sequence_number in self.running:
            return 0
        return sum(number < sequence_number for number in self._operations)

    def recent_after(self, revision: int) -> list[OperationRecord] | None:
        """Return what finished after a revision, or None if that is not all in memory."""
        records = [record for record in self._recent if record.revision > revision]
        is_complete = len(records) == self.latest_revision - revision
        return records if records and is_complete else None

    def notify(self) -> None:
        """Wake every caller that waits for a change of this run."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return at the next change, or after a time."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return

    def _remember(self, record: OperationRecord) -> None:
        self._recent.append(record)
        self.latest_revision = max(self.latest_revision, record.revision)

    def _advance(self) -> None:
        while self.next_sequence_number in self._finished_ahead:
            kind = self._finished_ahead.pop(self.next_sequence_number)
            if kind in (Kind.FORWARD_BACKWARD, GIVEN_UP_KIND):
                self.add_failure(self.next_sequence_number)
            self.next_sequence_number += 1
