"""numpy arrays to and from `tinsmith.v1.Tensor`: little-endian bytes, read without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tinsmith.v1 import tensors_pb2

_DTYPES: dict[tensors_pb2.Dtype.ValueType, np.dtype[np.generic]] = {
    tensors_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    tensors_pb2.DTYPE_INT64: np.dtype("<i8"),
    tensors_pb2.DTYPE_INT32: np.dtype("<i4"),
}
_WIRE_DTYPES = {dtype: wire for wire, dtype in _DTYPES.items()}
_BFLOAT16_BYTES = 2
# Beyond these numpy raises errors of its own; no tensor of a message comes near them.
_MAX_AXES = 8
_MAX_EXTENT = 2**48


class TensorFormatError(ValueError):
    """A `Tensor` message whose dtype, shape and data do not agree."""


def encode_tensor(array: NDArray[np.generic]) -> tensors_pb2.Tensor:
    """Return the message of an array of float32, int32 or int64.

    Raises:
        TensorFormatError: If the dtype has no wire form.
    """
    wire = _WIRE_DTYPES.get(array.dtype.newbyteorder("<"))
    if wire is None:
        raise TensorFormatError(
            f"dtype {array.dtype} has no wire form; use float32, int32 or int64"
        )
    data = np.ascontiguousarray(array, dtype=_DTYPES[wire]).tobytes()
    return tensors_pb2.Tensor(dtype=wire, shape=array.shape, data=data)


def encode_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> tensors_pb2.Tensor:
    """Return token ids as an int32 tensor of shape [T]."""
    return encode_tensor(np.asarray(tokens, dtype=np.int32))


def decode_tensor(message: tensors_pb2.Tensor) -> NDArray[np.generic]:
    """Return the array of a message; float32 for bfloat16. Read-only where it is not converted.

    Raises:
        TensorFormatError: If dtype, shape and data do not agree.
    """
    if len(message.shape) > _MAX_AXES or any(
        not 0 <= extent <= _MAX_EXTENT for extent in message.shape
    ):
        raise TensorFormatError(
            f"shape {list(message.shape[:_MAX_AXES])} must have at most {_MAX_AXES} axes of 0 to "
            f"{_MAX_EXTENT}"
        )
    num_elements = math.prod(message.shape)
    is_bfloat16 = message.dtype == tensors_pb2.DTYPE_BFLOAT16
    dtype = np.dtype("<u2") if is_bfloat16 else _DTYPES.get(message.dtype)
    if dtype is None:
        raise TensorFormatError(f"dtype {message.dtype} is not one of {sorted(_DTYPES)}")
    expected_bytes = num_elements * (_BFLOAT16_BYTES if is_bfloat16 else dtype.itemsize)
    if len(message.data) != expected_bytes:
        raise TensorFormatError(
            f"data has {len(message.data)} bytes, shape {list(message.shape)} needs "
            f"{expected_bytes}"
        )
    array: NDArray[np.generic] = np.frombuffer(message.data, dtype=dtype).reshape(
        tuple(message.shape)
    )
    if is_bfloat16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array
