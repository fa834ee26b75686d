"""Weights in memory for samplers of other processes: immutable, within a budget.

The newest weights of each run stay until the budget needs their room. Replaced ones stay for the
grace of their readers and give way first. A read that has begun goes on when they are dropped.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from tinsmith_engine import AdapterConfig
from tinsmith_engine.files.weight_index import (
    CHUNK_BYTES,
    WeightIndex,
    digests_of,
    numbers_of,
)
from tinsmith_runtime.errors import InvalidFieldError, VersionNotLoadedError
from tinsmith_runtime.sealed_memory import MemoryLocation, SealedMemory, memory_domain

_MAX_EXPORTS = 256
"""Each takes a file descriptor."""
_MAX_INDEXES = 4096
"""Those of weights that are gone tell what a sampler lacks that holds them still."""


class ExportedWeights:
    """Weights of a run at one moment.

    Args:
        index: What they consist of, without hashes.
        memory: Their numbers.

    Attributes:
        id: Names them for good.
        memory: Their numbers.
    """

    def __init__(self, index: WeightIndex, memory: SealedMemory) -> None:
        self.id = uuid.uuid4().hex
        self.memory = memory
        self._index = index
        self._hashing = asyncio.Lock()

    @property
    def index(self) -> WeightIndex:
        """What they consist of, with hashes once these were asked for."""
        return self._index

    async def hashed_index(self) -> WeightIndex:
        """Return what they consist of; the first call hashes all chunks, on a thread."""
        async with self._hashing:
            if not self._index.digests:
                digests = await asyncio.to_thread(
                    digests_of, self.memory.view, self._index.chunk_bytes
                )
                self._index = dataclasses.replace(self._index, digests=digests)
        return self._index

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        *,
        run: str,
        base_model: str,
        config: AdapterConfig,
        version: int,
    ) -> ExportedWeights:
        """Copy weights.

        Args:
            tensors: Float32 on the host, by their public names.
            run: Resource name of the run.
            base_model: Name of its base model.
            config: What it trains.
            version: Optimizer steps that made the weights.

        Raises:
            OSError: If there is no memory for them.
        """
        index = WeightIndex(
            run=run,
            base_model=base_model,
            config=config,
            version=version,
            shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
            chunk_bytes=CHUNK_BYTES,
            digests=(),
        )
        return cls(index, SealedMemory(numbers_of(tensors), index.size_bytes))


@dataclass(frozen=True, slots=True)
class WeightReading:
    """What one call reads.

    Attributes:
        index: Describes the weights.
        location: Memory that holds all of them, for a caller that can map it; else None.
        chunks: Offsets and bytes of the chunks that the caller lacks; empty with a location.
    """

    index: WeightIndex
    location: MemoryLocation | None
    chunks: Iterator[tuple[int, memoryview]]


class WeightExports:
    """Exported weights of all runs.

    Args:
        max_bytes: Their budget.
        grace_s: How long replaced ones stay if the budget allows it.
    """

    def __init__(self, max_bytes: int, *, grace_s: float) -> None:
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        self._kept: OrderedDict[str, ExportedWeights] = OrderedDict()
        self._replaced: set[str] = set()
        self._indexes: OrderedDict[str, WeightIndex] = OrderedDict()
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """What all of them take."""
        return self._size_bytes

    def holds(self, weights_id: str) -> bool:
        """Return whether weights can be read."""
        return weights_id in self._kept

    def fits(self, size_bytes: int) -> bool:
        """Return whether weights of a size can be kept at all."""
        return size_bytes <= self._max_bytes

    def keep(self, exported: ExportedWeights) -> None:
        """Keep weights that are the newest of their run, and drop what the budget has no room for.

        Runs on the event loop, as everything here.
        """
        self.drop(exported.id)
        self._kept[exported.id] = exported
        self._size_bytes += exported.index.size_bytes
        while len(self._kept) > 1 and (
            self._size_bytes > self._max_bytes or len(self._kept) > _MAX_EXPORTS
        ):
            others = [each for each in self._kept if each != exported.id]
            self.drop(next((each for each in others if each in self._replaced), others[0]))

    def replace(self, weights_id: str) -> None:
        """Note that a run has newer weights: these are dropped after the grace."""
        if weights_id in self._kept:
            self._replaced.add(weights_id)
            exported = self._kept[weights_id]
            asyncio.get_running_loop().call_later(self._grace_s, self._expire, exported)

    def drop(self, weights_id: str) -> None:
        """Forget weights; none of this name is no error."""
        exported = self._kept.pop(weights_id, None)
        self._replaced.discard(weights_id)
        if exported is not None:
            self._size_bytes -= exported.index.size_bytes
            exported.memory.close()

    def close(self) -> None:
        """Forget all of them."""
        for weights_id in list(self._kept):
            self.drop(weights_id)

    async def read(
        self, run: str, weights_id: str, *, offset: int = 0, held: str = "", domain: str = ""
    ) -> WeightReading:
        """Return what a sampler reads of weights; see `TrainerControlService.ReadWeights`.

        Args:
            run: The run that they are of.
            weights_id: Their name.
            offset: Where a stream that was cut goes on.
            held: Weights that the sampler has.
            domain: What the sampler's process says of its memory.

        Raises:
            VersionNotLoadedError: If they are not kept, or are of another run.
            InvalidFieldError: If the offset is not where a chunk begins.
        """
        exported = self._kept.get(weights_id)
        if exported is None or exported.index.run != run:
            raise VersionNotLoadedError(
                f"weights {weights_id} of {run} are no longer in memory; export the newest ones",
                run=run,
            )
        index = exported.index
        if exported.memory.location is not None and domain == memory_domain() != "":
            return WeightReading(index, exported.memory.location, iter(()))
        if not 0 <= offset <= index.size_bytes or (
            offset % index.chunk_bytes and offset != index.size_bytes
        ):
            raise InvalidFieldError(
                "offset", f"must be a multiple of {index.chunk_bytes} within {index.size_bytes}"
            )
        view = exported.memory.view
        index = await exported.hashed_index()
        held_index = self._indexes.get(held)
        if held_index is not None and held_index.run != run:
            held_index = None
        self._indexes[exported.id] = index
        while len(self._indexes) > _MAX_INDEXES:
            self._indexes.popitem(last=False)
        chunks = (
            (index.span(chunk).start, view[index.span(chunk)])
            for chunk in index.chunks_beyond(held_index)
            if index.span(chunk).start >= offset
        )
        return WeightReading(index, None, chunks)

    def _expire(self, exported: ExportedWeights) -> None:
        if exported.id in self._replaced and self._kept.get(exported.id) is exported:
            self.drop(exported.id)
