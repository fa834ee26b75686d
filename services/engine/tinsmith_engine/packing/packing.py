"""How the sequences of many runs become the rows of one pass.

A *segment* is what one run has in a pass: whole sequences, one after the other, without padding
between them. A segment begins at a multiple of 16 rows, because kernels treat the rows that are
left over at the end of a block differently. Only attention is padded, each sequence to a length
that depends on itself alone.

Split, rows and padding of an operation depend on the operation alone, never on load or on other
runs. They change the order of float additions: the same operation then gives the same bits
whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.base.types import IntArray
from tinsmith_engine.products.split_products import padded_rows

SEGMENT_ROWS = 16
"""A segment takes a multiple of this many rows."""
# Attention pads a sequence to a multiple of this: finer costs kernel launches, coarser arithmetic.
_SHORT_STEP, _LONG_STEP, _SHORT_TOKENS = 16, 64, 128
PADDING_RULE = f"{_SHORT_STEP}<={_SHORT_TOKENS}<{_LONG_STEP}"
"""The rule, for the fingerprint."""


def padded_length(num_tokens: int) -> int:
    """Return the length that attention pads a sequence to: a function of the sequence alone."""
    step = _SHORT_STEP if num_tokens <= _SHORT_TOKENS else _LONG_STEP
    return -(-num_tokens // step) * step


def split_batch(lengths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Return the indices of the sequences of each microbatch, sorted by length.

    A sequence longer than the budget gets a microbatch of its own: sequences are never cut.
    """
    parts: list[list[int]] = []
    num_tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if not parts or num_tokens + lengths[index] > micro_batch_tokens:
            parts.append([])
            num_tokens = 0
        parts[-1].append(index)
        num_tokens += lengths[index]
    return parts


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of a pass that attention handles as one padded tensor [sequences, length]."""

    num_sequences: int
    length: int
    """Tokens of each padded sequence."""
    rows: slice | Tensor
    """The packed rows of the sequences' tokens; a slice where they are neighbours."""
    source: Tensor | None
    """For each place of the flattened padded tensor the packed row that fills it, int64; padding
    repeats the sequence's own last row. None if `rows` is a slice that fills it as it is."""
    places: Tensor | None
    """Where in the flattened padded tensor each of `rows` lies, int64; None if nothing is
    padded."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows of a pass: N tokens, padding included."""

    tokens_N: Tensor
    positions_N: Tensor
    """[N], or [3, N] if some sequence holds images."""
    token_rows: IntArray
    """Which rows are tokens and not padding, ascending."""
    segments: tuple[slice, ...]
    """Rows of each segment, padding to `SEGMENT_ROWS` included."""
    sequences: tuple[tuple[tuple[int, int], ...], ...]
    """For each segment the first row and the length of each of its sequences."""
    buckets: tuple[Bucket, ...]
    has_padding: bool
    """Whether there are rows that belong to no sequence."""

    def __len__(self) -> int:
        return len(self.tokens_N)


def segment_rows(lengths: Sequence[int]) -> int:
    """Return how many rows the segment of these sequences takes."""
    return padded_rows(sum(lengths), SEGMENT_ROWS)


def pack(
    segments: Sequence[Sequence[IntArray]],
    *,
    quantum: int,
    device: torch.device,
    positions: Sequence[Sequence[IntArray]] | None = None,
) -> PackedRows:
    """Lay out segments of whole sequences, in this order.

    Args:
        segments: For each segment the tokens of its sequences, int64 [T] each.
        quantum: The number of rows is padded to a multiple of this.
        device: Where the rows are wanted.
        positions: For each sequence its rotary positions, all [T] or all [3, T]; None if they count
            up from 0.
    """
    num_rows = padded_rows(
        sum(segment_rows([len(tokens) for tokens in one]) for one in segments), quantum
    )
    tokens_N = np.zeros(num_rows, dtype=np.int64)
    num_axes = 3 if positions is not None and positions[0][0].ndim > 1 else 1
    positions_AN = np.zeros((num_axes, num_rows), dtype=np.int64)
    slices, places = [], []
    begin = num_tokens = 0
    for segment, sequences in enumerate(segments):
        row = begin
        within = []
        for index, tokens in enumerate(sequences):
            within.append((row, len(tokens)))
            tokens_N[row : row + len(tokens)] = tokens
            positions_AN[:, row : row + len(tokens)] = (
                np.arange(len(tokens)) if positions is None else positions[segment][index]
            )
            row += len(tokens)
        num_tokens += row - begin
        end = begin + padded_rows(row - begin, SEGMENT_ROWS)
        slices.append(slice(begin, end))
        places.append(tuple(within))
        begin = end
    positions_N = positions_AN[0] if num_axes == 1 else positions_AN
    ranges = [np.arange(row, row + length) for within in places for row, length in within]
    return PackedRows(
        token_rows=np.concatenate(ranges),
        tokens_N=torch.from_numpy(tokens_N).to(device),
        positions_N=torch.from_numpy(positions_N).to(device),
        segments=tuple(slices),
        sequences=tuple(places),
        buckets=attention_buckets([place for within in places for place in within], device),
        has_padding=num_tokens < num_rows,
    )


def attention_buckets(
    sequences: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Bucket, ...]:
    """Group sequences, given as first row and length, by padded length."""
    by_length: dict[int, list[tuple[int, int]]] = {}
    for first, length in sequences:
        by_length.setdefault(padded_length(length), []).append((first, length))
    return tuple(_bucket(members, length, device) for length, members in by_length.items())


def _bucket(members: Sequence[tuple[int, int]], length: int, device: torch.device) -> Bucket:
    firsts = np.array([first for first, _ in members])
    lengths = np.array([count for _, count in members])
    is_full = bool((lengths == length).all())
    if is_full and bool((np.diff(firsts) == length).all()):
        rows = slice(int(firsts[0]), int(firsts[-1]) + length)
        return Bucket(len(members), length, rows, None, None)
    within = np.minimum(np.arange(length)[None], lengths[:, None] - 1)
    source = (firsts[:, None] + within).reshape(-1)
    on_device = torch.from_numpy(source).to(device)
    if is_full:
        return Bucket(len(members), length, on_device, on_device, None)
    is_real = (np.arange(length)[None] < lengths[:, None]).reshape(-1)
    return Bucket(
        len(members),
        length,
        torch.from_numpy(source[is_real]).to(device),
        on_device,
        torch.from_numpy(np.flatnonzero(is_real)).to(device),
    )
