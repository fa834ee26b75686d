"""Weights from the memory of a trainer, whole and verified before anything uses them.

On one machine the trainer's memory is mapped: it is sealed, so that nothing can change it. From
elsewhere chunks come as a stream. One that was cut goes on where it ended, and a chunk with another
hash than the index names is read again. Chunks that are here, of a version in memory or of a
transfer that failed, are not sent. Nothing here touches the engine:
sequences decode meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from torch import Tensor

from tinsmith.backoff import backoff_s
from tinsmith_engine.files.weight_index import WeightIndex, numbers_of
from tinsmith_runtime.errors import (
    CheckpointCorruptError,
    ErrorCode,
    TinsmithError,
    VersionNotLoadedError,
    WorkerUnavailableError,
)
from tinsmith_runtime.sealed_memory import map_sealed
from tinsmith_sampler.weights.trainer_protocol import Trainers, WeightChunk, WeightDescription

logger = logging.getLogger(__name__)

_MAX_FAILURES = 6
"""Cuts and wrong chunks in a row, without a right chunk between them."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_PASSING_CODES = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED})


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """A version of a run that is in memory here.

    Attributes:
        id: Its name.
        index: What it consists of.
        tensors: Returns its tensors by name, empty if they cannot be had any more.
    """

    id: str
    index: WeightIndex
    tensors: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """Weights that are here, all chunks verified.

    Attributes:
        index: What they consist of.
        tensors: Their tensors by name, in memory of their own or of the kernel.
        is_mapped: Whether they lie in memory of the trainer.
        num_received_bytes: What came by a stream.
    """

    index: WeightIndex
    tensors: Mapping[str, Tensor]
    is_mapped: bool
    num_received_bytes: int


class WeightTransfer:
    """One reading of weights.

    Args:
        trainers: Connections to trainers.
        address: Of the trainer that has them.
        run: Of which they are.
        weights_id: Names them.
        held: An earlier version of the run; None for none.
        earlier: A transfer of the run that failed, whose chunks may serve; None for none.
    """

    def __init__(
        self,
        trainers: Trainers,
        address: str,
        run: str,
        weights_id: str,
        held: HeldWeights | None = None,
        earlier: WeightTransfer | None = None,
    ) -> None:
        self._trainers = trainers
        self._address = address
        self._run = run
        self._weights_id = weights_id
        self._earlier = earlier
        self._held = held
        self._maps_memory = True
        self._index: WeightIndex | None = None
        self._numbers = memoryview(b"")
        # In the order of their places.
        self._missing: dict[int, None] = {}
        self._is_mapped = False
        self._num_received_bytes = 0

    def is_of(self, address: str, weights_id: str) -> bool:
        """Return whether these weights are read from this trainer."""
        return (self._address, self._weights_id) == (address, weights_id)

    async def receive(self) -> ReceivedWeights:
        """Return the weights.

        Raises:
            VersionNotLoadedError: If the trainer no longer keeps them.
            WorkerUnavailableError: If the stream was cut too often.
            CheckpointCorruptError: If wrong chunks came too often.
            TinsmithError: What else the trainer refuses the call with.
        """
        num_failures = 0
        while True:
            num_before = len(self._missing)
            try:
                return await self._read_on()
            except VersionNotLoadedError:
                raise
            except (TinsmithError, OSError) as error:
                if isinstance(error, TinsmithError) and not _passes(error):
                    raise
                has_progress = len(self._missing) < num_before
                num_failures = 1 if has_progress else num_failures + 1
                if num_failures >= _MAX_FAILURES:
                    raise _final(error, self._run) from error
                logger.info(
                    "weights are read on after a failure",
                    extra={"run": self._run, "missing": len(self._missing), "problem": str(error)},
                )
                if not has_progress:
                    await asyncio.sleep(backoff_s(num_failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))

    async def _read_on(self) -> ReceivedWeights:
        offset = 0
        if self._index is not None and self._missing:
            offset = self._index.span(next(iter(self._missing))).start
        stream = self._trainers.read(
            self._address,
            self._run,
            self._weights_id,
            offset=offset,
            held=self._held.id if self._held else "",
            maps_memory=self._maps_memory,
        )
        async with contextlib.aclosing(stream) as messages:
            async for message in messages:
                if isinstance(message, WeightDescription):
                    await self._begin(message)
                else:
                    await self._take(message)
        if self._index is None or self._missing:
            # The trainer left out what it thought to be here.
            self._held = None
            raise WorkerUnavailableError(f"the stream of weights of {self._run} ended early")
        return ReceivedWeights(
            self._index,
            self._index.tensors(self._numbers),
            self._is_mapped,
            self._num_received_bytes,
        )

    async def _begin(self, description: WeightDescription) -> None:
        """Make room for the weights, or map them."""
        index = description.index
        if description.location is not None:
            # Should it not be what the index says, chunks are asked for.
            self._maps_memory = False
            self._numbers = await asyncio.to_thread(
                map_sealed, description.location, index.size_bytes
            )
            self._index, self._missing, self._is_mapped = index, {}, True
        elif self._index is None:
            if not index.digests:
                raise CheckpointCorruptError(f"the index of weights of {self._run} has no hashes")
            self._numbers = await asyncio.to_thread(_allocate, index.size_bytes)
            self._index = index
            self._missing = dict.fromkeys(range(index.num_chunks))
            if self._earlier is not None:
                earlier, self._earlier = self._earlier, None
                for chunk in await asyncio.to_thread(self._copy_from, earlier, index):
                    del self._missing[chunk]
            if self._held is not None:
                lacking = set(index.chunks_beyond(self._held.index))
                shared = self._missing.keys() - lacking
                for chunk in await asyncio.to_thread(self._reuse, index, self._held, shared):
                    del self._missing[chunk]

    def _copy_from(self, earlier: WeightTransfer, index: WeightIndex) -> list[int]:
        """Copy what a transfer that failed has; return the chunks that are right."""
        if earlier._index is None or not index.is_like(earlier._index):
            return []
        lacking = set(index.chunks_beyond(earlier._index)) | earlier._missing.keys()
        copied = [chunk for chunk in range(index.num_chunks) if chunk not in lacking]
        for chunk in copied:
            self._numbers[index.span(chunk)] = earlier._numbers[index.span(chunk)]
        return copied

    def _reuse(self, index: WeightIndex, held: HeldWeights, shared: Set[int]) -> list[int]:
        """Copy what an earlier version has as well; return the chunks that are right."""
        tensors = held.tensors() if shared else {}
        if list(tensors) != list(index.shapes):
            return []
        begin = 0
        for part in numbers_of({name: tensor.cpu() for name, tensor in tensors.items()}):
            end = begin + part.nbytes
            self._numbers[begin:end] = part
            begin = end
        return [
            chunk for chunk in shared if index.is_right(chunk, self._numbers[index.span(chunk)])
        ]

    async def _take(self, message: WeightChunk) -> None:
        index = self._index
        if index is None:
            raise CheckpointCorruptError(f"weights of {self._run} came without their index")
        chunk, rest = divmod(message.offset, index.chunk_bytes)
        if rest or not 0 <= chunk < index.num_chunks:
            raise CheckpointCorruptError(f"a chunk of weights of {self._run} is out of place")
        # A trainer that does not know what is held here sends all.
        if chunk in self._missing:
            await asyncio.to_thread(self._put, index, chunk, message.data)
            del self._missing[chunk]
            self._num_received_bytes += len(message.data)

    def _put(self, index: WeightIndex, chunk: int, data: bytes) -> None:
        if not index.is_right(chunk, data):
            raise CheckpointCorruptError(
                f"a chunk of weights of {self._run} does not have the hash that the index names"
            )
        self._numbers[index.span(chunk)] = data


def _allocate(size_bytes: int) -> memoryview:
    """Return memory that goes back to the kernel when nothing reads it any more."""
    return memoryview(mmap.mmap(-1, size_bytes)) if size_bytes else memoryview(bytearray())


def _passes(error: TinsmithError) -> bool:
    return isinstance(error, CheckpointCorruptError) or error.code in _PASSING_CODES


def _final(error: Exception, run: str) -> TinsmithError:
    if isinstance(error, TinsmithError):
        return error
    return WorkerUnavailableError(f"weights of {run} cannot be read: {error}; send it again")
