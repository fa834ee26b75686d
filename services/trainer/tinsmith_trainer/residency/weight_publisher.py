"""The newest weights of a run for those who sample: a copied row, or a checkpoint to load.

A folder that newer weights replaced stays for the grace of its readers. The ledger remembers it,
so that the removal is neither in the way of a publication nor lost with the process.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from tinsmith_engine import Published
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.ledger import Ledger
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests
from tinsmith_trainer.execution import snapshot_format
from tinsmith_trainer.residency.manager import Residency
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.storage_cleanup import READERS_GRACE_S

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Exports:
    """The sampler checkpoints of a run that were written for other processes.

    Attributes:
        newest: The one written last.
        serial: Serial of the weights that it holds.
        outdated: Folders of those before it that are not noted yet.
        token: Tells the folders written here from those of other processes, and of earlier times.
    """

    newest: checkpoint_manifests.WrittenManifest | None = None
    serial: int = 0
    outdated: list[str] = field(default_factory=list)
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:12])


class Publisher:
    """Makes weights readable; each version once.

    Args:
        host: The engines.
        ledger: Remembers the folders that are to be removed.
        store: Where checkpoints for other processes go.
        residency: Brings a run back that was parked.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        host: EngineHost,
        ledger: Ledger,
        store: ObjectStore,
        residency: Residency,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._ledger = ledger
        self._store = store
        self._residency = residency
        self._clock = clock
        self._exports: WeakKeyDictionary[LiveRun, _Exports] = WeakKeyDictionary()

    async def publish(self, run: LiveRun) -> checkpoint_manifests.WrittenManifest:
        """Write the current weights for samplers of other processes; see `ExportWeights`."""
        async with run.lock:
            await self._residency.ensure(run)
            exported = self._exports.setdefault(run, _Exports())
            if exported.newest is not None and exported.serial == run.state.weights_serial:
                return exported.newest
            failpoints.passing("trainer.publish")
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
            failpoints.passing("trainer.published")
            if exported.newest is not None:
                exported.outdated.append(exported.newest.folder)
            exported.newest, exported.serial = written, serial
            try:
                await self._note_outdated(run, exported.outdated)
                exported.outdated.clear()
            except TinsmithError as error:
                # With the next publication, or when the run is taken in again.
                logger.warning(
                    "outdated weights not noted", extra={"run": run.name, "problem": error.message}
                )
        return written

    async def note_leftovers(self, run: LiveRun) -> None:
        """Have what was published before this process took the run in removed, after the grace."""
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

    async def publish_live(self, run: LiveRun) -> Published:
        """Copy the newest weights of a run to an immutable version in the engine."""
        async with run.lock:
            await self._residency.ensure(run)
            return await self._host.call(run.engine.publish, run.name)


def _folder(run: LiveRun) -> str:
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
