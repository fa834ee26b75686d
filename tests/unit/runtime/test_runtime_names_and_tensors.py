from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from tinsmith import names
from tinsmith.tensors import TensorFormatError, decode_tensor, encode_tensor, encode_tokens
from tinsmith.v1 import tensors_pb2

IDS = st.text("aZ09._-", min_size=1, max_size=63).filter(lambda text: text[0].isalnum())
# Not `__subclasses__()`: dataclasses with slots leave a twin behind.
NAME_CLASSES = [c for key, c in vars(names).items() if key.endswith("Name") and c.pattern]


@given(st.data(), st.sampled_from(NAME_CLASSES))
def test_names_read_back(data: st.DataObject, name_class: type[names.ResourceName]) -> None:
    ids = [data.draw(IDS) for _ in dataclasses.fields(name_class)]
    name = name_class(*ids)
    assert name_class.parse(str(name)) == name
    matching = [other for other in NAME_CLASSES if _parses(other, str(name))]
    assert matching == [name_class]


def _parses(name_class: type[names.ResourceName], text: str) -> bool:
    try:
        name_class.parse(text)
    except names.InvalidNameError:
        return False
    return True


@pytest.mark.parametrize("value", ["r/c", "r/checkpoints/c"])
def test_a_short_name_of_a_checkpoint_is_completed(value: str) -> None:
    name = "projects/p/trainingRuns/r/checkpoints/c"
    assert names.whole_checkpoint(value, "p") == name
    assert names.whole_checkpoint(name, "other") == name
    assert names.shorten(name) == "r/c"


@pytest.mark.parametrize("value", ["", "r", "projects/p", "r/", "/c", "r/../c", "a/b/c", "r/c/d/e"])
def test_what_is_no_short_name_stays_as_it_is(value: str) -> None:
    assert names.whole_checkpoint(value, "p") == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "projects/p",
        "projects/p/trainingRuns",
        "projects/p/trainingRuns/",
        "projects//trainingRuns/r",
        "projects/p/trainingRuns/r/",
        "/projects/p/trainingRuns/r",
        "projects/p/trainingRuns/..",
        "projects/../trainingRuns/r",
        "projects/p/trainingRuns/-r",
        "projects/p/trainingRuns/r\n",
        "projects/p/trainingRuns/r r",
        "projects/p/trainingRuns/é",
        "projects/p/trainingRuns/" + "r" * 64,
        "Projects/p/trainingRuns/r",
    ],
)
def test_other_strings_are_not_run_names(text: str) -> None:
    with pytest.raises(names.InvalidNameError, match=r"projects/\{project\}/trainingRuns/\{run\}"):
        names.RunName.parse(text)


def test_parents_are_part_of_the_name() -> None:
    run = names.RunName("p", "r")
    assert names.OperationName("p", "r", "7").run_name == run
    assert names.CheckpointName.parse(f"{run}/checkpoints/c").run_name == run


@given(
    st_numpy.arrays(
        st.sampled_from([np.float32, np.int64, np.int32]),
        st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    )
)
def test_tensors_read_back(array: np.ndarray) -> None:  # type: ignore[type-arg]
    found = decode_tensor(tensors_pb2.Tensor.FromString(encode_tensor(array).SerializeToString()))
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


def test_tensors_are_little_endian_and_row_major() -> None:
    message = encode_tensor(np.array([[1, 2], [3, 4]], dtype=">i4").T)
    assert message.dtype == tensors_pb2.DTYPE_INT32
    assert message.data == b"".join(n.to_bytes(4, "little") for n in (1, 3, 2, 4))
    assert encode_tokens([7]).data == b"\7\0\0\0"


def test_bfloat16_is_read_as_float32() -> None:
    values = np.array([1.0, -2.5, 0.0], np.float32)
    data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    message = tensors_pb2.Tensor(dtype=tensors_pb2.DTYPE_BFLOAT16, shape=[3], data=data)
    assert decode_tensor(message).tolist() == values.tolist()


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TensorFormatError, match="float64"):
        encode_tensor(np.zeros(1))


@pytest.mark.parametrize(
    ("shape", "data", "dtype"),
    [
        pytest.param([3], b"\0" * 8, tensors_pb2.DTYPE_FLOAT32, id="too-little-data"),
        pytest.param([1], b"\0" * 8, tensors_pb2.DTYPE_FLOAT32, id="too-much-data"),
        pytest.param([-1], b"", tensors_pb2.DTYPE_FLOAT32, id="negative"),
        pytest.param([-2, -2], b"\0" * 16, tensors_pb2.DTYPE_FLOAT32, id="negative-twice"),
        pytest.param([2**62, 4], b"", tensors_pb2.DTYPE_FLOAT32, id="overflow"),
        pytest.param([1], b"\0" * 4, 0, id="no-dtype"),
        pytest.param([1], b"\0" * 4, 99, id="unknown-dtype"),
        pytest.param([1] * 70, b"\0" * 4, tensors_pb2.DTYPE_INT32, id="axes"),
        pytest.param([0, 2**62, 9], b"", tensors_pb2.DTYPE_INT32, id="zero"),
    ],
)
def test_messages_that_disagree_with_themselves_are_refused(
    shape: list[int], data: bytes, dtype: int
) -> None:
    with pytest.raises(TensorFormatError):
        decode_tensor(tensors_pb2.Tensor(dtype=dtype, shape=shape, data=data))
