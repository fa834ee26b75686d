"""Names and reading of the weight files of a checkpoint, for all code that writes or loads one.

A safetensors file is a length, a JSON header and numbers. `read_header` checks the header of a file
from outside before anything that it promises is allocated: what it returns can be read with the
library as it is.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from tinsmith_engine.base.types import AdapterConfig, FullConfig
from tinsmith_runtime.errors import (
    CheckpointCorruptError,
    CheckpointIncompatibleError,
    FileRefusedError,
)

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
MODEL_FILE = "model.safetensors"
MODEL_INDEX_FILE = "model.safetensors.index.json"

MAX_HEADER_BYTES = 16 * 2**20
_MAX_TENSORS = 100_000
_MAX_NAME_CHARACTERS = 512
_MAX_AXES = 8
_MAX_NUMBER = 2**62
_LENGTH_BYTES = 8
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_METADATA = "__metadata__"
# What a pickle, a zip of torch.save and a gzip begin with.
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x1f\x8b")

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes of one number by the dtype's name in a header."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a header describes it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Within the numbers of the file, in bytes."""
    end: int
    header_bytes: int = field(default=0, compare=False)
    """What stands before the numbers in the file."""

    @property
    def file_offset(self) -> int:
        """Where its numbers begin in the file."""
        return self.header_bytes + self.begin

    @property
    def size_bytes(self) -> int:
        """Bytes of its numbers."""
        return self.end - self.begin


def weights_file(config: AdapterConfig) -> str:
    """Return the name of the file that holds the weights of a run."""
    return MODEL_FILE if isinstance(config, FullConfig) else ADAPTER_FILE


def parse_tensors(files: Mapping[str, bytes], name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one safetensors file.

    Raises:
        CheckpointIncompatibleError: If the checkpoint has no such file.
        CheckpointCorruptError: If the file cannot be read.
    """
    if name not in files:
        raise CheckpointIncompatibleError(
            f"the checkpoint holds no {name}; it was saved by another kind of run", file=name
        )
    try:
        return load(files[name])
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointCorruptError(
            f"{name} is not a safetensors file: {error}; use another checkpoint", file=name
        ) from error


def read_header_of(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file on this machine; see `read_header`."""
    with path.open("rb") as file:
        return read_header(file, path.stat().st_size, name=path.name)


def read_header(file: BinaryIO, size_bytes: int, *, name: str) -> dict[str, TensorEntry]:
    """Return what a safetensors file holds, in the order of its numbers.

    Reads the header and nothing else, at most `MAX_HEADER_BYTES`. What is returned is true to the
    file: the tensors fill it without gaps or overlaps, their sizes are those of dtype and shape.

    Args:
        file: At its beginning.
        size_bytes: Of the whole file.
        name: Of the file, for errors.

    Raises:
        FileRefusedError: If anything of that does not hold.
    """
    start = file.read(_LENGTH_BYTES)
    length = int.from_bytes(start, "little")
    # A header of 1,152 bytes begins a file as a pickle does, whose length would be none.
    is_long = length > min(MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES)
    if start.startswith(_PICKLE_STARTS) and (is_long or length % _LENGTH_BYTES):
        raise _refused(name, "is a pickle or an archive; only safetensors are taken")
    if len(start) < _LENGTH_BYTES:
        raise _refused(name, f"has {size_bytes} bytes, too few for a safetensors file")
    if is_long:
        raise _refused(
            name,
            f"says that its header has {length} bytes; one of a file of {size_bytes} bytes has "
            f"at most {max(0, min(MAX_HEADER_BYTES, size_bytes - _LENGTH_BYTES))}",
        )
    content = file.read(length)
    if len(content) != length:
        raise _refused(name, "ends within its header")
    entries = {
        tensor: _entry_of(name, tensor, described)
        for tensor, described in _parse_header(name, content).items()
        if tensor != _METADATA
    }
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    expected = 0
    for tensor, entry in ordered:
        if entry.begin != expected:
            raise _refused(
                name, f"places tensor {tensor} at {entry.begin}, the one before ends at {expected}"
            )
        expected = entry.end
    if expected != size_bytes - _LENGTH_BYTES - length:
        raise _refused(
            name,
            f"has {size_bytes - _LENGTH_BYTES - length} bytes of numbers, its header describes "
            f"{expected}",
        )
    start_bytes = _LENGTH_BYTES + length
    return {
        tensor: dataclasses.replace(entry, header_bytes=start_bytes) for tensor, entry in ordered
    }


def _parse_header(name: str, content: bytes) -> dict[str, Any]:
    try:
        header = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        raise _refused(name, f"has a header that is not JSON: {str(error)[:200]}") from error
    if not isinstance(header, dict):
        raise _refused(name, "has a header that is not a JSON object")
    metadata = header.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _refused(name, "has metadata that are not texts by name")
    if len(header) > _MAX_TENSORS:
        raise _refused(name, f"holds {len(header)} tensors, at most {_MAX_TENSORS} are taken")
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _entry_of(name: str, tensor: str, described: object) -> TensorEntry:
    if len(tensor) > _MAX_NAME_CHARACTERS or _NAME_PATTERN.fullmatch(tensor) is None:
        raise _refused(name, f"holds a tensor named {tensor!r:.160}, which is no name of a weight")
    if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
        raise _refused(name, f"does not describe tensor {tensor} by dtype, shape and data_offsets")
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _refused(name, f"holds tensor {tensor} of an unknown dtype {dtype!r:.40}")
    if not _are_sizes(shape) or len(shape) > _MAX_AXES:
        raise _refused(name, f"holds tensor {tensor} with a shape that is none: {shape!r:.160}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _refused(name, f"holds tensor {tensor} with offsets that are none: {offsets!r:.160}")
    # Python's integers do not overflow: a product that would is another size than the offsets say.
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if num_bytes != offsets[1] - offsets[0]:
        raise _refused(
            name,
            f"gives tensor {tensor} {offsets[1] - offsets[0]} bytes, not those of {dtype} {shape}",
        )
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(values: object) -> bool:
    # A bool is an int for isinstance.
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < _MAX_NUMBER for value in values
    )


def _refused(name: str, problem: str) -> FileRefusedError:
    return FileRefusedError(f"{name} {problem}", file=name)
