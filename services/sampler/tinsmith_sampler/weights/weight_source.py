"""From a sampling session to weights in the engine.

Live weights are pulled, not pushed: each request asks for the newest version of its run. It is
never answered with weights older than those that existed when it arrived. A restarted sampler
needs no other process to remember it. In one process that is a copy of a row (`export_live`);
across processes the trainer names weights in its memory, which are read once for each version. The
object store is the way of checkpoints, and of weights that the trainer cannot send.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tinsmith_engine import AdapterConfig, FullConfig, WeightVersion
from tinsmith_engine.files.weight_files import parse_tensors, weights_file
from tinsmith_engine.files.weight_index import WeightIndex
from tinsmith_engine.host import model_not_served
from tinsmith_runtime import failpoints
from tinsmith_runtime.adapters import adapter_from_json
from tinsmith_runtime.errors import (
    CheckpointCorruptError,
    CheckpointIncompatibleError,
    CheckpointNotFoundError,
    ErrorCode,
    StoreMismatchError,
    TinsmithError,
    VersionNotLoadedError,
    WorkerUnavailableError,
)
from tinsmith_runtime.keyed_locks import KeyedLocks
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests
from tinsmith_sampler.engines.engine_protocol import SamplingEngine
from tinsmith_sampler.metrics import WEIGHT_LOADS
from tinsmith_sampler.requests.sessions import Target
from tinsmith_sampler.weights.trainer_protocol import ExportedWeights, StoredWeights, Trainers
from tinsmith_sampler.weights.weight_transfer import HeldWeights, WeightTransfer

logger = logging.getLogger(__name__)

ExportLive = Callable[[str], Awaitable[WeightVersion]]

_AWAY_CODES = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED})
_MAX_REMOVALS = 8
"""Removed versions of a run that one request passes over."""
_MAX_TRANSFERS = 8
"""Runs whose weights stay here in part after a failure, for the next request to go on."""


@dataclass(frozen=True, slots=True)
class _Latest:
    """The newest weights of a run that are here.

    Attributes:
        name: Their name.
        asked: Order of the questions to the trainer: an answer that came late replaces nothing.
    """

    name: str
    asked: int


class WeightSource:
    """Finds or loads the weights that a request samples from.

    Args:
        engines: By base model.
        store: Where checkpoints are.
        trainers: Connections to the trainers.
        max_loaded: Weights from files that stay in memory; the least recently used go first.
        export_live: Copies the newest weights of a run in this process; None across processes.
    """

    def __init__(
        self,
        engines: Mapping[str, SamplingEngine],
        store: ObjectStore,
        trainers: Trainers,
        *,
        max_loaded: int,
        export_live: ExportLive | None,
    ) -> None:
        self._engines = engines
        self._store = store
        self._trainers = trainers
        self._max_loaded = max_loaded
        self._export_live = export_live
        self._loaded: OrderedDict[str, tuple[SamplingEngine, WeightVersion, str]] = OrderedDict()
        self._latest: dict[str, _Latest] = {}
        self._loading = KeyedLocks()
        self._num_asked = 0
        # One at a time for each run, so that versions do not pile up while they arrive.
        self._receiving = KeyedLocks()
        self._transfers: OrderedDict[str, WeightTransfer] = OrderedDict()
        self._indexes: dict[str, WeightIndex] = {}

    @property
    def is_local(self) -> bool:
        """Whether live runs are trained in this process, on the same engines."""
        return self._export_live is not None

    async def get(
        self, target: Target, *, min_version: int, max_staleness: int = 0
    ) -> WeightVersion | None:
        """Return the weights of a target; None stands for the base model.

        Args:
            target: What is sampled from.
            min_version: Of a live run, what the caller knows of.
            max_staleness: Steps that the weights may be older. The last ones of the run that are in
                memory serve then, while its trainer cannot be asked.

        Raises:
            RunNotFoundError: If the run is gone.
            CheckpointNotFoundError: If the checkpoint is gone.
            CheckpointCorruptError: If its files are damaged.
            StoreMismatchError: If they are in another store than this sampler's.
            VersionNotLoadedError: If the run has no version as new as `min_version`.
        """
        if target.run:
            try:
                handle = await self._live(target)
            except TinsmithError as error:
                kept = self._last_live(target.run) if error.code in _AWAY_CODES else None
                if kept is None or not max_staleness:
                    raise
                handle = kept
            if handle.version < min_version - max_staleness:
                raise VersionNotLoadedError(
                    f"{target.run} is at version {handle.version}, the request asks for "
                    f"{min_version}; send it again",
                    run=target.run,
                    version=handle.version,
                )
            return handle
        if target.checkpoint:
            return await self._load(target, await self._locate(target))
        return None

    def _last_live(self, run: str) -> WeightVersion | None:
        """Return the weights of a run that its trainer named last, if they are in memory."""
        latest = self._latest.get(run)
        known = None if latest is None else self._loaded.get(latest.name)
        return None if known is None else known[1]

    async def _live(self, target: Target) -> WeightVersion:
        if self._export_live is not None:
            return await self._export_live(target.run)
        self._num_asked += 1
        asked = self._num_asked
        newest = await self._trainers.newest(target.trainer_address, target.run)
        for _ in range(_MAX_REMOVALS):
            try:
                handle = await self._load_newest(target, newest)
                break
            except (CheckpointCorruptError, StoreMismatchError, VersionNotLoadedError):
                # The trainer removes what it has replaced, also while it is read here. What it
                # still names is damaged.
                before = newest
                newest = await self._trainers.newest(target.trainer_address, target.run)
                if newest == before and isinstance(newest, StoredWeights):
                    raise
        else:
            handle = await self._load_newest(target, newest)
        await self._note_latest(target.run, _Latest(_name_of(newest), asked))
        return handle

    async def _load_newest(
        self, target: Target, newest: ExportedWeights | StoredWeights
    ) -> WeightVersion:
        if isinstance(newest, StoredWeights):
            return await self._load(target, newest)
        try:
            return await self._once(newest.id, lambda: self._receive(target, newest))
        except VersionNotLoadedError:
            raise
        except (CheckpointCorruptError, WorkerUnavailableError) as error:
            logger.warning(
                "weights are read from the store, as the trainer could not send them",
                extra={"run": target.run, "reason": error.reason},
            )
            stored = await self._trainers.export_to_store(target.trainer_address, target.run)
            return await self._load(target, stored)

    async def _receive(self, target: Target, exported: ExportedWeights) -> WeightVersion:
        """Read weights from the memory of a trainer, going on where a failure left off."""
        failpoints.passing("sampler.load")
        engine = engine_of(self._engines, target.base_model)
        async with self._receiving.of(target.run):
            transfer = self._transfers.pop(target.run, None)
            if transfer is None or not transfer.is_of(target.trainer_address, exported.id):
                held = self._held_for(target.run)
                transfer = WeightTransfer(
                    self._trainers,
                    target.trainer_address,
                    target.run,
                    exported.id,
                    held,
                    earlier=transfer,
                )
            try:
                received = await transfer.receive()
            except BaseException:
                self._transfers[target.run] = transfer
                while len(self._transfers) > _MAX_TRANSFERS:
                    self._transfers.popitem(last=False)
                raise
            index = received.index
            _require_base_model(index.base_model, target)
            handle = await engine.load(exported.id, received.tensors, index.config, index.version)
        if isinstance(index.config, FullConfig):
            self._indexes[exported.id] = index
        source = "shared_memory" if received.is_mapped else "stream"
        await self._note_loaded(exported.id, engine, handle, target, source)
        return handle

    def _held_for(self, run: str) -> HeldWeights | None:
        """Return the full weights of a run that are here, to be read only where they changed."""
        latest = self._latest.get(run)
        if latest is None or latest.name not in self._indexes or latest.name not in self._loaded:
            return None
        engine, handle, _ = self._loaded[latest.name]
        return HeldWeights(
            latest.name, self._indexes[latest.name], lambda: engine.full_tensors(handle)
        )

    async def _note_latest(self, run: str, latest: _Latest) -> None:
        """Note the newest weights of a run, and let go of those that they replace."""
        before = self._latest.get(run)
        if latest.name not in self._loaded or (before and before.asked > latest.asked):
            return
        self._latest[run] = latest
        if before is not None and before.name != latest.name and before.name in self._loaded:
            engine, _, _ = self._loaded.pop(before.name)
            self._indexes.pop(before.name, None)
            await engine.unload(before.name)

    async def _locate(self, target: Target) -> StoredWeights:
        # Asked each time: a checkpoint that was deleted, or is published no longer, must not be
        # sampled from memory for ever.
        found = await self._trainers.checkpoint(target.trainer_address, target.checkpoint)
        if not found.is_published and target.checkpoint.split("/")[1] != target.project:
            raise CheckpointNotFoundError(
                f"checkpoint {target.checkpoint} does not exist", checkpoint=target.checkpoint
            )
        return found

    async def _load(self, target: Target, stored: StoredWeights) -> WeightVersion:
        """Return weights from the store."""
        return await self._once(stored.manifest_sha256, lambda: self._read(target, stored))

    async def _once(self, name: str, load: Callable[[], Awaitable[WeightVersion]]) -> WeightVersion:
        """Return weights by their name, loaded once however many requests ask."""
        async with self._loading.of(name):
            known = self._loaded.get(name)
            if known is not None:
                self._loaded.move_to_end(name)
                return known[1]
            return await load()

    async def _read(self, target: Target, stored: StoredWeights) -> WeightVersion:
        failpoints.passing("sampler.load")
        engine = engine_of(self._engines, target.base_model)
        folder, manifest = await asyncio.to_thread(self._find, stored)
        _require_base_model(str(manifest.attributes.get("base_model")), target)
        config = _adapter_of(manifest, stored.manifest_uri)
        tensors = await asyncio.to_thread(self._read_tensors, folder, manifest, config)
        handle = await engine.load(stored.manifest_sha256, tensors, config, stored.version)
        source = "store" if target.run else "checkpoint"
        await self._note_loaded(stored.manifest_sha256, engine, handle, target, source)
        return handle

    async def _note_loaded(
        self,
        name: str,
        engine: SamplingEngine,
        handle: WeightVersion,
        target: Target,
        source: str,
    ) -> None:
        """Note weights in memory, and let go of those used least recently."""
        failpoints.passing("sampler.loaded")
        WEIGHT_LOADS.labels(source).inc()
        self._loaded[name] = (engine, handle, target.source)
        while len(self._loaded) > self._max_loaded:
            oldest, (its_engine, _, its_source) = self._loaded.popitem(last=False)
            self._indexes.pop(oldest, None)
            latest = self._latest.get(its_source)
            if latest is not None and latest.name == oldest:
                del self._latest[its_source]
            await its_engine.unload(oldest)

    def _find(self, stored: StoredWeights) -> tuple[str, checkpoint_manifests.Manifest]:
        sha256 = stored.manifest_sha256
        folder = checkpoint_manifests.find_folder(self._store, stored.manifest_uri, sha256=sha256)
        return folder, checkpoint_manifests.read_manifest(self._store, folder, sha256=sha256)

    def _read_tensors(
        self, folder: str, manifest: checkpoint_manifests.Manifest, config: AdapterConfig
    ) -> dict[str, Tensor]:
        """Return the weights of a checkpoint, and not its optimizer, which is twice as large."""
        name = weights_file(config)
        return parse_tensors(
            checkpoint_manifests.read_files(self._store, folder, manifest, [name]), name
        )

    def loaded(self) -> dict[str, str]:
        """Return what each version in memory was loaded for, by the name it has in the engine."""
        return {name: source for name, (_, _, source) in self._loaded.items()}


def engine_of(engines: Mapping[str, SamplingEngine], base_model: str) -> SamplingEngine:
    """Return the engine of a base model.

    Raises:
        ModelNotFoundError: If this pod does not serve it.
    """
    engine = engines.get(base_model)
    if engine is None:
        raise model_not_served(base_model, engines)
    return engine


def _name_of(weights: ExportedWeights | StoredWeights) -> str:
    return weights.id if isinstance(weights, ExportedWeights) else weights.manifest_sha256


def _require_base_model(base_model: str, target: Target) -> None:
    """Refuse weights of another base model.

    Raises:
        CheckpointIncompatibleError: If they are.
    """
    if base_model != target.base_model:
        raise CheckpointIncompatibleError(
            f"{target.source} is of base model {base_model}, not of {target.base_model}",
            source=target.source,
        )


def _adapter_of(manifest: checkpoint_manifests.Manifest, uri: str) -> AdapterConfig:
    """Return what a checkpoint adapts.

    Raises:
        CheckpointCorruptError: If its manifest does not say.
    """
    try:
        return adapter_from_json(manifest.attributes["adapter"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorruptError(
            f"the adapter of {uri} cannot be read; use another checkpoint", manifest_uri=uri
        ) from error
