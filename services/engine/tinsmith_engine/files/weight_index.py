"""Weights on their way between processes: numbers of all tensors in a row, cut in hashed chunks.

The index describes tensors and chunks: what has all chunks of an index has exactly these weights.
Chunks have one size and ignore where tensors begin, so that weights of many small tensors are few
chunks. Weights that are mapped, not sent, need no hash.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith_engine.base.types import AdapterConfig
from tinsmith_runtime.errors import CheckpointCorruptError

CHUNK_BYTES = 2**20
"""Size of a chunk: many to a message would make it large, and few to it slow."""

_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """What weights consist of.

    Attributes:
        run: Resource name of the run that they are of.
        base_model: Name of the base model.
        config: What is trained.
        version: Optimizer steps that made them.
        shapes: Shapes of the tensors by name, in the order of their numbers; all are float32.
        chunk_bytes: Size of each chunk but the last one, which may be shorter.
        digests: SHA-256 of each chunk; empty if the chunks are not hashed.
    """

    run: str
    base_model: str
    config: AdapterConfig
    version: int
    shapes: Mapping[str, tuple[int, ...]]
    chunk_bytes: int
    digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1 or any(
            size < 0 for shape in self.shapes.values() for size in shape
        ):
            raise CheckpointCorruptError(f"the index of weights of {self.run} has sizes below 0")
        if self.digests and len(self.digests) != self.num_chunks:
            raise CheckpointCorruptError(
                f"the index of weights of {self.run} has {len(self.digests)} digests for "
                f"{self.size_bytes} bytes in chunks of {self.chunk_bytes}"
            )

    @property
    def size_bytes(self) -> int:
        """Size of all numbers."""
        return _ITEM_BYTES * sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return -(-self.size_bytes // self.chunk_bytes)

    def span(self, chunk: int) -> slice:
        """Return which bytes a chunk holds."""
        begin = chunk * self.chunk_bytes
        return slice(begin, min(begin + self.chunk_bytes, self.size_bytes))

    def is_right(self, chunk: int, data: bytes | memoryview) -> bool:
        """Return whether data are those of a chunk; of weights that are hashed."""
        span = self.span(chunk)
        return (
            len(data) == span.stop - span.start
            and hashlib.sha256(data).digest() == self.digests[chunk]
        )

    def chunks_beyond(self, held: WeightIndex | None) -> list[int]:
        """Return the chunks that other weights do not hold in the same place."""
        if held is None or not self.is_like(held):
            return list(range(self.num_chunks))
        pairs = zip(self.digests, held.digests, strict=True)
        return [chunk for chunk, (new, old) in enumerate(pairs) if new != old]

    def is_like(self, other: WeightIndex) -> bool:
        """Return whether chunks of other weights can be compared with these: both are hashed."""
        return (
            list(self.shapes.items()) == list(other.shapes.items())
            and self.chunk_bytes == other.chunk_bytes
            and len(self.digests) == len(other.digests) == self.num_chunks
        )

    def tensors(self, numbers: memoryview) -> dict[str, Tensor]:
        """Return the tensors as views of memory that can be written to and has all chunks."""
        found: dict[str, Tensor] = {}
        flat = torch.frombuffer(numbers, dtype=torch.float32) if self.size_bytes else torch.zeros(0)
        begin = 0
        for name, shape in self.shapes.items():
            end = begin + math.prod(shape)
            found[name] = flat[begin:end].view(shape)
            begin = end
        return found


def numbers_of(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the numbers of float32 tensors on the host, in their order."""
    for tensor in filter(torch.numel, tensors.values()):
        array: Any = tensor.detach().contiguous().numpy()
        yield memoryview(array).cast("B")


def digests_of(numbers: memoryview, chunk_bytes: int) -> tuple[bytes, ...]:
    """Return the SHA-256 of each chunk."""
    return tuple(
        hashlib.sha256(numbers[begin : begin + chunk_bytes]).digest()
        for begin in range(0, numbers.nbytes, chunk_bytes)
    )
