"""Calls of the engine as bytes, from rank 0 to the others.

A message is a JSON header and the arrays that it refers to. Not pickle, which would let any
process that reaches the port of the process group run code in it: what can be built from a
message is the closed
list of value classes below.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.base.types import (
    AdamParams,
    BatchRequest,
    BatchResult,
    Datum,
    FullConfig,
    LoraConfig,
    OptimStepResult,
    RunState,
    WeightVersion,
)
from tinsmith_runtime.errors import TinsmithError

_CLASSES: Mapping[str, type[Any]] = {
    one.__name__: one
    for one in (
        AdamParams,
        BatchRequest,
        Datum,
        BatchResult,
        FullConfig,
        LoraConfig,
        OptimStepResult,
        WeightVersion,
        RunState,
    )
}
_LENGTH_BYTES = 8


def encode(value: object) -> bytes:
    """Return a value as bytes; equal values give equal bytes.

    Raises:
        TypeError: It holds something else than plain values, arrays and the engine's own values.
    """
    blobs: list[bytes] = []
    header = json.dumps(_encode(value, blobs), separators=(",", ":")).encode()
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *blobs])


def decode(message: bytes) -> Any:
    """Return the value that `encode` was given; arrays are copies that may be written to."""
    end = _LENGTH_BYTES + int.from_bytes(message[:_LENGTH_BYTES], "little")
    blobs = memoryview(message)[end:]
    return _decode(json.loads(message[_LENGTH_BYTES:end]), blobs)


def digest(value: object) -> str:
    """Return a hash of a value, by which ranks find out that they agree."""
    return hashlib.sha256(encode(value)).hexdigest()[:16]


def _encode(value: object, blobs: list[bytes]) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        flat = value.detach().to("cpu").contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if value.numel() else b""
        name = str(value.dtype).removeprefix("torch.")
        return {"tensor": [name, list(value.shape), _add(blobs, data), len(data)]}
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).tobytes()
        return {"array": [value.dtype.str, list(value.shape), _add(blobs, data), len(data)]}
    if isinstance(value, list):
        return [_encode(one, blobs) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_encode(one, blobs) for one in value]}
    if isinstance(value, Mapping):
        return {"map": [[str(key), _encode(one, blobs)] for key, one in value.items()]}
    if isinstance(value, TinsmithError):
        return {"error": [type(value).__name__, value.message]}
    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        fields = [field.name for field in dataclasses.fields(_CLASSES[name])]
        return {"value": [name, [[f, _encode(getattr(value, f), blobs)] for f in fields]]}
    raise TypeError(f"{type(value)} has no place in a message between ranks")


def _add(blobs: list[bytes], data: bytes) -> int:
    offset = sum(len(blob) for blob in blobs)
    blobs.append(data)
    return offset


def _decode(node: Any, blobs: memoryview) -> Any:
    if isinstance(node, list):
        return [_decode(one, blobs) for one in node]
    if not isinstance(node, dict):
        return node
    [(kind, content)] = node.items()
    match kind:
        case "tensor":
            name, shape, offset, length = content
            if not length:
                return torch.empty(shape, dtype=getattr(torch, name))
            data = torch.frombuffer(bytearray(blobs[offset : offset + length]), dtype=torch.uint8)
            return data.view(getattr(torch, name)).view(shape)
        case "array":
            dtype, shape, offset, length = content
            return (
                np.frombuffer(blobs[offset : offset + length], dtype=np.dtype(dtype))
                .reshape(shape)
                .copy()
            )
        case "tuple":
            return tuple(_decode(one, blobs) for one in content)
        case "map":
            return {key: _decode(one, blobs) for key, one in content}
        case "value":
            name, fields = content
            return _CLASSES[name](**{field: _decode(one, blobs) for field, one in fields})
        case _:
            raise ValueError(f"a message holds {kind!r}")
