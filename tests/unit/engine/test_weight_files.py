"""Headers of safetensors files from outside: what is not true to the file is refused, typed."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from tinsmith_engine.files.weight_files import MAX_HEADER_BYTES, read_header
from tinsmith_runtime.errors import FileRefusedError

GOOD = save({"a": torch.ones(2, 3), "b": torch.arange(4, dtype=torch.int64)}, {"format": "pt"})


def check(content: bytes) -> dict[str, Any]:
    return read_header(io.BytesIO(content), len(content), name="file")


def made(header: Any, num_bytes: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def tensor(dtype: Any = "F32", shape: Any = (1,), begin: Any = 0, end: Any = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def zipped() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("data.pkl", pickle.dumps({"a": 1}))
    return target.getvalue()


def test_a_good_file_is_described_in_the_order_of_its_numbers() -> None:
    found = check(GOOD)
    assert {name: (entry.dtype, entry.shape) for name, entry in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I64", (4,)),
    }
    begins = [entry.begin for entry in found.values()]
    assert begins == sorted(begins)
    assert sum(entry.size_bytes for entry in found.values()) == 24 + 32


HOSTILE = {
    "empty": b"",
    "short": b"\x01\x02",
    "pickle": pickle.dumps({"a": 1}, protocol=2),
    "pickle-4": pickle.dumps({"a": 1}, protocol=4),
    "torch-zip": zipped(),
    "length-beyond-the-file": (100).to_bytes(8, "little") + b"{}",
    "length-of-all-ones": b"\xff" * 8 + b"{}",
    "header-too-long": (MAX_HEADER_BYTES + 1).to_bytes(8, "little"),
    "no-json": made(b"hello"),
    "no-utf8": made(b'{"\xff": 1}'),
    "list": made([1, 2]),
    "deep": made(b"[" * 100_000),
    "long-integer": made(b'{"a": ' + b"9" * 10_000 + b"}"),
    "infinity": made(b'{"a": Infinity}'),
    "duplicate-name": made(
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        4,
    ),
    "duplicate-key": made(
        b'{"a": {"dtype": "F32", "dtype": "I8", "shape": [1], "data_offsets": [0, 4]}}', 4
    ),
    "metadata-not-texts": made({"__metadata__": {"a": 1}}),
    "metadata-list": made({"__metadata__": []}),
    "unknown-dtype": made({"a": tensor("F3")}, 4),
    "dtype-not-text": made({"a": tensor(["F32"])}, 4),
    "shape-not-list": made({"a": tensor() | {"shape": 1}}, 4),
    "shape-of-texts": made({"a": tensor(shape=["1"])}, 4),
    "shape-of-truth": made({"a": tensor(shape=[True])}, 4),
    "shape-of-fractions": made({"a": tensor(shape=[1.0])}, 4),
    "negative-shape": made({"a": tensor(shape=[-1, -1])}, 4),
    "too-many-axes": made({"a": tensor(shape=[1] * 9)}, 4),
    "product-overflows-64-bits": made({"a": tensor("U8", [2**32, 2**32, 4], 0, 0)}),
    "product-overflows-to-the-size": made({"a": tensor("F32", [2**62 - 1, 2**62 - 1], 0, 4)}, 4),
    "size-not-of-shape": made({"a": tensor(end=8)}, 8),
    "offsets-turned": made({"a": tensor(begin=4, end=0)}, 4),
    "offsets-beyond-the-file": made({"a": tensor(begin=0, end=4)}, 3),
    "numbers-left-over": made({"a": tensor()}, 5),
    "one-offset": made({"a": tensor() | {"data_offsets": [0]}}, 4),
    "gap": made({"a": tensor(), "b": tensor(begin=8, end=12)}, 12),
    "overlap": made({"a": tensor(), "b": tensor(begin=2, end=6)}, 6),
    "same-place": made({"a": tensor(), "b": tensor()}, 4),
    "unknown-key": made({"a": tensor() | {"more": 1}}, 4),
    "missing-key": made({"a": {"dtype": "F32"}}, 4),
    "tensor-not-object": made({"a": 3}),
    "no-name": made({"": tensor()}, 4),
    "path-name": made({"../a": tensor()}, 4),
    "name-with-nul": made({"a\0b": tensor()}, 4),
    "long-name": made({"a" * 600: tensor()}, 4),
    "header-cut": GOOD[:20],
    "numbers-cut": GOOD[:-1],
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused(content: bytes) -> None:
    with pytest.raises(FileRefusedError) as refused:
        check(content)
    assert refused.value.metadata["file"] == "file"
    assert len(refused.value.message) < 600


class CountingFile(io.BytesIO):
    most_wanted = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.most_wanted = max(self.most_wanted, size if size is not None and size >= 0 else 2**63)
        return super().read(size)


def test_nothing_is_read_that_a_length_promises() -> None:
    file = CountingFile((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(FileRefusedError):
        read_header(file, 2**41, name="file")
    assert file.most_wanted == 8


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_file_with_changed_bytes_is_refused_or_can_be_read(data: st.DataObject) -> None:
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["set", "delete", "insert", "cut"])):
            case "set":
                content[place] = data.draw(st.integers(0, 255))
            case "delete" if len(content) > 1:
                del content[place]
            case "insert":
                content[place:place] = data.draw(st.binary(max_size=9))
            case _:
                del content[place + 1 :]
    try:
        found = check(bytes(content))
    except FileRefusedError:
        return
    tensors = load(bytes(content))
    assert set(tensors) == set(found)
    assert all(tuple(tensors[name].shape) == entry.shape for name, entry in found.items())
