"""Watches for sequence numbers that do not arrive, and gives them up in time.

Operations behind a missing number are held, for `gap_timeout_s` after the last arrival of the run
and for ten times as long at most. Then the missing numbers are consumed in the ledger, so that a
late arrival is told. The held operations fail, naming the number that they waited for. The ledger
decides which was first, the arrival or the timeout.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from tinsmith_runtime.errors import SequenceGapError
from tinsmith_runtime.ledger import Ledger, OperationState
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_trainer.cycle.committer import Committer
from tinsmith_trainer.ownership.run_registry import RunRegistry
from tinsmith_trainer.residency.manager import Residency
from tinsmith_trainer.runs.operations import WireCodec
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.run_queue import RunQueue

logger = logging.getLogger(__name__)

_CHECK_S = 0.25
_MAX_PATIENCE = 10
_MANY_SUBMITS = 8
"""So many calls between two looks mean that more may wait to be read, in any order."""
_LOCK_TIMEOUT_S = 5.0
"""A run whose state is in use for longer is looked at again with the next check."""


class GapWatcher:
    """Expires the gaps of all runs.

    Args:
        timeout_s: How long operations wait for a number.
        registry: The runs.
        residency: Takes a run whose operations failed out of the engine.
        ledger: Where numbers are consumed.
        committer: Ends the operations that waited.
        wire: The stored form of errors.
    """

    def __init__(
        self,
        timeout_s: float,
        registry: RunRegistry,
        residency: Residency,
        ledger: Ledger,
        committer: Committer,
        wire: WireCodec,
    ) -> None:
        self._timeout_s = timeout_s
        self._registry = registry
        self._residency = residency
        self._timers: WeakKeyDictionary[LiveRun, GapTimer] = WeakKeyDictionary()
        self._ledger = ledger
        self._committer = committer
        self._wire = wire
        self._flooded_s = float("-inf")
        self._num_submits = 0

    async def watch(self) -> None:
        """Look at all runs again and again.

        Raises:
            FencedError: If another process holds a run.
        """
        while True:
            await asyncio.sleep(min(_CHECK_S, self._timeout_s / 4))
            now_s = time.monotonic()
            if self._registry.num_submits - self._num_submits >= _MANY_SUBMITS:
                self._flooded_s = now_s
            self._num_submits = self._registry.num_submits
            expired = [
                run
                for run in self._registry.runs
                if self._timer(run).is_overdue(
                    run.queue, now_s, self._timeout_s, flooded_s=self._flooded_s
                )
            ]
            # Beside each other: a run whose state is in use does not hold up the others.
            answers = await asyncio.gather(*map(self._expire, expired), return_exceptions=True)
            for run, answer in zip(expired, answers, strict=True):
                if isinstance(answer, FencedError | asyncio.CancelledError):
                    raise answer
                if isinstance(answer, BaseException):
                    logger.error("gap not closed", exc_info=answer, extra={"run": run.name})

    def _timer(self, run: LiveRun) -> GapTimer:
        return self._timers.setdefault(run, GapTimer())

    async def _expire(self, run: LiveRun) -> None:
        """Fail the operations of a run that waited too long for a number."""
        try:
            async with asyncio.timeout(_LOCK_TIMEOUT_S):
                await run.lock.acquire()
        except TimeoutError:
            logger.warning("gap not closed yet: the run is in use", extra={"run": run.name})
            return
        try:
            await self._expire_alone(run)
        finally:
            run.lock.release()

    async def _expire_alone(self, run: LiveRun) -> None:
        missing = run.queue.missing_numbers()
        if not missing or not run.is_staying:
            return
        why = f"did not arrive within {self._timeout_s:g} s"
        last = max(run.queue)
        end = run.queue.end_of_client(missing[0])
        if end is not None:
            # What the next client sent does not depend on what the one before did not.
            why, last = "was not delivered before its client was gone", end
            missing = [number for number in missing if number <= last]
        error = SequenceGapError(
            f"sequence number {missing[0]} of {run.name} {why}; the operations that waited for it "
            f"failed, go on with number {last + 1}",
            run=run.name,
            missing=missing[0],
        )
        held = [run.queue[number] for number in sorted(run.queue) if number <= last]
        given_up = await self._ledger.give_up(
            run.name, run.record.epoch, missing, self._wire.encode_error(error)
        )
        if given_up != missing:
            run.queue.give_up(given_up)
            await self._note_arrivals(run, sorted(set(missing) - set(given_up)))
            self._timer(run).restart()
            return
        if held:
            await self._committer.commit(
                run,
                [
                    self._committer.outcome(run, operation, run.record.version, error=error)
                    for operation in held
                ],
            )
        run.queue.give_up(missing)
        # What these failures mean for the accumulation is worked out by the replay.
        await self._residency.evict(run)
        self._timer(run).restart()

    async def _note_arrivals(self, run: LiveRun, numbers: Sequence[int]) -> None:
        """Note numbers that are in the ledger although the run was not told.

        One that was accepted at the last moment comes into the queue by itself. One that ended, as
        by a try of this method that broke off between its two writes, is no longer waited for: else
        the run would never go on.
        """
        for number in numbers:
            record = await self._ledger.get_operation(run.name, number)
            if record is not None and record.state is not OperationState.PENDING:
                run.queue.consume(record)


class GapTimer:
    """How long the missing number of one run has been waited for."""

    def __init__(self) -> None:
        self._held_since_s: float | None = None
        self._num_arrivals = 0
        self._last_arrival_s = 0.0

    def restart(self) -> None:
        """Wait anew: the gap was closed, or another one is looked at."""
        self._held_since_s = None

    def is_overdue(
        self,
        queue: RunQueue,
        now_s: float,
        timeout_s: float,
        *,
        flooded_s: float = float("-inf"),
    ) -> bool:
        """Return whether the next number is waited for no longer, and note what arrived.

        A busy pod takes calls out of its queue in any order: the missing one may be behind those
        that come now. So the timeout begins anew with each call of the run, and while many calls of
        any run come. Ten timeouts are the bound.

        Args:
            queue: The operations of the run.
            now_s: A monotonic clock.
            timeout_s: How long a number is waited for while nothing arrives.
            flooded_s: When many calls came last.
        """
        missing = queue.missing_numbers()
        if not missing:
            self._held_since_s = None
            return False
        if queue.end_of_client(missing[0]) is not None:
            return True
        if self._held_since_s is None:
            self._held_since_s = now_s
        if queue.num_arrivals != self._num_arrivals:
            self._num_arrivals = queue.num_arrivals
            self._last_arrival_s = now_s
        waited_s = now_s - max(self._held_since_s, self._last_arrival_s, flooded_s)
        is_endless = now_s - self._held_since_s >= _MAX_PATIENCE * timeout_s
        return waited_s >= timeout_s or is_endless
