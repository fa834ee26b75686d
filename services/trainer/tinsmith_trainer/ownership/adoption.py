"""Which runs this trainer holds: adopted, parked, handed over, deleted, as the scheduler says.

On a ledger of its own a trainer goes on with all runs of the ledger when it starts. On a shared one
it begins with none: another process may hold them, and only the scheduler's epoch decides. A run
that is adopted under a higher epoch is read anew, because another trainer may have written since.

A run that nothing asks for sleeps: it is held, but only the ledger knows it. It sleeps once its
session ended, or after ten minutes without a call, if it is out of the engine and has nothing to
do. The next call for it takes it in again. So the runs of the past take no memory and no place.

Runs are locked one by one, so that one that waits for the store holds up no other. Files that are
no longer needed are removed in the background; the ledger remembers them until they are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints
from tinsmith_runtime.adapters import adapter_from_json
from tinsmith_runtime.errors import CapacityExhaustedError, TinsmithError
from tinsmith_runtime.keyed_locks import KeyedLocks
from tinsmith_runtime.ledger import Ledger, RunRecord
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.records import ReleaseMode
from tinsmith_runtime.shielded import see_through, start
from tinsmith_runtime.storage import ObjectStore
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.ownership.forks import Forks
from tinsmith_trainer.ownership.run_registry import RunRegistry, run_moved, run_not_found
from tinsmith_trainer.residency.manager import Residency
from tinsmith_trainer.residency.weight_exporter import WeightExporter
from tinsmith_trainer.runs.ledger_loader import RunLoader
from tinsmith_trainer.runs.operations import WireCodec
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.storage_cleanup import discard_folder

logger = logging.getLogger(__name__)

_RETRY_S = 10.0
_IDLE_S = 600.0
_IDLE_INTERVAL_S = 60.0
_NUM_CHORES = 2
"""Clean-ups at once: each may occupy a thread for as long as the store does not answer."""


class RunAdoption:
    """Takes runs and gives them up.

    Args:
        config: Limits.
        host: The engines.
        ledger: Says which trainer holds a run.
        store: Files of runs.
        registry: The runs that this trainer holds.
        residency: Brings runs into the engines and out of them.
        weight_exporter: Knows what was written for samplers.
        wire: The stored form of requests.
        has_work: Set when a run may have something to do.
        on_adopted: Called after a run was taken: what it left unfinished elsewhere goes on here.
    """

    def __init__(
        self,
        config: TrainerConfig,
        host: EngineHost,
        ledger: Ledger,
        store: ObjectStore,
        registry: RunRegistry,
        residency: Residency,
        weight_exporter: WeightExporter,
        wire: WireCodec,
        *,
        has_work: asyncio.Event,
        on_adopted: Callable[[], Awaitable[None]],
    ) -> None:
        self._config = config
        self._host = host
        self._ledger = ledger
        self._store = store
        self._registry = registry
        self._residency = residency
        self._weight_exporter = weight_exporter
        self._has_work = has_work
        self._on_adopted = on_adopted
        self._loader = RunLoader(ledger, store, wire)
        self._forks = Forks(ledger, store, wire)
        self._locks = KeyedLocks()
        self._arriving: set[str] = set()
        self._chores: set[asyncio.Task[Any]] = set()
        self._chore_turns = asyncio.Semaphore(_NUM_CHORES)
        registry.wake_by(self._wake, self._put_to_sleep)

    async def stop(self) -> None:
        """Stop cleaning up; the next process goes on."""
        chores = list(self._chores)
        for chore in chores:
            chore.cancel()
        await asyncio.gather(*chores, return_exceptions=True)

    async def remove_leftovers(self) -> None:
        """Remove the files of deleted runs, as of one whose trainer could not reach the store."""
        for name in await self._ledger.list_deletions():
            await self._remove_files(name)

    async def recover(self) -> None:
        """Go on with what the runs of the ledger left unfinished, before anything is served."""
        for record in await self._ledger.unsettled_runs():
            if record.base_model not in self._host.engines:
                logger.warning(
                    "run waits for its base model, which this pod does not serve",
                    extra={"run": record.name, "base_model": record.base_model},
                )
                continue
            await self._load(record)

    async def adopt(self, wanted: RunRecord) -> int:
        """Take over a run, creating it if it is new; return its version.

        What the run is counts where it is new alone; else its epoch does.

        Raises:
            ModelNotFoundError: If this pod does not serve the base model.
            InvalidFieldError: If the run is new and what it trains does not suit the model.
            CapacityExhaustedError: If there is no slot for another run.
            AbortedError: If a higher epoch holds the run.
            RunHeldError: If the trainer that holds it is alive.
        """
        return await see_through(self._adopt(wanted))

    async def fork(
        self, name: str, epoch: int, source: str, step: int, *, reruns_step: bool
    ) -> int:
        """Make a run without operations the copy of another one as it was; see `Forks.copy`.

        Raises:
            RunNotFoundError: If this trainer does not hold it, or its ledger not the source.
            FencedError: If it is held under another epoch.
        """
        return await see_through(self._fork(name, epoch, source, step, reruns_step))

    async def release(self, name: str, epoch: int, mode: ReleaseMode) -> None:
        """Park, hand over or delete a run.

        Raises:
            RunNotFoundError: If there is none of this name.
            FencedError: If a higher epoch holds it.
            RunMovedError: If it was held under this epoch and is to be adopted again.
        """
        await see_through(self._release(name, epoch, mode))

    async def park_all(self) -> None:
        """Snapshot what changed since the last snapshot, so that a restart need not replay."""
        for run in self._registry.runs:
            async with run.lock:
                try:
                    await self._residency.park(run)
                except TinsmithError as error:
                    logger.warning(
                        "not parked; the ledger has everything",
                        extra={"run": run.name, "problem": error.message},
                    )

    async def _adopt(self, wanted: RunRecord) -> int:
        # Not beside another call for it: a repeated call must not meet a run half-made.
        async with self._locks.of(wanted.name):
            version = await self._adopt_alone(wanted)
        # Of a repeated call as well: the first one may have broken off here.
        await self._on_adopted()
        self._has_work.set()
        return version

    async def _adopt_alone(self, wanted: RunRecord) -> int:
        self._host.engine(wanted.base_model)
        held = self._registry.held(wanted.name)
        with self._place_for(wanted.name) if held is None else contextlib.nullcontext():
            return await self._adopt_held(held, wanted)

    async def _adopt_held(self, held: LiveRun | None, wanted: RunRecord) -> int:
        name, epoch = wanted.name, wanted.epoch
        if held is None and await self._ledger.owes_deletion(name):
            # Its files would be taken for those of the new run.
            await asyncio.to_thread(self._store.delete_folder, name)
            await self._ledger.forget_deletion(name)
        # A run that exists is never deleted for want of a slot: even one without operations may
        # have checkpoints, copied or imported.
        is_new = held is None and not await self._ledger.is_known(name)
        if is_new:
            engine = self._host.engine(wanted.base_model)
            engine.check_new_run(adapter_from_json(wanted.adapter))
        if held is not None and held.record.epoch < epoch:
            # Before its epoch passes, or what it is writing would look like a lost run.
            await self._let_go(held)
            held = None
        failpoints.passing("trainer.adopt")
        record = await self._ledger.adopt_run(wanted)
        failpoints.passing("trainer.adopted")
        if held is None and (is_new or await self._ledger.unsettled_runs([name])):
            try:
                run = await self._load(record)
            except Exception:
                # No other trainer could take it while this process lives and does not hold it.
                await self._give_back(record)
                raise
            if is_new:
                await self._place(run, epoch)
        return record.version if held is None else held.record.version

    async def watch_idle(self) -> None:
        """Put runs to sleep that were not asked for in a while, again and again."""
        while True:
            await asyncio.sleep(_IDLE_INTERVAL_S)
            before_s = time.monotonic() - _IDLE_S
            for run in self._registry.runs:
                if run.is_at_rest and run.asked_s < before_s:
                    await self._put_to_sleep(run)

    async def _fork(self, name: str, epoch: int, source: str, step: int, reruns_step: bool) -> int:
        async with self._locks.of(name):
            record = await self._ledger.get_held_run(name)
            if record is None:
                raise run_not_found(name)
            if record.epoch != epoch:
                raise _held_otherwise(name, record.epoch, epoch)
            rerun_from = await self._forks.find(name, source, reruns_step=reruns_step)
            if rerun_from is None:
                held = self._registry.held(name)
                if held is not None:
                    # What is in the engine is not what the rows are about to say.
                    await self._let_go(held)
                rerun_from = await self._forks.copy(record, source, step, reruns_step=reruns_step)
        if rerun_from:
            await self._wake(name)
        return rerun_from

    async def _wake(self, name: str) -> LiveRun | None:
        """Take in a run that sleeps; None if this trainer does not hold it.

        Raises:
            CapacityExhaustedError: If there is no place for another run.
        """
        if await self._ledger.get_held_run(name) is None:
            return None
        return await see_through(self._wake_alone(name))

    async def _wake_alone(self, name: str) -> LiveRun | None:
        async with self._locks.of(name):
            held = self._registry.held(name)
            if held is not None:
                return held
            record = await self._ledger.get_held_run(name)
            if record is None or record.base_model not in self._host.engines:
                return None
            with self._place_for(name):
                run = await self._load(record)
        self._has_work.set()
        return run

    async def _put_to_sleep(self, run: LiveRun) -> None:
        """Forget a run here that is at rest; the next call for it finds it in the ledger."""
        async with self._locks.of(run.name), run.gate.closed():
            if run.is_at_rest and self._registry.held(run.name) is run:
                await self._let_go(run)

    @contextlib.contextmanager
    def _place_for(self, name: str) -> Iterator[None]:
        """Keep a place for a run until it is in use."""
        if len(self._registry.runs) + len(self._arriving) >= self._config.max_runs:
            raise CapacityExhaustedError(
                f"the trainer has {self._config.max_runs} runs in use; end a session or delete one",
                retry_after_s=_RETRY_S,
                run=name,
            )
        self._arriving.add(name)
        try:
            yield
        finally:
            self._arriving.discard(name)

    async def _give_back(self, record: RunRecord) -> None:
        """Let another trainer have a run that could not be loaded here."""
        try:
            await self._ledger.release_run(record.name, record.epoch)
        except TinsmithError as error:
            logger.warning(
                "run not given back", extra={"run": record.name, "problem": error.message}
            )

    async def _place(self, run: LiveRun, epoch: int) -> None:
        """Bring a new run into the engine, or refuse it: another trainer may have a slot."""
        async with run.lock:
            try:
                await self._residency.ensure(run)
            except Exception:
                self._registry.remove(run)
                await self._ledger.delete_run(run.name, epoch)
                await self._ledger.forget_deletion(run.name)
                raise

    async def _load(self, record: RunRecord) -> LiveRun:
        """Hold a run as the ledger knows it, its unfinished operations queued."""
        engine = self._host.engine(record.base_model)
        queue = await self._loader.load(record, engine.info.fingerprint)
        run = LiveRun(record, engine, queue, on_free=lambda: self._note_free(run))
        self._registry.add(run)
        self._arriving.discard(run.name)
        # What was exported is written again on demand.
        self._begin(lambda: self._weight_exporter.note_leftovers(run))
        return run

    def _note_free(self, run: LiveRun) -> None:
        """Note that the state of a run is no longer in use: it or another one may go on."""
        self._residency.note_free(run)
        self._has_work.set()

    async def _release(self, name: str, epoch: int, mode: ReleaseMode) -> None:
        run = self._registry.held(name)
        if run is not None:
            held_epoch: int | None = run.record.epoch
        else:
            held_epoch = await self._ledger.held_epoch(name)
        if held_epoch is None:
            raise run_not_found(name)
        if epoch != held_epoch:
            raise _held_otherwise(name, held_epoch, epoch)
        if run is None and mode is ReleaseMode.DELETE:
            # No trainer needs to hold it for that: one that still does is fenced off by its next
            # write.
            async with self._locks.of(name):
                await self._ledger.delete_run(name, epoch)
            self._begin(lambda: self._remove_files(name))
            return
        if run is None:
            await self._release_asleep(name, epoch, mode)
            return
        if mode is ReleaseMode.PARK:
            await self._park(run)
            return
        async with self._locks.of(name):
            if mode is ReleaseMode.HAND_OVER:
                await self._hand_over(run)
            else:
                await self._delete(run, epoch)

    async def _release_asleep(self, name: str, epoch: int, mode: ReleaseMode) -> None:
        async with self._locks.of(name):
            if self._registry.held(name) is not None or (
                await self._ledger.get_held_run(name) is None
            ):
                # It woke meanwhile, or this process was started again and does not have it back
                # yet: it must not seem gone.
                raise run_moved(name)
            if mode is ReleaseMode.HAND_OVER:
                await self._ledger.release_run(name, epoch)

    async def _park(self, run: LiveRun) -> None:
        if run.queue:
            # It is about to be used, and may hold its lock while it waits for a slot.
            return
        async with run.lock:
            if not run.queue and not run.queue.running:
                await self._residency.park(run)
        await self._put_to_sleep(run)

    async def _hand_over(self, run: LiveRun) -> None:
        """Let another trainer go on: what is queued stays in the ledger."""
        run.leave()
        try:
            async with run.lock:
                await self._residency.park(run)
                failpoints.passing("trainer.hand_over")
                await self._ledger.release_run(run.name, run.record.epoch)
                failpoints.passing("trainer.handed_over")
        except FencedError:
            # Another trainer has it already.
            await self._let_go(run)
            raise
        except BaseException:
            run.stay()
            self._has_work.set()
            raise
        await self._let_go(run)

    async def _let_go(self, run: LiveRun) -> None:
        """Forget a run here, without a word to the ledger."""
        run.leave()
        async with run.lock:
            self._registry.remove(run)
            self._weight_exporter.forget(run)
            await self._residency.evict(run)

    async def _delete(self, run: LiveRun, epoch: int) -> None:
        run.close()
        self._note_free(run)
        async with run.lock:
            try:
                failpoints.passing("trainer.delete")
                await self._ledger.delete_run(run.name, epoch)
                failpoints.passing("trainer.deleted")
            except TinsmithError:
                if await self._may_exist(run.name):
                    run.reopen()
                    self._has_work.set()
                    raise
                # An earlier call deleted the rows and did not come to the rest.
            self._registry.remove(run)
            self._weight_exporter.forget(run)
            await self._residency.evict(run)
        self._begin(lambda: self._remove_files(run.name))

    async def _may_exist(self, name: str) -> bool:
        """Whether the ledger has a run, or cannot be asked: the caller will ask again."""
        try:
            return await self._ledger.is_known(name)
        except TinsmithError:
            return True

    def _begin(self, chore: Callable[[], Awaitable[None]]) -> None:
        """Clean up in the background; what fails is done by the sweeps, or after the next start."""
        start(self._in_turn(chore), self._chores)

    async def _in_turn(self, chore: Callable[[], Awaitable[None]]) -> None:
        async with self._chore_turns:
            try:
                await chore()
            except (TinsmithError, OSError) as error:
                logger.warning("files not removed", extra={"problem": str(error)})
            except Exception:
                logger.exception("files not removed, by a bug")

    async def _remove_files(self, name: str) -> None:
        """Remove what a deleted run left, unless it is in another store, or the store is away."""
        async with self._locks.of(name):
            # A new run of this name may have taken the place.
            if await self._ledger.owes_deletion(name) and await discard_folder(self._store, name):
                await self._ledger.forget_deletion(name)


def _held_otherwise(name: str, held_epoch: int, epoch: int) -> FencedError:
    return FencedError(f"run {name} is held under epoch {held_epoch}, not {epoch}", run=name)
