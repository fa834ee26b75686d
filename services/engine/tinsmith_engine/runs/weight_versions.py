"""Immutable weight versions, for sampling while the run they came from trains on.

An export copies the run's theta once; nothing ever writes to the copy, so a decode never reads a
row that is being stepped. A version is held by its exporter until the same run exports a newer
one, and by every request and session that reads it; with the last holder its memory is freed.

Any thread may add and retire versions, so that new weights need not wait for a step of the engine.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from tinsmith_engine.base.types import WeightVersion
from tinsmith_engine.model.model_protocol import RunTensors
from tinsmith_runtime.errors import VersionNotLoadedError


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights that are no version yet.

    Attributes:
        tensors: Their row, which has no other owner.
        bound: The row bound to the model.
    """

    tensors: RunTensors
    bound: Any


@dataclass(slots=True)
class _Held:
    handle: WeightVersion
    tensors: RunTensors
    bound: Any
    num_holders: int = 1


@dataclass(slots=True)
class VersionStore:
    """All versions that have a holder."""

    _held: dict[int, _Held] = field(default_factory=dict)
    _newest: dict[str, WeightVersion] = field(default_factory=dict)
    _num_exported: int = 0
    # Reentrant: `add` retires.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self, run: str, version: int, tensors: RunTensors, bound: Any) -> WeightVersion:
        """Store a version held by its exporter, and let go of the run's previous one.

        `tensors` must be the store's own copy. The caller of this method is the holder: the hold
        ends with the run's next version or with `retire`.
        """
        with self._lock:
            self._num_exported += 1
            handle = WeightVersion(run, version, self._num_exported)
            self._held[handle.serial] = _Held(handle, tensors, bound)
            self.retire(run)
            self._newest[run] = handle
            return handle

    def newest(self, run: str) -> WeightVersion | None:
        """Return the version that the run exported last, if it has any."""
        return self._newest.get(run)

    def retire(self, run: str) -> None:
        """End the exporter's hold on the run's newest version, as when the run is dropped."""
        with self._lock:
            previous = self._newest.pop(run, None)
            if previous is not None:
                self.release(previous)

    def acquire(self, handle: WeightVersion) -> None:
        """Hold a version until a matching `release`.

        Raises:
            VersionNotLoadedError: The version had no holder any more.
        """
        with self._lock:
            self._get(handle).num_holders += 1

    def release(self, handle: WeightVersion) -> None:
        """End one hold; the last one frees the version."""
        with self._lock:
            held = self._get(handle)
            held.num_holders -= 1
            if held.num_holders == 0:
                del self._held[handle.serial]

    def tensors(self, handle: WeightVersion) -> RunTensors:
        """Return the row of a held version."""
        return self._get(handle).tensors

    def bound(self, handle: WeightVersion) -> Any:
        """Return a held version bound to the model."""
        return self._get(handle).bound

    def held(self) -> list[WeightVersion]:
        """Return all versions in memory, oldest first."""
        with self._lock:
            return [held.handle for held in self._held.values()]

    def num_holders(self, handle: WeightVersion) -> int:
        """Return how many holds there are on a version, its exporter's included."""
        return self._get(handle).num_holders

    def _get(self, handle: WeightVersion) -> _Held:
        held = self._held.get(handle.serial)
        if held is None:
            raise VersionNotLoadedError(
                f"version {handle.version} of {handle.run} is not loaded; export it again",
                run=handle.run,
                version=handle.version,
            )
        return held
