"""The newest weights of a run for those who sample: a copied row, or a checkpoint to load."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from tinsmith_engine import Published
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests
from tinsmith_trainer.execution import snapshot_format
from tinsmith_trainer.residency.manager import Residency
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.storage_cleanup import discard_folder

_NUM_KEPT_PUBLISHED = 4


@dataclass(slots=True)
class _Exports:
    """The sampler checkpoints of a run that were written for other processes.

    Attributes:
        newest: The one written last.
        serial: Serial of the weights that it holds.
        outdated: Folders of those before it, oldest first.
    """

    newest: checkpoint_manifests.WrittenManifest | None = None
    serial: int = 0
    outdated: list[str] = field(default_factory=list)


class Publisher:
    """Makes weights readable; each version once.

    Args:
        host: The engines.
        store: Where checkpoints for other processes go.
        residency: Brings a run back that was parked.
    """

    def __init__(self, host: EngineHost, store: ObjectStore, residency: Residency) -> None:
        self._host = host
        self._store = store
        self._residency = residency
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
            folder = f"{run.name}/published/{version}-{uuid.uuid4().hex[:12]}"
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
            exported.newest, exported.serial = written, run.state.weights_serial
            while len(exported.outdated) > _NUM_KEPT_PUBLISHED:
                await discard_folder(self._store, exported.outdated.pop(0))
        return written

    async def publish_live(self, run: LiveRun) -> Published:
        """Copy the newest weights of a run to an immutable version in the engine."""
        async with run.lock:
            await self._residency.ensure(run)
            return await self._host.call(run.engine.publish, run.name)


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
