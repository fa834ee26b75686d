"""A run that this trainer holds: its record, its queue, its state, and whether it goes on here.

Each part has one owner and is changed by its methods alone: `queue` says what is next, `state` what
the engine contains, and the run itself whether it goes on here. Nothing here waits, computes or
stores: the cycle does that. Everything belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Literal

from tinsmith_engine import Engine
from tinsmith_runtime.ledger import RunRecord
from tinsmith_trainer.runs.resident_state import ResidentState
from tinsmith_trainer.runs.run_queue import RunQueue
from tinsmith_trainer.runs.shared_gate import Gate


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
    """One run: whether it goes on here, and its parts.

    Attributes:
        record: The run as the ledger has it.
        engine: The engine of its base model.
        queue: Its operations.
        state: Its state in the engine.
        is_closed: Whether the run was deleted.
        is_leaving: Whether another trainer is to go on with the run.
        obstacle: What keeps the run from going on, in words, if it is not its own queue.
        lock: Held while the state in the engine is computed, restored, parked or exported.
        gate: Passed by requests while they are made durable.
        asked_s: When the run was asked for last, monotonic seconds.

    Args:
        on_free: Called when the run's state is no longer in use, and it may go on.
    """

    def __init__(
        self,
        record: RunRecord,
        engine: Engine,
        queue: RunQueue,
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        self.record = record
        self.engine = engine
        self.queue = queue
        self.state = ResidentState()
        self.is_closed = False
        self.is_leaving = False
        self.obstacle = ""
        self.lock = RunLock(on_free)
        self.gate = Gate()
        self.asked_s = time.monotonic()

    @property
    def name(self) -> str:
        """The resource name."""
        return self.record.name

    @property
    def project(self) -> str:
        """The tenant, the second part of the name."""
        return self.record.name.split("/")[1]

    @property
    def is_staying(self) -> bool:
        """Whether this trainer goes on with the run: it is neither deleted nor handed over."""
        return not self.is_closed and not self.is_leaving

    @property
    def is_ready(self) -> bool:
        """Whether the run goes on here and its next operation can be computed."""
        return self.is_staying and self.queue.is_ready

    def note_asked(self) -> None:
        """Note that the run is used now."""
        self.asked_s = time.monotonic()

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing of the run is in the engine, waits, or is to be told by itself."""
        return (
            self.is_staying
            and not self.queue
            and not self.queue.running
            and not self.state.is_resident
            and not self.record.replay_diverged
        )

    def close(self) -> None:
        """Note that the run is being deleted, and tell every caller that waits for it."""
        self.is_closed = True
        self.queue.notify()

    def reopen(self) -> None:
        """Note that the run could not be deleted."""
        self.is_closed = False

    def leave(self) -> None:
        """Note that another trainer is to go on, and tell every caller that waits for the run."""
        self.is_leaving = True
        self.queue.notify()

    def stay(self) -> None:
        """Note that the run could not be handed over."""
        self.is_leaving = False

    def block(self, obstacle: str) -> None:
        """Say what keeps the run from going on."""
        self.obstacle = obstacle

    def unblock(self) -> None:
        """Say that nothing but its queue keeps the run from going on."""
        self.obstacle = ""

    def commit_version(self, version: int) -> None:
        """Note the version that the ledger has now."""
        self.record = dataclasses.replace(self.record, version=version)

    def note_divergence(self) -> None:
        """Note that a replay gave other bits than the first execution."""
        self.record = dataclasses.replace(self.record, replay_diverged=True)

    def put_back(self) -> None:
        """Let the run go on after work that held its lock."""
        self.unblock()
        self.queue.stop()
        self.lock.release()
