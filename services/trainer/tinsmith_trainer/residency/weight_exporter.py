"""The newest weights of a run for samplers: a row, a copy in memory, or a checkpoint to load.

Samplers of other processes read the copy in memory (`weight_exports`). A checkpoint is written for
those that ask for one alone. A folder that newer weights replaced stays for the grace of its
readers. The ledger remembers it, so that the removal is neither in the way of an export nor
lost with the process.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from tinsmith_engine import WeightVersion
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints
from tinsmith_runtime.adapters import adapter_from_json
from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.ledger import Ledger
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests
from tinsmith_trainer.execution import snapshot_format
from tinsmith_trainer.residency.manager import Residency
from tinsmith_trainer.residency.weight_exports import ExportedWeights, WeightExports
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.storage_cleanup import READERS_GRACE_S

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Exports:
    """What of a run was made readable for other processes.

    Attributes:
        lock: Held while a copy is made, so that it is made once.
        kept: The copy in memory that was made last.
        kept_serial: Serial of its weights.
        newest: The checkpoint written last.
        serial: Serial of the weights that it holds.
        outdated: Folders of those before it that are not noted yet.
        token: Tells the folders written here from those of other processes, and of earlier times.
    """

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    kept: ExportedWeights | None = None
    kept_serial: int = 0
    newest: checkpoint_manifests.WrittenManifest | None = None
    serial: int = 0
    outdated: list[str] = field(default_factory=list)
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:12])


class WeightExporter:
    """Makes weights readable; each version once.

    Args:
        host: The engines.
        ledger: Remembers the folders that are to be removed.
        store: Where checkpoints for other processes go.
        residency: Brings a run back that was parked.
        exports: Copies in memory.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        host: EngineHost,
        ledger: Ledger,
        store: ObjectStore,
        residency: Residency,
        *,
        exports: WeightExports,
        clock: Callable[[], float],
    ) -> None:
        self.exports = exports
        self._host = host
        self._ledger = ledger
        self._store = store
        self._residency = residency
        self._clock = clock
        self._exports: WeakKeyDictionary[LiveRun, _Exports] = WeakKeyDictionary()

    async def export(self, run: LiveRun) -> ExportedWeights | checkpoint_manifests.WrittenManifest:
        """Copy the current weights to memory, from which samplers of other processes read them.

        Returns:
            The copy, or a checkpoint if the budget of copies has no room for one so large.
        """
        exported = self._exports.setdefault(run, _Exports())
        async with exported.lock:
            async with run.lock:
                await self._residency.ensure(run)
                serial = run.state.weights_serial
                before = exported.kept
                if (
                    before is not None
                    and exported.kept_serial == serial
                    and self.exports.holds(before.id)
                ):
                    return before
                failpoints.passing("trainer.export")
                kept = await self._host.call(_export, run, self.exports.fits)
            if kept is not None:
                failpoints.passing("trainer.exported")
                self.exports.keep(kept)
                if before is not None:
                    self.exports.replace(before.id)
                exported.kept, exported.kept_serial = kept, serial
                return kept
            logger.warning("no memory to export weights from", extra={"run": run.name})
        return await self.export_to_store(run)

    def forget(self, run: LiveRun) -> None:
        """Give up the copy of a run that does not go on here."""
        exported = self._exports.get(run)
        if exported is not None and exported.kept is not None:
            self.exports.drop(exported.kept.id)

    async def export_to_store(self, run: LiveRun) -> checkpoint_manifests.WrittenManifest:
        """Write the current weights for samplers of other processes; see `ExportWeights`."""
        async with run.lock:
            await self._residency.ensure(run)
            exported = self._exports.setdefault(run, _Exports())
            if exported.newest is not None and exported.serial == run.state.weights_serial:
                return exported.newest
            failpoints.passing("trainer.export")
            version = run.engine.version(run.name)
            sequence_number = run.state.sequence_number
            files = await self._host.call(
                snapshot_format.checkpoint_files, run.engine, run.name, with_optimizer=False
            )
            # A name that was never used: a reader of the version before is not disturbed.
            serial = run.state.weights_serial
            folder = f"{_folder(run)}/{version}-{exported.token}-{serial}"
            written = await asyncio.to_thread(
                checkpoint_manifests.write_checkpoint,
                self._store,
                folder,
                files,
                checkpoint_attributes(run, "sampler", version, sequence_number),
            )
            failpoints.passing("trainer.exported")
            if exported.newest is not None:
                exported.outdated.append(exported.newest.folder)
            exported.newest, exported.serial = written, serial
            try:
                await self._note_outdated(run, exported.outdated)
                exported.outdated.clear()
            except TinsmithError as error:
                # With the next export, or when the run is taken in again.
                logger.warning(
                    "outdated weights not noted", extra={"run": run.name, "problem": error.message}
                )
        return written

    async def note_leftovers(self, run: LiveRun) -> None:
        """Have what was exported before this process took the run in removed, after the grace."""
        token = self._exports.setdefault(run, _Exports()).token
        parent = _folder(run)
        found = await asyncio.to_thread(self._store.list_folder, parent)
        names = {info.path.removeprefix(f"{parent}/").partition("/")[0] for info in found}
        await self._note_outdated(
            run, [f"{parent}/{name}" for name in sorted(names) if token not in name]
        )

    async def _note_outdated(self, run: LiveRun, folders: list[str]) -> None:
        if folders:
            await self._ledger.note_folder_deletions(
                run.name, folders, not_before_s=self._clock() + READERS_GRACE_S
            )

    async def export_live(self, run: LiveRun) -> WeightVersion:
        """Copy the newest weights of a run to an immutable version in the engine."""
        async with run.lock:
            await self._residency.ensure(run)
            return await self._host.call(run.engine.export, run.name)


def _export(run: LiveRun, fits: Callable[[int], bool]) -> ExportedWeights | None:
    """Copy the weights of a run, unless there is no room; runs on the engine's thread."""
    tensors = run.engine.weight_tensors(run.name)
    if not fits(sum(tensor.nbytes for tensor in tensors.values())):
        return None
    try:
        return ExportedWeights.of(
            tensors,
            run=run.name,
            base_model=run.record.base_model,
            config=adapter_from_json(run.record.adapter),
            version=run.engine.version(run.name),
        )
    except OSError as error:
        logger.warning("weights not copied", extra={"run": run.name, "problem": str(error)})
        return None


def _folder(run: LiveRun) -> str:
    # Stores have this name from before exports were called so.
    return f"{run.name}/published"


def checkpoint_attributes(
    run: LiveRun, kind: str, version: int, sequence_number: int
) -> dict[str, object]:
    """Return what the manifest of a checkpoint says about its files."""
    return {
        "kind": kind,
        "run": run.name,
        "base_model": run.record.base_model,
        "adapter": run.record.adapter,
        "version": version,
        "sequence_number": sequence_number,
        "exactness": run.engine.info.exactness,
        "fingerprint": run.engine.info.fingerprint,
    }
