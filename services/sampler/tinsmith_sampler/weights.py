"""From a sampling session to weights in the engine.

Live weights are pulled, not pushed: each request asks for the newest version of its run. It is
never answered with weights older than those that existed when it arrived. A restarted sampler
needs no other process to remember it. In one process that is a copy of a row (`publish_live`);
across processes the trainer names a sampler checkpoint, which is loaded once for each version.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping

from torch import Tensor

from tinsmith_engine import AdapterConfig, Published
from tinsmith_engine.files.weight_files import parse_tensors, weights_file
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
)
from tinsmith_runtime.storage import ObjectStore, checkpoint_manifests
from tinsmith_sampler.engine_protocol import SamplingEngine
from tinsmith_sampler.metrics import WEIGHT_LOADS
from tinsmith_sampler.sessions import Target
from tinsmith_sampler.trainer_protocol import StoredWeights, Trainers

logger = logging.getLogger(__name__)

PublishLive = Callable[[str], Awaitable[Published]]

_AWAY_CODES = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED})
_MAX_REMOVALS = 8
"""Removed versions of a run that one request passes over."""


class WeightSource:
    """Finds or loads the weights that a request samples from.

    Args:
        engines: By base model.
        store: Where checkpoints are.
        trainers: Connections to the trainers.
        max_loaded: Weights from files that stay in memory; the least recently used go first.
        publish_live: Copies the newest weights of a run in this process; None across processes.
    """

    def __init__(
        self,
        engines: Mapping[str, SamplingEngine],
        store: ObjectStore,
        trainers: Trainers,
        *,
        max_loaded: int,
        publish_live: PublishLive | None,
    ) -> None:
        self._engines = engines
        self._store = store
        self._trainers = trainers
        self._max_loaded = max_loaded
        self._publish_live = publish_live
        self._loaded: OrderedDict[str, tuple[SamplingEngine, Published, str]] = OrderedDict()
        self._latest: dict[str, str] = {}
        self._loading: dict[str, asyncio.Lock] = {}

    @property
    def is_local(self) -> bool:
        """Whether live runs are trained in this process, on the same engines."""
        return self._publish_live is not None

    async def get(
        self, target: Target, *, min_version: int, max_staleness: int = 0
    ) -> Published | None:
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
                published = await self._live(target)
            except TinsmithError as error:
                kept = self._last_live(target.run) if error.code in _AWAY_CODES else None
                if kept is None or not max_staleness:
                    raise
                published = kept
            if published.version < min_version - max_staleness:
                raise VersionNotLoadedError(
                    f"{target.run} is at version {published.version}, the request asks for "
                    f"{min_version}; send it again",
                    run=target.run,
                    version=published.version,
                )
            return published
        if target.checkpoint:
            return await self._load(target, await self._locate(target))
        return None

    def _last_live(self, run: str) -> Published | None:
        """Return the weights of a run that its trainer named last, if they are in memory."""
        name = self._latest.get(run, "")
        known = self._loaded.get(name)
        return None if known is None else known[1]

    async def _live(self, target: Target) -> Published:
        if self._publish_live is not None:
            return await self._publish_live(target.run)
        stored = await self._trainers.publish(target.trainer_address, target.run)
        self._latest.pop(target.run, None)
        for _ in range(_MAX_REMOVALS):
            try:
                return await self._load_live(target, stored)
            except (CheckpointCorruptError, StoreMismatchError):
                # The trainer removes what it has replaced, also while it is read here. What it
                # still names is damaged.
                newest = await self._trainers.publish(target.trainer_address, target.run)
                if newest == stored:
                    raise
                stored = newest
        return await self._load_live(target, stored)

    async def _load_live(self, target: Target, stored: StoredWeights) -> Published:
        published = await self._load(target, stored)
        if stored.manifest_sha256 in self._loaded:
            self._latest[target.run] = stored.manifest_sha256
        return published

    async def _locate(self, target: Target) -> StoredWeights:
        # Asked each time: a checkpoint that was deleted, or is published no longer, must not be
        # sampled from memory for ever.
        found = await self._trainers.checkpoint(target.trainer_address, target.checkpoint)
        if not found.is_published and target.checkpoint.split("/")[1] != target.project:
            raise CheckpointNotFoundError(
                f"checkpoint {target.checkpoint} does not exist", checkpoint=target.checkpoint
            )
        return found

    async def _load(self, target: Target, stored: StoredWeights) -> Published:
        """Return weights from the store, read once however many requests ask."""
        name = stored.manifest_sha256
        lock = self._loading.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                known = self._loaded.get(name)
                if known is not None:
                    self._loaded.move_to_end(name)
                    return known[1]
                return await self._read(target, stored)
        finally:
            if not lock.locked():
                self._loading.pop(name, None)

    async def _read(self, target: Target, stored: StoredWeights) -> Published:
        failpoints.passing("sampler.load")
        engine = engine_of(self._engines, target.base_model)
        folder, manifest = await asyncio.to_thread(self._find, stored)
        if manifest.attributes.get("base_model") != target.base_model:
            raise CheckpointIncompatibleError(
                f"{target.source} is of base model {manifest.attributes.get('base_model')}, not of "
                f"{target.base_model}",
                source=target.source,
            )
        config = _adapter_of(manifest, stored.manifest_uri)
        tensors = await asyncio.to_thread(self._read_tensors, folder, manifest, config)
        published = await engine.load(stored.manifest_sha256, tensors, config, stored.version)
        failpoints.passing("sampler.loaded")
        WEIGHT_LOADS.labels("run" if target.run else "checkpoint").inc()
        self._loaded[stored.manifest_sha256] = (engine, published, target.source)
        while len(self._loaded) > self._max_loaded:
            oldest, (its_engine, _, source) = self._loaded.popitem(last=False)
            if self._latest.get(source) == oldest:
                del self._latest[source]
            await its_engine.unload(oldest)
        return published

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
