"""The life of results: noted when a client gets them, dropped in time, and their files with them.

That a result was retrieved is noted in memory and written with the next sweep, so that reading
costs no write. Notes that a crash takes can only make a result stay longer. A result without a note
may have been retrieved shortly before this process took the run over, and is kept so much longer.

A sweep drops what is due of one run after another, in parts, each under the lock of the run: not
beside a replay, which reads what is being dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from tinsmith_runtime.errors import CapacityExhaustedError, TinsmithError
from tinsmith_runtime.ledger import Cutoffs, Ledger, OperationRecord, OperationState
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.storage import ObjectStore
from tinsmith_trainer.execution.step_history import BOUNDARY_KINDS
from tinsmith_trainer.metrics import EXPIRED
from tinsmith_trainer.ownership.lease import Lease
from tinsmith_trainer.ownership.run_registry import RunRegistry
from tinsmith_trainer.runs.request_payloads import payload_folder
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.storage_cleanup import discard_folder

logger = logging.getLogger(__name__)

_INTERVAL_S = 60.0
_FILES_INTERVAL_S = 3600.0
_ASLEEP_INTERVAL_S = 3600.0
_ASLEEP_PAGE = 500
"""Runs that sleep are looked at in parts, so that those in use are not kept waiting."""
_MIN_FILE_AGE_S = 3600.0
"""A younger file may belong to a request that is being accepted."""
_FILES_PAGE = 100
_LOCK_TIMEOUT_S = 5.0
"""A run whose state is in use for longer is looked at again with the next sweep."""


class Retrievals:
    """Which results clients got, since they were last written down.

    Args:
        clock: Seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._times_s: defaultdict[str, dict[int, float]] = defaultdict(dict)

    def note(self, records: Iterable[OperationRecord]) -> None:
        """Note that operations are told to a client; one that has no result does not count."""
        for record in records:
            if record.state is not OperationState.PENDING and record.retrieve_time_s is None:
                self._times_s[record.run].setdefault(record.sequence_number, self._clock())

    def take(self, run: str) -> dict[int, float]:
        """Return the notes of a run, and forget them."""
        return self._times_s.pop(run, {})

    def put_back(self, run: str, times_s: dict[int, float]) -> None:
        """Note again what could not be written."""
        self._times_s[run] = {**self._times_s[run], **times_s}

    def runs(self) -> list[str]:
        """Return the runs that have notes."""
        return list(self._times_s)


class RetentionSweeper:
    """Drops what is old enough, of all runs of this trainer.

    Args:
        registry: The runs.
        ledger: Holds results, requests and rows.
        store: Holds large requests.
        lease: Whether the runs are still those of this process.
        retrievals: What clients got.
        retrieved_s: How long a result is kept after it was first retrieved.
        unretrieved_s: How long after its end otherwise.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        registry: RunRegistry,
        ledger: Ledger,
        store: ObjectStore,
        lease: Lease,
        retrievals: Retrievals,
        *,
        retrieved_s: float,
        unretrieved_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._store = store
        self._lease = lease
        self._retrievals = retrievals
        self._retrieved_s = retrieved_s
        self._unretrieved_s = unretrieved_s
        self._clock = clock
        self._first_seen_s: WeakKeyDictionary[LiveRun, float] = WeakKeyDictionary()
        self._files_at_s: WeakKeyDictionary[LiveRun, float] = WeakKeyDictionary()
        self._begin_s = clock()
        self._asleep_at_s = self._begin_s + _ASLEEP_INTERVAL_S
        self._asleep: list[str] = []

    async def watch(self) -> None:
        """Sweep again and again.

        Raises:
            FencedError: If another process holds a run.
        """
        while True:
            await self.sweep()
            await asyncio.sleep(_INTERVAL_S)

    async def sweep(self) -> None:
        """Look at every run once.

        Raises:
            FencedError: If another process holds a run.
        """
        await self.flush()
        for run in self._registry.runs:
            await self._try_sweep(run)
        await self._sweep_asleep()

    async def _try_sweep(self, run: LiveRun) -> None:
        try:
            await self._sweep_run(run)
        except FencedError as error:
            if _is_ours(self._registry, run):
                raise
            logger.info("run is gone", extra={"run": run.name, "problem": error.message})
        except (TinsmithError, OSError) as error:
            logger.warning("not swept", extra={"run": run.name, "problem": str(error)})

    async def _sweep_asleep(self) -> None:
        """Drop what is due of some runs that sleep; each takes a place no longer than that."""
        if not self._asleep and self._clock() >= self._asleep_at_s:
            self._asleep_at_s = self._clock() + _ASLEEP_INTERVAL_S
            self._asleep = [record.name for record in await self._ledger.list_held_runs()]
        cutoffs = self._cutoffs_at(self._begin_s)
        page, self._asleep = self._asleep[:_ASLEEP_PAGE], self._asleep[_ASLEEP_PAGE:]
        for index, name in enumerate(page):
            if self._registry.held(name) is not None or not await self._ledger.has_expirable(
                name, cutoffs
            ):
                continue
            try:
                run = await self._registry.wake(name)
            except CapacityExhaustedError:
                self._asleep = page[index:] + self._asleep
                return
            if run is not None:
                await self._try_sweep(run)
                await self._registry.rest(run)

    async def flush(self) -> None:
        """Write down which results were retrieved."""
        for name in self._retrievals.runs():
            times_s = self._retrievals.take(name)
            try:
                # One that is gone from here needs no notes any more.
                record = await self._ledger.get_held_run(name)
                if record is not None:
                    await self._ledger.note_retrieved(name, record.epoch, times_s)
            except FencedError:
                continue
            except (TinsmithError, OSError) as error:
                self._retrievals.put_back(name, times_s)
                logger.warning("retrievals not noted", extra={"run": name, "problem": str(error)})

    async def _sweep_run(self, run: LiveRun) -> None:
        cutoffs = self._cutoffs(run)
        while await self._ledger.has_expirable(run.name, cutoffs):
            if not await self._expire(run, cutoffs):
                break
        if self._clock() >= self._files_at_s.get(run, 0.0):
            self._files_at_s[run] = self._clock() + _FILES_INTERVAL_S
            await self._delete_files(run)

    def _cutoffs(self, run: LiveRun) -> Cutoffs:
        return self._cutoffs_at(self._first_seen_s.setdefault(run, self._clock()))

    def _cutoffs_at(self, first_seen_s: float) -> Cutoffs:
        now_s = self._clock()
        # A process before this one may have died with its notes of the last minutes.
        is_known_since_s = now_s - first_seen_s
        grace_s = self._retrieved_s if is_known_since_s < self._retrieved_s else 0.0
        return Cutoffs(
            now_s=now_s,
            retrieved_s=now_s - self._retrieved_s,
            unretrieved_s=now_s - self._unretrieved_s - grace_s,
            boundary_kinds=BOUNDARY_KINDS,
        )

    async def _expire(self, run: LiveRun, cutoffs: Cutoffs) -> bool:
        """Drop one part of what is due; return whether it is worth going on."""
        try:
            async with asyncio.timeout(_LOCK_TIMEOUT_S):
                await run.lock.acquire()
        except TimeoutError:
            return False
        try:
            if not _is_ours(self._registry, run):
                return False
            dropped = await self._ledger.expire(run.name, run.record.epoch, cutoffs)
        finally:
            run.lock.release()
        for snapshot in dropped.snapshots:
            await discard_folder(self._store, snapshot.folder)
        EXPIRED.labels("snapshot").inc(len(dropped.snapshots))
        EXPIRED.labels("result").inc(dropped.num_results)
        EXPIRED.labels("request").inc(dropped.num_payloads)
        EXPIRED.labels("row").inc(dropped.num_rows)
        return not dropped.is_empty

    async def _delete_files(self, run: LiveRun) -> None:
        """Delete the stored requests that no operation names, any more or at all."""
        found = await asyncio.to_thread(self._store.list_folder, payload_folder(run.name))
        newest_s = self._clock() - _MIN_FILE_AGE_S
        paths = sorted(info.path for info in found if info.modified_time_s < newest_s)
        for begin in range(0, len(paths), _FILES_PAGE):
            page = paths[begin : begin + _FILES_PAGE]
            # No request is accepted between the question and the deletion: it could be the one
            # that is in an old file. A trainer that takes the run waits for this one's lease.
            async with run.gate.closed():
                if not _is_ours(self._registry, run) or not self._lease.is_current:
                    return
                named = await self._ledger.named_payloads(run.name, run.record.epoch, page)
                for path in page:
                    if path not in named and self._lease.is_current:
                        await asyncio.to_thread(self._store.delete, path)
                        EXPIRED.labels("file").inc()


def _is_ours(registry: RunRegistry, run: LiveRun) -> bool:
    """Whether this process goes on with a run."""
    return run in registry.runs and run.is_staying
