"""What the sampler needs of trainers, free of any transport."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from tinsmith_engine.files.weight_index import WeightIndex
from tinsmith_runtime.sealed_memory import MemoryLocation


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights in the store.

    Attributes:
        version: Optimizer steps that made them.
        manifest_uri: Where their manifest is.
        manifest_sha256: Its hash; names the weights for good.
        is_published: Whether every project may sample from them; of a checkpoint alone.
    """

    version: int
    manifest_uri: str
    manifest_sha256: str
    is_published: bool = False


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """Weights in the memory of a trainer.

    Attributes:
        version: Optimizer steps that made them.
        id: Names them for good.
    """

    version: int
    id: str


@dataclass(frozen=True, slots=True)
class WeightDescription:
    """The begin of a stream of weights.

    Attributes:
        index: What they consist of.
        location: Memory of this machine that holds all of them; no chunks follow then.
    """

    index: WeightIndex
    location: MemoryLocation | None


@dataclass(frozen=True, slots=True)
class WeightChunk:
    """One chunk of a stream of weights, as it came.

    Attributes:
        offset: Its place, in bytes.
        data: Its numbers.
    """

    offset: int
    data: bytes


class Trainers(Protocol):
    """The trainers of a deployment."""

    async def newest(self, address: str, run: str) -> ExportedWeights | StoredWeights:
        """Return the newest weights of a run: in memory, or in the store of an older trainer."""
        ...

    async def export_to_store(self, address: str, run: str) -> StoredWeights:
        """Return the newest weights of a run, written to the store if they are not there yet."""
        ...

    def read(
        self, address: str, run: str, weights_id: str, *, offset: int, held: str, maps_memory: bool
    ) -> AsyncGenerator[WeightDescription | WeightChunk, None]:
        """Yield the description of weights in memory, then their chunks from an offset on.

        Args:
            address: Of the trainer.
            run: Of which the weights are.
            weights_id: Names them.
            offset: Where a stream that was cut goes on.
            held: Names weights that are here, whose chunks need not be sent.
            maps_memory: Whether memory of this machine may be named instead.

        Raises:
            CheckpointCorruptError: If the index was damaged.
            VersionNotLoadedError: If the trainer no longer keeps them.
            WorkerUnavailableError: If the stream was cut.
        """
        ...

    async def checkpoint(self, address: str, name: str) -> StoredWeights:
        """Return where the files of a checkpoint are."""
        ...
