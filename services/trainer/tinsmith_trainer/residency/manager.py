"""Which runs are in the engine, and how one gets there: snapshot, then replay of the ledger.

A run that is not resident is rows of the ledger, files and, if it was parked lately, a copy in host
memory (`host_cache`). `ensure` brings it back: that copy, else the newest good snapshot or its
seed, and then every state-changing operation after it, computed again (`replay`).
An engine holds `max_resident_runs` runs; further runs queue for a slot (`slot_queue`). Callers hold
the lock of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith_engine import Engine, RunState
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints
from tinsmith_runtime.adapters import adapter_from_json
from tinsmith_runtime.errors import (
    CapacityExhaustedError,
    CheckpointCorruptError,
    RunClosedError,
    RunMovedError,
    TinsmithError,
)
from tinsmith_runtime.ledger import Ledger, SnapshotRecord
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests
from tinsmith_trainer.execution import snapshot_format
from tinsmith_trainer.execution.replay import Replayer
from tinsmith_trainer.metrics import (
    PARKED_BYTES,
    PARKED_RUNS,
    RESIDENT_RUNS,
    RESTORE_SECONDS,
    RESTORED_RUNS,
    SNAPSHOT_BYTES,
)
from tinsmith_trainer.residency.host_cache import ParkedState, ParkedStates
from tinsmith_trainer.residency.slot_queue import SlotQueue
from tinsmith_trainer.runs.accumulation import Accumulation
from tinsmith_trainer.runs.operations import WireCodec
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.storage_cleanup import discard_folder

logger = logging.getLogger(__name__)

_SLOT_WAIT_S = 2.0
"""How long a caller that waits for an answer waits for a slot."""
_SLOT_RETRY_S = 5.0
_RESTORING = "the run to be restored"


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The state of a run at a moment.

    Attributes:
        state: Its numbers.
        sequence_number: The last operation that they contain.
        accumulation: What became of the parts of the gradient, up to that operation.
        replay_cost_s: How long it would take to compute what no snapshot before contains.
    """

    state: RunState
    sequence_number: int
    accumulation: Accumulation
    replay_cost_s: float


class Residency:
    """Restores, parks and snapshots runs.

    Args:
        host: The engines.
        ledger: Operations and snapshots.
        store: Files of snapshots and large payloads.
        wire: The stored form of requests and results.
        runs: All runs of this trainer, to find one to park.
        max_resident_runs: Slots of each engine.
        max_parked_bytes: Host memory for the states of parked runs.
        num_history_snapshots: See `TrainerConfig.history_snapshots`.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        host: EngineHost,
        ledger: Ledger,
        store: ObjectStore,
        wire: WireCodec,
        runs: Iterable[LiveRun],
        *,
        max_resident_runs: int,
        max_parked_bytes: int,
        num_history_snapshots: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._store = store
        self._runs = runs
        self._max_resident_runs = max_resident_runs
        self._replayer = Replayer(host, ledger, store, wire)
        self._slots = SlotQueue()
        self._parked = ParkedStates(max_parked_bytes)
        self._num_history = num_history_snapshots
        self._wall_clock = wall_clock
        self._clock = 0

    async def ensure(self, run: LiveRun, *, wait_s: float | None = _SLOT_WAIT_S) -> None:
        """Bring a run into the engine.

        Args:
            run: The run, locked by the caller.
            wait_s: How long to wait for a slot; None for as long as it takes.

        Raises:
            CapacityExhaustedError: If all slots are taken by runs that are busy for so long.
            DataLossError: If neither a snapshot nor the ledger has all that is needed.
            RunClosedError: If the run was deleted while the caller waited for it.
            RunMovedError: If it was given up meanwhile.
        """
        if run.is_closed:
            raise RunClosedError(f"{run.name} was deleted; create a new run", run=run.name)
        if run.is_leaving:
            # The engine knows runs by name: this could be the slot of the one that came after it.
            raise RunMovedError(f"{run.name} is handed over", run=run.name)
        self.touch(run)
        if run.state.is_resident:
            return
        run.block(_RESTORING)
        begin_s = time.perf_counter()
        try:
            await self._restore(run, wait_s)
        except BaseException:
            # Half a run must not keep a slot; the caller may be gone, so nothing waits for this.
            loop = asyncio.get_running_loop()
            dropped = self._host.thread.submit(_drop, run.engine, run.name)
            dropped.add_done_callback(lambda _: _tell(loop, lambda: self.note_free(run)))
            raise
        finally:
            run.unblock()
        run.state.enter()
        RESIDENT_RUNS.inc()
        duration_s = time.perf_counter() - begin_s
        RESTORE_SECONDS.observe(duration_s)
        logger.info("run restored", extra={"run": run.name, "duration_s": round(duration_s, 4)})

    async def park(self, run: LiveRun) -> None:
        """Snapshot a run if it changed, and take it out of the engine, keeping a copy."""
        if not run.state.is_resident:
            await self.evict(run)
            return
        state = await self._host.call(run.engine.export_state, run.name)
        if run.state.replay_cost_s > 0:
            try:
                await self.write_copy(run, self._note_copy(run, state))
            except FencedError:
                raise
            except (TinsmithError, OSError) as error:
                # The run that needs the slot does not wait for space: the ledger has everything.
                logger.warning(
                    "parked without a snapshot", extra={"run": run.name, "problem": str(error)}
                )
        await self.evict(run)
        PARKED_RUNS.inc()
        self._parked.put(
            run.name, ParkedState(state, run.state.sequence_number, self._known_accumulation(run))
        )
        PARKED_BYTES.set(self._parked.size_bytes)

    async def evict(self, run: LiveRun) -> None:
        """Take a run out of the engine as it is; the ledger has everything."""
        self._parked.drop(run.name)
        if run.state.leave():
            RESIDENT_RUNS.dec()
        # Submitted before it is waited for: a caller that goes away does not keep the slot.
        await asyncio.wrap_future(self._host.thread.submit(_drop, run.engine, run.name))
        self.note_free(run)

    async def copy_state(self, run: LiveRun) -> StateCopy:
        """Copy the state of a run, so that it may go on while the copy is written."""
        state = await self._host.call(run.engine.export_state, run.name)
        return self._note_copy(run, state)

    def _note_copy(self, run: LiveRun, state: RunState) -> StateCopy:
        return StateCopy(
            state,
            run.state.sequence_number,
            self._known_accumulation(run),
            run.state.take_replay_cost(),
        )

    async def write_copy(self, run: LiveRun, copied: StateCopy) -> None:
        """Make a copy the snapshot that a restore begins with; the run need not be locked."""
        try:
            record = await self.write_snapshot(
                run, copied.state, copied.sequence_number, copied.accumulation
            )
            await self._add_snapshot(run, record)
        except BaseException:
            run.state.add_replay_cost(copied.replay_cost_s)
            raise
        failpoints.passing("trainer.snapshotted")
        await self._delete_old_snapshots(run)

    async def _add_snapshot(self, run: LiveRun, record: SnapshotRecord) -> None:
        try:
            await self._ledger.add_snapshot(record, run.record.epoch)
        except FencedError:
            # The folder's name has the epoch: it is no other trainer's.
            await asyncio.to_thread(self._store.delete_folder, record.folder)
            raise

    async def write_snapshot(
        self, run: LiveRun, state: RunState, sequence_number: int, accumulation: Accumulation
    ) -> SnapshotRecord:
        """Write the files of a snapshot, and return the row that makes it count."""
        failpoints.passing("trainer.snapshot")
        attributes = {
            "run": run.name,
            "sequence_number": sequence_number,
            "version": state.version,
            "has_gradient": state.has_gradient,
            "failures": list(accumulation.failures),
            "parts_seen_through": accumulation.parts_seen_through,
            "base_model": run.record.base_model,
            "fingerprint": run.engine.info.fingerprint,
        }
        folder = f"{run.name}/snapshots/{sequence_number}-e{run.record.epoch}"
        files = await asyncio.to_thread(snapshot_format.snapshot_files, state)
        written = await asyncio.to_thread(
            checkpoint_manifests.write_checkpoint, self._store, folder, files, attributes
        )
        failpoints.passing("trainer.snapshot_written")
        SNAPSHOT_BYTES.inc(written.manifest.size_bytes)
        return SnapshotRecord(
            run=run.name,
            sequence_number=sequence_number,
            version=state.version,
            folder=folder,
            sha256=written.sha256,
            create_time_s=self._wall_clock(),
        )

    def _known_accumulation(self, run: LiveRun) -> Accumulation:
        """Return the accumulation up to the state; the replay finds refused calls that follow."""
        return run.queue.accumulation.through(run.state.sequence_number)

    async def _delete_old_snapshots(self, run: LiveRun) -> None:
        for record in await self._ledger.thin_snapshots(
            run.name, now_s=self._wall_clock(), num_history=self._num_history
        ):
            await discard_folder(self._store, record.folder)

    async def _restore(self, run: LiveRun, wait_s: float | None) -> None:
        await self._take_slot(run, wait_s)
        run.queue.set_accumulation(Accumulation())
        run.state.start_restore()
        state = self._take_parked(run) or await self._load_snapshot(run)
        if state is not None:
            await self._host.call(run.engine.import_state, run.name, state)
        await self._replayer.replay(run)

    def _take_parked(self, run: LiveRun) -> RunState | None:
        """Return the copy of a run that was parked lately."""
        parked = self._parked.take(run.name)
        PARKED_BYTES.set(self._parked.size_bytes)
        RESTORED_RUNS.labels("disk" if parked is None else "memory").inc()
        if parked is None:
            return None
        run.queue.set_accumulation(parked.accumulation)
        run.state.start_restore(parked.sequence_number)
        return parked.state

    async def _load_snapshot(self, run: LiveRun) -> RunState | None:
        """Return the newest snapshot that is intact."""
        config = adapter_from_json(run.record.adapter)
        for record in await self._ledger.list_snapshots(run.name):
            try:
                manifest, files = await asyncio.to_thread(
                    checkpoint_manifests.read_checkpoint,
                    self._store,
                    record.folder,
                    sha256=record.sha256,
                )
                state = await asyncio.to_thread(
                    snapshot_format.state_from_snapshot, files, manifest.attributes, config
                )
            except CheckpointCorruptError as error:
                logger.error(
                    "snapshot is damaged, trying an older one",
                    extra={"run": run.name, "snapshot": record.folder, "problem": error.message},
                )
                continue
            run.queue.set_accumulation(_read_accumulation(manifest.attributes))
            run.state.start_restore(record.sequence_number)
            return state
        return None

    async def _take_slot(self, run: LiveRun, wait_s: float | None) -> None:
        """Wait until the engine has room, and put the run there in its initial state.

        Only the first run of the queue makes room: no two take one slot.
        """
        base_model = run.record.base_model
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        with self._slots.join(base_model, run.name) as waiting:
            while not waiting.is_first or not await self._make_room(run):
                left_s = math.inf if deadline_s is None else deadline_s - time.monotonic()
                if left_s <= 0:
                    raise CapacityExhaustedError(
                        f"all {self._max_resident_runs} slots for runs of {base_model} are busy; "
                        "retry later",
                        retry_after_s=_SLOT_RETRY_S,
                        base_model=base_model,
                    )
                run.block(f"a slot of the engine; all {self._max_resident_runs} are in use")
                await waiting.sleep(left_s)
                if run.is_leaving:
                    raise RunMovedError(f"{run.name} is handed over", run=run.name)
                if run.is_closed:
                    raise RunClosedError(f"{run.name} was deleted; create a new run", run=run.name)
            run.block(_RESTORING)
            # A run that was lost half-way may still be there.
            await self._host.call(_drop, run.engine, run.name)
            config = adapter_from_json(run.record.adapter)
            await self._host.call(run.engine.create_run, run.name, config)

    async def _make_room(self, run: LiveRun) -> bool:
        """Park a run if the engine is full; return whether there is a slot.

        Parks the run that idled longest, else the one that was computed longest ago. Nothing is
        waited for: a run whose state is in use is not chosen.
        """
        engine = run.engine
        resident = [other for other in self._runs if engine.has_run(other.name)]
        if len(resident) < self._max_resident_runs or run in resident:
            return True
        free = [
            other
            for other in resident
            if other.lock.is_free and (other.state.was_computed or not other.is_ready)
        ]
        if not free:
            return False
        chosen = min(free, key=lambda other: (bool(other.queue), other.state.last_used))
        async with chosen.lock:
            await self.park(chosen)
        return True

    def touch(self, run: LiveRun) -> None:
        """Note that a run is used now."""
        self._clock += 1
        run.state.use(self._clock)

    def gives_way(self, ready: Sequence[LiveRun]) -> LiveRun | None:
        """Return which of these runs of an engine is to be parked for one that waits, if any.

        Runs that always have work would else never let another one in.
        """
        candidates = [run for run in ready if run.state.was_computed]
        if not candidates or not self._slots.wants_slot(candidates[0].record.base_model):
            return None
        self._slots.wake_first(candidates[0].record.base_model)
        return min(candidates, key=lambda run: run.state.last_used)

    def note_free(self, run: LiveRun) -> None:
        """Note that a run is at rest or gone: its slot may be another one's now."""
        self._slots.wake_first(run.record.base_model)
        if not run.is_staying:
            self._slots.wake(run.record.base_model, run.name)


def _read_accumulation(attributes: Mapping[str, Any]) -> Accumulation:
    return Accumulation(
        tuple(int(number) for number in attributes["failures"]), attributes["parts_seen_through"]
    )


def _drop(engine: Engine, run: str) -> None:
    if engine.has_run(run):
        engine.drop_run(run)


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    # The loop may have been closed before the engine came to it.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
