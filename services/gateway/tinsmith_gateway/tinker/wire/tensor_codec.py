"""Tensors of the Tinker wire to numpy and back: dense or sparse rows, in protobuf or JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith_gateway.tinker import wire_pb2
from tinsmith_runtime.errors import InvalidFieldError, ShapeMismatchError

Array = NDArray[np.generic]

MAX_ELEMENTS = 2**25
"""Elements of one tensor once it is dense; a sparse one of a few bytes could claim any number."""
_MAX_AXES = 2
_DTYPES: dict[int, np.dtype[Any]] = {
    wire_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    wire_pb2.DTYPE_INT64: np.dtype("<i8"),
    wire_pb2.DTYPE_INT32: np.dtype("<i4"),
    wire_pb2.DTYPE_BFLOAT16: np.dtype("<u2"),
}
_INDEX = np.dtype("<i8")


def decode_tensor(message: wire_pb2.Tensor, field: str) -> Array:
    """Return a tensor as a dense array; float32 for bfloat16.

    Raises:
        InvalidFieldError: If dtype, shape or indices are no good.
        ShapeMismatchError: If the data does not fill the shape.
    """
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise InvalidFieldError(f"{field}.dtype", f"is no dtype: {message.dtype}")
    if message.HasField("sparse_csr"):
        csr = message.sparse_csr
        array = from_csr(
            read_array(csr.values, dtype, f"{field}.sparse_csr.values"),
            read_array(csr.crow_indices, _INDEX, f"{field}.sparse_csr.crow_indices"),
            read_array(csr.col_indices, _INDEX, f"{field}.sparse_csr.col_indices"),
            tuple(message.shape),
            field,
        )
    else:
        array = read_array(message.dense, dtype, f"{field}.dense")
        array = shaped(array, tuple(message.shape) or (array.size,), field)
    if message.dtype == wire_pb2.DTYPE_BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def claimed_bytes(message: wire_pb2.Tensor) -> int:
    """Return what a sparse tensor takes once it is dense; 0 for a dense one, which is there."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None or not message.HasField("sparse_csr") or min(message.shape, default=-1) < 0:
        return 0
    return math.prod(message.shape) * dtype.itemsize


def read_array(data: bytes, dtype: np.dtype[Any], field: str) -> Array:
    """Return bytes as a flat array.

    Raises:
        ShapeMismatchError: If they are no whole number of elements.
    """
    if len(data) % dtype.itemsize:
        raise ShapeMismatchError(
            field, f"has {len(data)} bytes, no multiple of {dtype.itemsize} for {dtype.name}"
        )
    return np.frombuffer(data, dtype=dtype)


def shaped(array: Array, shape: tuple[int, ...], field: str) -> Array:
    """Return an array in a shape.

    Raises:
        ShapeMismatchError: If it does not fill it.
    """
    if len(shape) > _MAX_AXES or not _is_bounded(shape):
        raise ShapeMismatchError(
            field,
            f"has shape {list(shape)[:8]}; at most two axes of at most {MAX_ELEMENTS} are taken",
        )
    if math.prod(shape) != array.size:
        raise ShapeMismatchError(
            field, f"has {array.size} elements, its shape {list(shape)} needs {math.prod(shape)}"
        )
    return array.reshape(shape)


def from_csr(
    values: Array, crow_indices: Array, col_indices: Array, shape: tuple[int, ...], field: str
) -> Array:
    """Return a sparse matrix as a dense one; what is not listed is 0.

    Raises:
        ShapeMismatchError: If the parts do not fit together.
    """
    if len(shape) != _MAX_AXES or not _is_bounded(shape) or math.prod(shape) > MAX_ELEMENTS:
        raise ShapeMismatchError(
            field,
            f"is sparse with shape {list(shape)[:8]}; two axes and at most {MAX_ELEMENTS} "
            "elements are taken",
        )
    num_rows, num_columns = shape
    is_consistent = (
        crow_indices.size == num_rows + 1
        and values.size == col_indices.size
        and crow_indices[0] == 0
        and crow_indices[-1] == values.size
        # Compared, because a difference of two large ones may overflow into what looks right.
        and bool(np.greater_equal(crow_indices[1:], crow_indices[:-1]).all())
        and (
            col_indices.size == 0
            or (int(col_indices.min()) >= 0 and int(col_indices.max()) < num_columns)
        )
    )
    if not is_consistent:
        raise ShapeMismatchError(
            field, f"is sparse, and its indices do not fit its shape {list(shape)}"
        )
    dense = np.zeros(shape, dtype=values.dtype)
    rows = np.repeat(np.arange(num_rows), _row_counts(crow_indices))
    dense[rows, col_indices.astype(np.int64)] = values
    return dense


def encode_dense(array: Array) -> wire_pb2.Tensor:
    """Return the message of an int64 or float32 array."""
    is_integer = np.issubdtype(array.dtype, np.integer)
    dtype = wire_pb2.DTYPE_INT64 if is_integer else wire_pb2.DTYPE_FLOAT32
    data = np.ascontiguousarray(array, dtype=_DTYPES[dtype]).tobytes()
    return wire_pb2.Tensor(dtype=dtype, shape=array.shape, dense=data)


def encode_csr(
    dense: NDArray[np.float32], crow_indices: Array, col_indices: Array
) -> wire_pb2.Tensor:
    """Return the message of the listed cells of a float32 matrix."""
    rows = np.repeat(np.arange(dense.shape[0]), _row_counts(crow_indices))
    values = dense[rows, col_indices.astype(np.int64)]
    return wire_pb2.Tensor(
        dtype=wire_pb2.DTYPE_FLOAT32,
        shape=dense.shape,
        sparse_csr=wire_pb2.SparseCsr(
            values=values.astype("<f4").tobytes(),
            crow_indices=crow_indices.astype(_INDEX).tobytes(),
            col_indices=col_indices.astype(_INDEX).tobytes(),
        ),
    )


def _is_bounded(shape: tuple[int, ...]) -> bool:
    # By axis, since numpy refuses a huge one of an array that has no elements.
    return all(0 <= extent <= MAX_ELEMENTS for extent in shape)


def _row_counts(crow_indices: Array) -> NDArray[np.int64]:
    ends: NDArray[np.int64] = crow_indices.astype(np.int64)
    counts: NDArray[np.int64] = ends[1:] - ends[:-1]
    return counts
