"""A run as its trainer knows it: what waits, what is next, and why the next one waits.

Sequence numbers are executed without gaps. An operation that arrives early is *held* until the
numbers before it have arrived; numbers of requests that were refused count as arrived. Nothing here
waits, computes or stores: the cycle does that, this is its bookkeeping, owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tinsmith_engine import Engine
from tinsmith_runtime.ledger import OperationRecord, RunRecord
from tinsmith_runtime.ledger.records import GIVEN_UP_KIND
from tinsmith_runtime.manifests import WrittenManifest
from tinsmith_trainer.work import ForwardWork, Kind, OptimStepWork, Work

_NUM_RECENT = 32


@dataclass(frozen=True, slots=True)
class QueuedOperation:
    """An accepted operation that has no result yet.

    Attributes:
        record: Its row.
        work: What it asks for.
        size_bytes: What it holds of the queue's memory.
    """

    record: OperationRecord
    work: Work
    size_bytes: int

    @property
    def sequence_number(self) -> int:
        """Its place in the run."""
        return self.record.sequence_number


class LiveRun:
    """The queue of one run and where it stands.

    Attributes:
        record: The run.
        engine: The engine of its base model.
        queue: Accepted operations by sequence number.
        running: Numbers of the operations that are being computed.
        next_sequence_number: The number that is executed next.
        failures: Numbers of the forward_backward calls of the current accumulation that failed.
        is_resident: Whether the engine holds the run.
        is_closed: Whether the run was deleted.
        state_sequence_number: The last operation that the engine's state contains.
        replay_cost_s: How long it would take to compute what no snapshot contains.
        last_used: Order of use, to find the run that idled longest.
        weights_serial: Raised whenever the weights may have changed.
        published: The last sampler checkpoint written for other processes, and of which serial.
        outdated: Folders of sampler checkpoints before it, oldest first.
        held_since_s: Since when the next number has been missing; None if it is not.
        latest_revision: Revision of the operation that finished last.
        obstacle: What keeps the run from going on, in words, if it is not its own queue.
    """

    def __init__(self, record: RunRecord, engine: Engine) -> None:
        self.record = record
        self.engine = engine
        self.queue: dict[int, QueuedOperation] = {}
        self.running: frozenset[int] = frozenset()
        self.next_sequence_number = 1
        self.failures: list[int] = []
        self.is_resident = False
        self.is_closed = False
        self.state_sequence_number = 0
        self.replay_cost_s = 0.0
        self.last_used = 0
        self.obstacle = ""
        self.weights_serial = 0
        self.published: tuple[int, WrittenManifest] | None = None
        self.outdated: list[str] = []
        self.held_since_s: float | None = None
        self.latest_revision = 0
        self.lock = asyncio.Lock()
        """Held while the state in the engine is computed, restored, parked or published."""
        self._finished_ahead: dict[int, str] = {}
        self._recent: deque[OperationRecord] = deque(maxlen=_NUM_RECENT)
        self._changed = asyncio.Event()

    @property
    def name(self) -> str:
        """The resource name."""
        return self.record.name

    @property
    def next_free_number(self) -> int:
        """The number that a client's next call carries."""
        number = self.next_sequence_number
        while number in self.queue or number in self._finished_ahead:
            number += 1
        return number

    @property
    def is_ready(self) -> bool:
        """Whether the operation that is next has arrived and none is being computed."""
        return self.next_sequence_number in self.queue and not self.running and not self.is_closed

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is being computed."""
        return not self.queue and not self.running and not self.lock.locked()

    def accept(self, operation: QueuedOperation) -> None:
        """Add an operation to the queue."""
        self.queue[operation.sequence_number] = operation
        self.notify()

    def consume(self, record: OperationRecord) -> None:
        """Note an operation that was refused, so that its number is not waited for."""
        if record.sequence_number >= self.next_sequence_number:
            self._finished_ahead[record.sequence_number] = record.kind
        self._advance()
        self._remember(record)
        self.notify()

    def next_slice(self, *, max_tokens: int) -> list[QueuedOperation]:
        """Return the operations to compute together: in order, up to one optimizer step.

        A save or load is a slice of its own.

        Args:
            max_tokens: Ends the slice once it holds this many, so that other runs get their turn.
        """
        operations: list[QueuedOperation] = []
        num_tokens = 0
        number = self.next_sequence_number
        while number in self.queue and num_tokens < max_tokens:
            operation = self.queue[number]
            is_compute = isinstance(operation.work, ForwardWork | OptimStepWork)
            if operations and not is_compute:
                break
            operations.append(operation)
            if not isinstance(operation.work, ForwardWork):
                break
            num_tokens += operation.work.num_tokens
            number += 1
        return operations

    def finish(self, records: Iterable[OperationRecord]) -> None:
        """Take operations that have a result out of the queue."""
        for record in records:
            self.queue.pop(record.sequence_number, None)
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

    def missing_numbers(self) -> list[int]:
        """Return the numbers that held operations wait for; empty if none is held."""
        if not self.queue or self.next_sequence_number in self.queue or self.running:
            return []
        highest = max(self.queue)
        return [
            number
            for number in range(self.next_sequence_number, highest)
            if number not in self.queue and number not in self._finished_ahead
        ]

    def waiting_for(self, sequence_number: int) -> str:
        """Say what an operation waits for, in words; empty if it runs or is done."""
        if sequence_number not in self.queue:
            return ""
        if self.obstacle:
            return self.obstacle
        if sequence_number in self.running:
            return ""
        missing = [number for number in self.missing_numbers() if number < sequence_number]
        if missing:
            return f"sequence number {missing[0]}, which has not arrived"
        num_before = sum(number < sequence_number for number in self.queue)
        if num_before:
            return f"{num_before} operations of this run before it"
        return "its turn on the engine"

    def recent_after(self, revision: int) -> list[OperationRecord] | None:
        """Return what finished after a revision, or None if that is not all in memory."""
        records = [record for record in self._recent if record.revision > revision]
        is_complete = len(records) == self.latest_revision - revision
        return records if records and is_complete else None

    def notify(self) -> None:
        """Wake everybody who waits for a change of this run."""
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
                self.failures.append(self.next_sequence_number)
            self.next_sequence_number += 1
