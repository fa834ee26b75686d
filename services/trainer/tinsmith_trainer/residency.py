"""Which runs are in the engine, and how one gets there: snapshot, then replay of the ledger.

A run that is not resident is nothing but rows and files. `ensure` brings it back: the newest good
snapshot, or its seed, and then every state-changing operation after it, computed again. Each
replayed result is compared with the one that was acknowledged; a difference is recorded on the run,
never hidden. The callers hold the lock of the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterable

from tinsmith_engine import Engine, RunState
from tinsmith_engine import codec as engine_codec
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints, manifests
from tinsmith_runtime.errors import (
    CapacityExhaustedError,
    CheckpointCorruptError,
    DataLossError,
    RunClosedError,
    StorageFullError,
)
from tinsmith_runtime.ledger import Ledger, OperationRecord, OperationState, SnapshotRecord, records
from tinsmith_runtime.storage import ObjectStore
from tinsmith_trainer import state_files
from tinsmith_trainer.executor import compute_slice
from tinsmith_trainer.live_run import LiveRun
from tinsmith_trainer.metrics import REPLAYED_OPERATIONS, RESIDENT_RUNS, SNAPSHOT_BYTES
from tinsmith_trainer.payloads import read_payload
from tinsmith_trainer.work import Kind, WireCodec

logger = logging.getLogger(__name__)

_NUM_KEPT_SNAPSHOTS = 2
_PAGE = 100


class Residency:
    """Restores, parks and snapshots runs.

    Args:
        host: The engines.
        ledger: Operations and snapshots.
        store: Files of snapshots and large payloads.
        wire: The stored form of requests and results.
        runs: All runs of this trainer, to find one to park.
        max_resident_runs: Places in each engine.
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
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._store = store
        self._wire = wire
        self._runs = runs
        self._max_resident_runs = max_resident_runs
        self._clock = 0
        self._places = asyncio.Lock()

    async def ensure(self, run: LiveRun) -> None:
        """Bring a run into the engine.

        Raises:
            CapacityExhaustedError: If all places are taken by runs that are busy.
            DataLossError: If neither a snapshot nor the ledger has all that is needed.
            RunClosedError: If the run was deleted while the caller waited for it.
        """
        if run.is_closed:
            raise RunClosedError(f"{run.name} was deleted; create a new run", run=run.name)
        self._clock += 1
        run.last_used = self._clock
        if run.is_resident:
            return
        run.obstacle = "the run to be restored"
        begin_s = time.perf_counter()
        try:
            await self._restore(run)
        except BaseException:
            # Half a run must not keep a place; nobody may wait for this.
            self._host.thread.submit(_drop, run.engine, run.name)
            raise
        finally:
            run.obstacle = ""
        run.is_resident = True
        run.weights_serial += 1
        RESIDENT_RUNS.inc()
        logger.info(
            "run restored",
            extra={"run": run.name, "duration_s": round(time.perf_counter() - begin_s, 4)},
        )

    async def park(self, run: LiveRun) -> None:
        """Snapshot a run if it changed, and take it out of the engine."""
        if run.is_resident and run.replay_cost_s > 0:
            try:
                await self.snapshot(run)
            except (StorageFullError, OSError) as error:
                # Whoever needs the place does not wait for space: the ledger has everything.
                logger.warning(
                    "parked without a snapshot", extra={"run": run.name, "problem": str(error)}
                )
        await self.evict(run)

    async def evict(self, run: LiveRun) -> None:
        """Take a run out of the engine as it is; the ledger has everything."""
        if run.is_resident:
            run.is_resident = False
            RESIDENT_RUNS.dec()
        # Submitted before it is waited for: a caller that goes away does not keep the place.
        await asyncio.wrap_future(self._host.thread.submit(_drop, run.engine, run.name))

    async def snapshot(self, run: LiveRun) -> None:
        """Save the state of a run, up to the last operation that it contains."""
        state = await self._host.call(run.engine.export_state, run.name)
        # Refused calls that follow are found again by the replay.
        failures = [number for number in run.failures if number <= run.state_sequence_number]
        record = await self.write_snapshot(run, state, run.state_sequence_number, failures)
        await self._ledger.add_snapshot(record, run.record.epoch)
        run.replay_cost_s = 0.0
        await self._delete_old_snapshots(run)

    async def write_snapshot(
        self, run: LiveRun, state: RunState, sequence_number: int, failures: list[int]
    ) -> SnapshotRecord:
        """Write the files of a snapshot, and return the row that makes it count."""
        failpoints.passing("trainer.snapshot")
        attributes = {
            "run": run.name,
            "sequence_number": sequence_number,
            "version": state.version,
            "has_gradient": state.has_gradient,
            "failures": list(failures),
            "base_model": run.record.base_model,
            "fingerprint": run.engine.info.fingerprint,
        }
        folder = f"{run.name}/snapshots/{sequence_number}-e{run.record.epoch}"
        files = await asyncio.to_thread(state_files.snapshot_files, state)
        written = await asyncio.to_thread(
            manifests.write_checkpoint, self._store, folder, files, attributes
        )
        SNAPSHOT_BYTES.inc(written.manifest.size_bytes)
        return SnapshotRecord(
            run=run.name,
            sequence_number=sequence_number,
            version=state.version,
            folder=folder,
            sha256=written.sha256,
            create_time_s=time.time(),
        )

    async def _delete_old_snapshots(self, run: LiveRun) -> None:
        kept = (await self._ledger.list_snapshots(run.name))[:_NUM_KEPT_SNAPSHOTS]
        for record in await self._ledger.delete_snapshots(run.name, kept[-1].sequence_number):
            await asyncio.to_thread(self._store.delete_folder, record.folder)

    async def _restore(self, run: LiveRun) -> None:
        run.failures = []
        run.state_sequence_number = 0
        run.replay_cost_s = 0.0
        state = await self._load_snapshot(run)
        config = engine_codec.adapter_from_json(run.record.adapter)
        # Two runs that are restored at once must not both take the last place.
        async with self._places:
            await self._make_room(run)
            # A run that was lost half-way may still be there.
            await self._host.call(_drop, run.engine, run.name)
            if state is None:
                await self._host.call(run.engine.create_run, run.name, config)
            else:
                await self._host.call(run.engine.import_state, run.name, state)
        await self._replay(run)

    async def _load_snapshot(self, run: LiveRun) -> RunState | None:
        """Return the newest snapshot that is intact."""
        config = engine_codec.adapter_from_json(run.record.adapter)
        for record in await self._ledger.list_snapshots(run.name):
            try:
                manifest, files = await asyncio.to_thread(
                    manifests.read_checkpoint, self._store, record.folder, sha256=record.sha256
                )
                state = await asyncio.to_thread(
                    state_files.state_from_snapshot, files, manifest.attributes, config
                )
            except CheckpointCorruptError as error:
                logger.error(
                    "snapshot is damaged, trying an older one",
                    extra={"run": run.name, "snapshot": record.folder, "problem": error.message},
                )
                continue
            run.failures = [int(number) for number in manifest.attributes["failures"]]
            run.state_sequence_number = record.sequence_number
            return state
        return None

    async def _make_room(self, run: LiveRun) -> None:
        """Park a run if the engine is full: the one that idled longest, else one that waits."""
        engine = run.engine
        resident = [other for other in self._runs if engine.has_run(other.name)]
        if len(resident) < self._max_resident_runs:
            return
        free = [other for other in resident if not other.running and not other.lock.locked()]
        if not free:
            raise CapacityExhaustedError(
                f"all {self._max_resident_runs} places for runs of {run.record.base_model} are "
                "busy; retry later",
                retry_after_s=5.0,
                base_model=run.record.base_model,
            )
        chosen = min(free, key=lambda other: (bool(other.queue), other.last_used))
        async with chosen.lock:
            await self.park(chosen)

    async def _replay(self, run: LiveRun) -> None:
        """Compute again what was acknowledged after the snapshot."""
        while run.state_sequence_number + 1 < run.next_sequence_number:
            page = await self._ledger.operations_from(
                run.name, run.state_sequence_number + 1, limit=_PAGE
            )
            finished = [r for r in page if r.sequence_number < run.next_sequence_number]
            if not finished:
                raise DataLossError(
                    f"operation {run.state_sequence_number + 1} of {run.name} is not in the "
                    "ledger; restore the ledger from a backup",
                    run=run.name,
                )
            for record in finished:
                await self._replay_one(run, record)
                run.state_sequence_number = record.sequence_number

    async def _replay_one(self, run: LiveRun, record: OperationRecord) -> None:
        is_success = record.state is OperationState.SUCCEEDED
        match record.kind:
            case Kind.FORWARD_BACKWARD | Kind.OPTIM_STEP if is_success:
                await self._compute_again(run, record)
            case Kind.FORWARD_BACKWARD | records.GIVEN_UP_KIND:
                run.failures.append(record.sequence_number)
            case Kind.OPTIM_STEP if record.plan is not None:
                await self._host.call(run.engine.clear_gradient, run.name)
                run.failures.clear()
            case Kind.LOAD_CHECKPOINT if is_success:
                # The snapshot taken with the load is gone or damaged.
                await self._load_again(run, record)
            case _:
                # A refused call changed nothing, nor did a forward or a save.
                pass

    async def _compute_again(self, run: LiveRun, record: OperationRecord) -> None:
        failpoints.passing("trainer.replay")
        payload = await read_payload(self._store, record)
        kind = Kind(record.kind)
        work = self._wire.decode_work(kind, payload)
        outcome = await self._host.call(
            compute_slice,
            run.engine,
            run.name,
            [(record.sequence_number, work)],
            # The step succeeded, so its sender knew of every failure before it.
            [] if kind is Kind.OPTIM_STEP else run.failures,
        )
        computed = outcome.computed[0]
        run.replay_cost_s += computed.duration_s
        if kind is Kind.OPTIM_STEP:
            run.failures.clear()
        is_equal = (
            computed.result is not None
            and self._wire.encode_result(kind, computed.result) == record.result
        )
        REPLAYED_OPERATIONS.labels("equal" if is_equal else "diverged").inc()
        if not is_equal:
            logger.error(
                "replay gave other bits than the first execution",
                extra={"run": run.name, "sequence_number": record.sequence_number},
            )
            await self._ledger.mark_diverged(run.name)
            run.record = dataclasses.replace(run.record, replay_diverged=True)

    async def _load_again(self, run: LiveRun, record: OperationRecord) -> None:
        work = self._wire.decode_work(Kind.LOAD_CHECKPOINT, await read_payload(self._store, record))
        checkpoint = await self._ledger.get_checkpoint(getattr(work, "checkpoint", ""))
        if checkpoint is None:
            raise DataLossError(
                f"{run.name} can not be restored: the snapshot of operation "
                f"{record.sequence_number} is damaged and the checkpoint it loaded is deleted",
                run=run.name,
            )
        manifest, files = await asyncio.to_thread(
            manifests.read_checkpoint, self._store, checkpoint.folder, sha256=checkpoint.sha256
        )
        await self._host.call(
            state_files.apply_checkpoint,
            run.engine,
            run.name,
            files,
            manifest.attributes,
            include_optimizer=getattr(work, "include_optimizer", False),
        )
        run.failures.clear()


def _drop(engine: Engine, run: str) -> None:
    if engine.has_run(run):
        engine.drop_run(run)
