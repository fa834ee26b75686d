"""What is uploaded: bytes, or a file that is read in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from tinsmith_runtime.errors import DataLossError


class Source(Protocol):
    """What is uploaded: it can be read from the beginning as often as needed."""

    @property
    def size_bytes(self) -> int:
        """Its size."""
        ...

    def parts(self, part_bytes: int) -> Iterator[bytes]:
        """Yield it in chunks of this size; the last one may be shorter."""
        ...


@dataclass(frozen=True, slots=True)
class BytesSource:
    """An object in memory."""

    data: bytes

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return len(self.data)

    def parts(self, part_bytes: int) -> Iterator[bytes]:
        """Yield it in chunks; see `Source.parts`."""
        for begin in range(0, len(self.data), part_bytes):
            yield self.data[begin : begin + part_bytes]


@dataclass(frozen=True, slots=True)
class FileSource:
    """An open file, as large as it was when it was opened."""

    file: BinaryIO
    size_bytes: int

    def parts(self, part_bytes: int) -> Iterator[bytes]:
        """Yield it in chunks; see `Source.parts`."""
        self.file.seek(0)
        left_bytes = self.size_bytes
        while left_bytes:
            data = self.file.read(min(part_bytes, left_bytes))
            if not data:
                raise DataLossError(f"{self.file.name} became shorter while it was stored")
            left_bytes -= len(data)
            yield data
