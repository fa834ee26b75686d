"""Tensors of the Tinker wire, dense and sparse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from tinsmith_gateway.tinker import wire_pb2
from tinsmith_gateway.tinker.wire import bodies, sample_codec, tensor_codec
from tinsmith_runtime.errors import InvalidFieldError, ShapeMismatchError


def sparse(
    values: list[int], crow: list[int], columns: list[int], shape: list[int]
) -> wire_pb2.Tensor:
    csr = wire_pb2.SparseCsr(
        values=np.array(values, "<i8").tobytes(),
        crow_indices=np.array(crow, "<i8").tobytes(),
        col_indices=np.array(columns, "<i8").tobytes(),
    )
    return wire_pb2.Tensor(dtype=wire_pb2.DTYPE_INT64, shape=shape, sparse_csr=csr)


@given(np_st.arrays(np.int64, np_st.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=6)))
def test_a_dense_tensor_comes_back(array: np.ndarray) -> None:
    found = tensor_codec.decode_tensor(tensor_codec.encode_dense(array), "x")
    np.testing.assert_array_equal(found, array)
    assert found.dtype == np.int64


def test_a_bfloat16_tensor_is_widened() -> None:
    exact = np.array([1.5, -2.0, 0.0], dtype=np.float32)
    data = (exact.view(np.uint32) >> 16).astype("<u2").tobytes()
    tensor = wire_pb2.Tensor(dtype=wire_pb2.DTYPE_BFLOAT16, shape=[3], dense=data)
    np.testing.assert_array_equal(tensor_codec.decode_tensor(tensor, "x"), exact)


def test_a_tensor_without_a_shape_is_a_list() -> None:
    tensor = wire_pb2.Tensor(dtype=wire_pb2.DTYPE_INT32, dense=np.arange(4, dtype="<i4").tobytes())
    assert tensor_codec.decode_tensor(tensor, "x").shape == (4,)


@given(st.data())
def test_listed_cells_are_where_they_belong(data: st.DataObject) -> None:
    dense = data.draw(np_st.arrays(np.int64, (4, 5), elements=st.integers(0, 3)))
    rows, columns = np.nonzero(dense)
    crow = np.searchsorted(rows, np.arange(5)).tolist()
    tensor = sparse(dense[rows, columns].tolist(), crow, columns.tolist(), [4, 5])
    np.testing.assert_array_equal(tensor_codec.decode_tensor(tensor, "x"), dense)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(sparse([1], [0, 1], [9], [1, 2]), id="column-outside"),
        pytest.param(sparse([1], [0, 1], [-1], [1, 2]), id="negative-column"),
        pytest.param(sparse([1], [0, 2], [0], [1, 2]), id="rows-claim-too-much"),
        pytest.param(sparse([1, 2], [0, 2, 1], [0, 1], [2, 2]), id="rows-go-back"),
        pytest.param(sparse([1], [1, 1], [0], [1, 2]), id="rows-begin-late"),
        pytest.param(sparse([], [0], [], [0]), id="one-axis"),
        pytest.param(sparse([], [0, 0], [], [1, 2**40]), id="huge"),
        pytest.param(sparse([], [0, 0], [], [-1, 2]), id="negative-extent"),
        pytest.param(sparse([], [], [], [1, 1]), id="no-rows"),
        pytest.param(sparse([], [0], [], [0, 2**63 - 1]), id="huge-and-empty"),
        # Their differences are positive once they have overflowed.
        pytest.param(sparse([1], [0, 2**63 - 1, -2, 1], [0], [3, 1]), id="rows-overflow"),
    ],
)
def test_sparse_parts_that_do_not_fit_are_refused(tensor: wire_pb2.Tensor) -> None:
    with pytest.raises(ShapeMismatchError):
        tensor_codec.decode_tensor(tensor, "x")


@pytest.mark.parametrize(
    "tensor",
    [
        wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, shape=[2], dense=b"123"),
        wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, shape=[2**62, 0], dense=b""),
        wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, shape=[2], dense=b"1234"),
        wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, shape=[1, 1, 1], dense=b"1234"),
        wire_pb2.Tensor(dtype=wire_pb2.DTYPE_FLOAT32, shape=[-1], dense=b"1234"),
        wire_pb2.Tensor(dtype=wire_pb2.DTYPE_UNSPECIFIED, shape=[1], dense=b"1234"),
    ],
)
def test_dense_data_that_does_not_fill_its_shape_is_refused(tensor: wire_pb2.Tensor) -> None:
    with pytest.raises(InvalidFieldError):
        tensor_codec.decode_tensor(tensor, "x")


def test_targets_that_are_not_listed_ask_for_nothing() -> None:
    targets = sample_codec.decode_targets(
        bodies.TensorData(
            data=[0, 7],
            dtype="int64",
            shape=[3, 2],
            sparse_crow_indices=[0, 1, 1, 2],
            sparse_col_indices=[0, 1],
        )
    )
    np.testing.assert_array_equal(targets, [[0, -1], [-1, -1], [-1, 7]])


def test_scores_have_the_layout_of_what_was_asked() -> None:
    scores = np.array([[0.5, 0.0], [0.0, -1.0]], dtype=np.float32)
    tensor = tensor_codec.encode_csr(scores, np.array([0, 1, 2]), np.array([0, 1]))
    np.testing.assert_array_equal(tensor_codec.decode_tensor(tensor, "x"), scores)
    assert tensor.HasField("sparse_csr")
