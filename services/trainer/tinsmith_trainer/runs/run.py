"""A run as its trainer knows it: what waits, what is next, and why the next one waits.

Sequence numbers are executed without gaps. An operation that arrives early is *held* until the
numbers before it have arrived; numbers of requests that were refused count as arrived. Nothing here
waits, computes or stores: the cycle does that, this is its bookkeeping, owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tinsmith_engine import Engine
from tinsmith_runtime.ledger import OperationRecord, RunRecord
from tinsmith_runtime.ledger.records import GIVEN_UP_KIND
from tinsmith_runtime.storage.checkpoint_manifests import WrittenManifest
from tinsmith_trainer.runs.operations import Kind, Work
from tinsmith_trainer.runs.shared_gate import Gate

_NUM_RECENT = 32


@dataclass(frozen=True, slots=True)
class Load:
    """What an operation takes of the limits of a queue."""

    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class QueuedOperation:
    """An accepted operation that has no result yet.

    Attributes:
        record: Its row.
        work: What it asks for.
        load: What it holds of the queue's limits.
    """

    record: OperationRecord
    work: Work
    load: Load

    @property
    def sequence_number(self) -> int:
        """Its place in the run."""
        return self.record.sequence_number

    @property
    def num_tokens(self) -> int:
        """Tokens to compute; 0 for what is no batch."""
        return self.load.num_tokens


class RunLock(asyncio.Lock):
    """A lock that says whether it can be had at once, and tells when it was released.

    Args:
        on_release: Called after each release.
    """

    def __init__(self, on_release: Callable[[], None]) -> None:
        super().__init__()
        self._on_release = on_release
        self._num_waiting = 0

    @property
    def is_free(self) -> bool:
        """Whether `acquire` returns without waiting."""
        return not self.locked() and not self._num_waiting

    async def acquire(self) -> Literal[True]:
        """Wait for the lock, first come, first served."""
        self._num_waiting += 1
        try:
            return await super().acquire()
        finally:
            self._num_waiting -= 1

    def release(self) -> None:
        """Let the next one in."""
        super().release()
        self._on_release()


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
        has_had_turn: Whether it was computed since it came into the engine.
        suspect_number: Operations up to this number are computed alone: one of them may have broken
            an engine call.
        is_closed: Whether the run was deleted.
        is_being_saved: Whether a snapshot of the run is being written.
        is_leaving: Whether another trainer is to go on with the run.
        state_sequence_number: The last operation that the engine's state contains.
        replay_cost_s: How long it would take to compute what no snapshot contains.
        last_used: Order of use, to find the run that idled longest.
        weights_serial: Raised whenever the weights may have changed.
        published: The last sampler checkpoint written for other processes, and of which serial.
        outdated: Folders of sampler checkpoints before it, oldest first.
        held_since_s: Since when the next number has been missing; None if it is not.
        num_arrivals: Calls that were accepted or refused, and of these, `num_arrivals_seen`, those
            that came before `last_arrival_s`.
        latest_revision: Revision of the operation that finished last.
        obstacle: What keeps the run from going on, in words, if it is not its own queue.

    Args:
        on_free: Called when the run's state is no longer in use, and it may go on.
    """

    def __init__(
        self, record: RunRecord, engine: Engine, on_free: Callable[[], None] = lambda: None
    ) -> None:
        self.record = record
        self.engine = engine
        self.queue: dict[int, QueuedOperation] = {}
        self.running: frozenset[int] = frozenset()
        self.next_sequence_number = 1
        self.failures: list[int] = []
        self.is_resident = False
        self.has_had_turn = False
        self.suspect_number = 0
        self.is_closed = False
        self.is_leaving = False
        self.is_being_saved = False
        self.state_sequence_number = 0
        self.replay_cost_s = 0.0
        self.last_used = 0
        self.obstacle = ""
        self.weights_serial = 0
        self.published: tuple[int, WrittenManifest] | None = None
        self.outdated: list[str] = []
        self.held_since_s: float | None = None
        self.num_arrivals = 0
        self.num_arrivals_seen = 0
        self.last_arrival_s = 0.0
        self.latest_revision = 0
        self.lock = RunLock(on_free)
        """Held while the state in the engine is computed, restored, parked or published."""
        self.gate = Gate()
        """Passed by requests while they are made durable."""
        self._finished_ahead: dict[int, str] = {}
        self._client_ends: list[int] = []
        self._recent: deque[OperationRecord] = deque(maxlen=_NUM_RECENT)
        self._changed = asyncio.Event()

    @property
    def name(self) -> str:
        """The resource name."""
        return self.record.name

    @property
    def project(self) -> str:
        """The tenant, the second part of the name."""
        return self.record.name.split("/")[1]

    @property
    def next_free_number(self) -> int:
        """The number that a client's next call carries."""
        number = self.next_sequence_number
        while number in self.queue or number in self._finished_ahead:
            number += 1
        return number

    @property
    def highest_number(self) -> int:
        """The highest number that has arrived; 0 if none has."""
        return max(self.next_sequence_number - 1, *self.queue, *self._finished_ahead, 0)

    @property
    def is_ready(self) -> bool:
        """Whether the operation that is next has arrived and none is being computed."""
        is_staying = not self.is_closed and not self.is_leaving
        return is_staying and self.next_sequence_number in self.queue and not self.running

    def accept(self, operation: QueuedOperation) -> None:
        """Add an operation to the queue."""
        self.queue[operation.sequence_number] = operation
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

    def note_client_gone(self) -> None:
        """Note that what has not arrived below the highest number never will."""
        ends = {end for end in self._client_ends if end >= self.next_sequence_number}
        self._client_ends = sorted({*ends, self.highest_number})

    def end_of_client(self, number: int) -> int | None:
        """Return the last number of the client that a number belonged to, if that is gone."""
        return next((end for end in self._client_ends if end >= number), None)

    def num_before(self, sequence_number: int) -> int:
        """Return how many operations of the run are executed before one of its queue."""
        if sequence_number in self.running:
            return 0
        return sum(number < sequence_number for number in self.queue)

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
