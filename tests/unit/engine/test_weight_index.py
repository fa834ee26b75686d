"""The index of weights: which chunks there are, which differ, and that nothing else passes."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith_engine import AdapterConfig, FullConfig, LoraConfig
from tinsmith_engine.contract.weight_codec import decode_index, encode_index
from tinsmith_engine.files.weight_index import WeightIndex, digests_of, numbers_of
from tinsmith_runtime.errors import CheckpointCorruptError

_SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=4),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    min_size=1,
    max_size=5,
)


def make(
    shapes: dict[str, tuple[int, ...]], *, seed: int = 0, chunk_bytes: int = 16
) -> tuple[WeightIndex, memoryview]:
    """Return random weights of some shapes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    numbers = memoryview(bytearray(b"".join(numbers_of(tensors))))
    index = WeightIndex(
        run="projects/p/trainingRuns/r",
        base_model="tiny",
        config=LoraConfig(rank=4),
        version=3,
        shapes=shapes,
        chunk_bytes=chunk_bytes,
        digests=digests_of(numbers, chunk_bytes),
    )
    return index, numbers


@settings(deadline=None)
@given(_SHAPES, st.integers(1, 64))
def test_tensors_and_chunks_are_views_of_the_same_numbers(
    shapes: dict[str, tuple[int, ...]], chunk_bytes: int
) -> None:
    index, numbers = make(shapes, chunk_bytes=chunk_bytes)
    assert index.size_bytes == numbers.nbytes == 4 * sum(map(math.prod, shapes.values()))
    assert b"".join(bytes(numbers[index.span(c)]) for c in range(index.num_chunks)) == numbers
    assert all(index.is_right(c, numbers[index.span(c)]) for c in range(index.num_chunks))
    tensors = index.tensors(numbers)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert b"".join(numbers_of(tensors)) == numbers


@settings(deadline=None)
@given(st.data())
def test_a_chunk_with_any_other_bit_is_wrong(data: st.DataObject) -> None:
    index, numbers = make({"a": (3, 5), "b": (7,)})
    chunk = data.draw(st.integers(0, index.num_chunks - 1))
    content = bytearray(numbers[index.span(chunk)])
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    assert not index.is_right(chunk, bytes(content))
    assert not index.is_right(chunk, bytes(numbers[index.span(chunk)])[:-1])


@settings(deadline=None)
@given(st.sets(st.integers(0, 21)))
def test_chunks_that_differ_are_those_with_another_number(changed: set[int]) -> None:
    held, numbers = make({"a": (3, 5), "b": (7,)})
    values = bytearray(numbers)
    for number in changed:
        values[4 * number] ^= 1
    index = dataclasses.replace(held, digests=digests_of(memoryview(values), 16))
    assert index.chunks_beyond(held) == sorted({number * 4 // 16 for number in changed})
    assert index.chunks_beyond(None) == list(range(index.num_chunks))


def test_weights_of_other_tensors_share_nothing() -> None:
    index, numbers = make({"a": (4, 4)})
    other = dataclasses.replace(index, shapes={"a": (16,)}, digests=digests_of(numbers, 16))
    assert index.chunks_beyond(other) == list(range(index.num_chunks))


def test_weights_that_are_not_hashed_share_nothing() -> None:
    index, _ = make({"a": (4, 4)})
    bare = dataclasses.replace(index, digests=())
    assert bare.num_chunks == index.num_chunks == 4
    for one, other in ((bare, index), (index, bare), (bare, bare)):
        assert one.chunks_beyond(other) == [0, 1, 2, 3]


@pytest.mark.parametrize("config", [LoraConfig(rank=4, seed=2, train_mlp=False), FullConfig()])
def test_an_index_comes_back_from_its_encoding(config: AdapterConfig) -> None:
    index = dataclasses.replace(make({"a": (3, 5), "b": (7,)})[0], config=config)
    encoded = encode_index(index)
    assert decode_index(encoded, sha256=hashlib.sha256(encoded).digest()) == index


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=40), st.integers(0, 200))
def test_bytes_that_are_no_index_are_refused_by_type(noise: bytes, cut: int) -> None:
    encoded = encode_index(make({"a": (3, 5), "b": (7,)})[0])
    content = encoded[:cut] + noise
    with pytest.raises(CheckpointCorruptError):
        decode_index(content + b"x", sha256=hashlib.sha256(encoded).digest())
    try:
        decode_index(content, sha256=hashlib.sha256(content).digest())
    except CheckpointCorruptError:
        return
