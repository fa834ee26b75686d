"""How passes are planned: groups of runs, packed rows, attention buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith_engine.arena.slots import Arena, ParameterLayout
from tinsmith_engine.packing.packing import (
    attention_buckets,
    pack,
    padded_length,
    segment_rows,
    split_batch,
)
from tinsmith_engine.training.adapter_groups import AdapterUse, fill_passes, group_adapters

CPU = torch.device("cpu")


# Stacks and passes.


@pytest.mark.parametrize(
    ("sizes", "max_tokens", "passes"),
    [
        pytest.param([], 100, [], id="nothing"),
        pytest.param([40, 40, 40], 100, [[0, 1], [2]], id="in-order"),
        pytest.param([50, 50, 1], 100, [[0, 1], [2]], id="exactly-full"),
        pytest.param([10, 300, 10], 100, [[0], [1], [2]], id="too-large-is-alone"),
        pytest.param([90, 20, 10], 100, [[0], [1, 2]], id="never-reordered"),
    ],
)
def test_passes_are_filled_in_order(
    sizes: list[int], max_tokens: int, passes: list[list[int]]
) -> None:
    assert fill_passes(enumerate(sizes), max_tokens) == passes


ARENAS = [Arena(ParameterLayout([("a", (size,))]), CPU) for size in (64, 128)]


def use(
    slot_index: int,
    *,
    arena: int = 0,
    scale: float = 1.0,
    accumulates: bool = False,
    num_rows: int = 32,
) -> AdapterUse:
    return AdapterUse(ARENAS[arena], slot_index, scale, accumulates, num_rows)


@pytest.mark.parametrize(
    ("uses", "groups"),
    [
        pytest.param([use(2), use(0), use(1)], [[1, 2, 0]], id="neighbours-by-row"),
        pytest.param([use(0), use(3), use(6)], [[0, 1, 2]], id="one-stride"),
        pytest.param([use(0), use(1), use(3)], [[0, 1], [2]], id="stride-breaks"),
        pytest.param([None, use(1), None], [[0], [2], [1]], id="base-model-is-alone"),
        pytest.param([use(0), use(1, num_rows=16)], [[1], [0]], id="segments-differ"),
        pytest.param([use(0), use(1, scale=2.0)], [[0], [1]], id="scales-differ"),
        pytest.param([use(0), use(1, accumulates=True)], [[0], [1]], id="one-accumulates"),
        pytest.param([use(4), use(4), use(5)], [[0, 2], [1]], id="each-run-once-in-a-stack"),
        # A chunk of this arena has 64 rows.
        pytest.param([use(63), use(64)], [[0], [1]], id="chunks-differ"),
    ],
)
def test_segments_that_can_share_a_product_are_stacked(
    uses: list[AdapterUse | None], groups: list[list[int]]
) -> None:
    assert group_adapters(uses, groups_adapters=True) == groups
    assert group_adapters(uses, groups_adapters=False) == [[i] for i in range(len(uses))]


def test_arenas_do_not_stack_with_each_other() -> None:
    groups = group_adapters(
        [use(0), use(0, arena=1), use(1), use(1, arena=1)], groups_adapters=True
    )
    assert sorted(groups) == [[0, 2], [1, 3]]


# Packing.


@pytest.mark.parametrize(
    ("num_tokens", "length"), [(1, 16), (16, 16), (17, 32), (128, 128), (129, 192), (193, 256)]
)
def test_attention_pads_by_length_alone(num_tokens: int, length: int) -> None:
    assert padded_length(num_tokens) == length


@pytest.mark.parametrize(
    ("lengths", "micro_batch_tokens", "parts"),
    [
        pytest.param([5], 1, [[0]], id="never-cut"),
        pytest.param([9, 3, 6], 9, [[1, 2], [0]], id="shortest-first"),
        pytest.param([4, 4, 4], 8, [[0, 1], [2]], id="equal-lengths-keep-their-order"),
        pytest.param([50, 1, 50], 20, [[1], [0], [2]], id="long-ones-are-alone"),
    ],
)
def test_a_batch_is_split_by_itself_alone(
    lengths: list[int], micro_batch_tokens: int, parts: list[list[int]]
) -> None:
    assert split_batch(lengths, micro_batch_tokens) == parts


def tokens(*lengths: int) -> list[Any]:
    """Return sequences whose tokens tell which they are: 100, 101, ...; 200, 201, ..."""
    return [100 * (index + 1) + np.arange(length) for index, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("segments", "quantum", "slices", "sequences", "num_rows"),
    [
        pytest.param([[5]], 16, [(0, 16)], [[(0, 5)]], 16, id="one"),
        pytest.param(
            [[5, 9], [16]], 16, [(0, 16), (16, 32)], [[(0, 5), (5, 9)], [(16, 16)]], 32, id="two"
        ),
        pytest.param(
            [[1], [20]], 64, [(0, 16), (16, 48)], [[(0, 1)], [(16, 20)]], 64, id="coarse-quantum"
        ),
        pytest.param([[3], [4]], 1, [(0, 16), (16, 32)], [[(0, 3)], [(16, 4)]], 32, id="fine"),
    ],
)
def test_segments_lie_one_after_the_other(
    segments: list[list[int]],
    quantum: int,
    slices: list[tuple[int, int]],
    sequences: list[list[tuple[int, int]]],
    num_rows: int,
) -> None:
    given = [tokens(*lengths) for lengths in segments]
    packed = pack(given, quantum=quantum, device=CPU)
    assert len(packed) == num_rows
    assert [(one.start, one.stop) for one in packed.segments] == slices
    assert [list(one) for one in packed.sequences] == sequences
    filled = np.zeros(num_rows, bool)
    for places, within in zip(packed.sequences, given, strict=True):
        for (first, length), sequence in zip(places, within, strict=True):
            rows = slice(first, first + length)
            assert packed.tokens_N[rows].tolist() == sequence.tolist()
            assert packed.positions_N[rows].tolist() == list(range(length))
            filled[rows] = True
    assert not packed.tokens_N[torch.from_numpy(~filled)].any()
    assert [segment_rows(lengths) for lengths in segments] == [stop - a for a, stop in slices]


@pytest.mark.parametrize(
    ("sequences", "lengths", "is_slice", "is_padded"),
    [
        pytest.param([(0, 16), (16, 16)], [16], [True], [False], id="full-neighbours"),
        pytest.param([(0, 16), (48, 16)], [16], [False], [False], id="full-apart"),
        pytest.param([(0, 5), (16, 16)], [16], [False], [True], id="padded"),
        pytest.param([(0, 5), (5, 40), (48, 3)], [16, 48], [False] * 2, [True] * 2, id="two"),
        pytest.param([(7, 130)], [192], [False], [True], id="long"),
    ],
)
def test_attention_buckets(
    sequences: Sequence[tuple[int, int]],
    lengths: list[int],
    is_slice: list[bool],
    is_padded: list[bool],
) -> None:
    buckets = attention_buckets(sequences, CPU)
    assert [bucket.length for bucket in buckets] == lengths
    assert [isinstance(bucket.rows, slice) for bucket in buckets] == is_slice
    assert [bucket.places is not None for bucket in buckets] == is_padded
    for bucket in buckets:
        members = [one for one in sequences if padded_length(one[1]) == bucket.length]
        wanted = [list(range(first, first + length)) for first, length in members]
        assert bucket.num_sequences == len(members)
        rows = bucket.rows
        packed = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        assert list(packed) == [row for one in wanted for row in one]
        if bucket.source is not None:
            # Padding repeats the last row of the sequence itself, never another's.
            filled = [one + [one[-1]] * (bucket.length - len(one)) for one in wanted]
            assert bucket.source.view(len(members), -1).tolist() == filled
        if bucket.places is not None and bucket.source is not None:
            assert bucket.source[bucket.places].tolist() == list(packed)
