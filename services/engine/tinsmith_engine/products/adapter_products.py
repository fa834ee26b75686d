"""Products of few rows with the adapters of many runs, read where they lie.

A decode batch holds a row or some of each of many adapters. As batches of one shape each row would
be filled up to a tile, and every adapter copied into a stack. This kernel goes through stretches of
neighbouring rows with one adapter, in two rounds of all threads: `p = scale x A^T`, then
`y += p B^T`. Its sums are those of `small_products.py`: chains of fused multiply-adds, cut as the
library cuts them. What uses it compares its bits with the library's first. It changes the time of a
product, never its bits.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_engine.products.small_products import (
    KERNEL_ROWS,
    LANES,
    NUMBERS_OF_A_THREAD,
    VECTOR,
    chains,
    compiled_kernel,
    place_of_ends,
)

_POINTERS = ("x", "y", "p", "segments", "adapters", "a_parts", "b_parts", "a_ends", "b_ends")
_COUNTS = (
    "row_of_x",
    "row_of_y",
    "row_of_p",
    "num_segments",
    "num_parts",
    "row_of_a",
    "row_of_b",
    "num_a_ends",
    "num_b_ends",
    "a_units",
    "b_units",
)
_FORMAT = struct.Struct(f"={len(_POINTERS) + len(_COUNTS)}q")


@dataclass(frozen=True, slots=True)
class AdapterSegments:
    """Which neighbouring rows of a batch use which adapter."""

    words: NDArray[np.int64]
    """First row, number of rows, adapter and the bits of its scale, [segments, 4]."""

    @classmethod
    def of(cls, adapter_of_row: Sequence[int | None], scales: Sequence[float]) -> AdapterSegments:
        """Return the segments of a batch, at least one.

        Args:
            adapter_of_row: For each row, an index into `scales`; None for a row without one.
            scales: Of each adapter.
        """
        bits = np.asarray(scales, dtype=np.float32).view(np.int32)
        found: list[tuple[int, int, int, int]] = []
        for adapter, group in groupby(
            range(len(adapter_of_row)), key=lambda row: adapter_of_row[row]
        ):
            rows = list(group)
            if adapter is None:
                continue
            start, left = rows[0], len(rows)
            while left:
                size = max(one for one in KERNEL_ROWS if one <= left)
                found.append((start, size, adapter, int(bits[adapter])))
                start, left = start + size, left - size
        return cls(np.asarray(found, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """The sizes of a linear target's adapters."""

    num_inputs: int
    num_outputs: tuple[int, ...]
    """Of each part."""
    rank: int
    """A multiple of the kernel's tile."""
    rank_filling: int = 0
    """How many of it hold zeros."""

    @property
    def is_taken(self) -> bool:
        """Whether the kernel can multiply by such adapters."""
        return all(size % LANES == 0 for size in (self.num_inputs, self.rank, *self.num_outputs))


class AdapterProducts:
    """The adapters of one linear target and the rows that use them.

    Args:
        shape: What all adapters have in common; taken by the kernel.
        factors: For each adapter A [parts * rank, in], and B [out, rank] of each part; float32
            with whole rows. They are kept.
        segments: Which rows use them.
        a_stops: Where the blocks end in which the sums of `x A^T` are cut.
        library_block: Longest stretch of a sum that the library sums in one sweep.
    """

    def __init__(
        self,
        shape: AdapterShape,
        factors: Sequence[tuple[Tensor, Sequence[Tensor]]],
        segments: AdapterSegments,
        a_stops: Sequence[int],
        library_block: int,
    ) -> None:
        self._factors = factors
        self._pointers = np.asarray(
            [[a.data_ptr(), *(b.data_ptr() for b in parts)] for a, parts in factors],
            dtype=np.int64,
        )
        self._segments = segments
        self._a_parts, self._b_parts = _parts(shape)
        num_parts = len(shape.num_outputs)
        self._p_width = num_parts * shape.rank
        a_ends, num_a_ends = place_of_ends(tuple(a_stops), library_block)
        b_ends, num_b_ends = place_of_ends((shape.rank,), library_block)
        num_segments = len(segments.words)
        num_outputs = sum(shape.num_outputs)
        self._places = (
            segments.words.ctypes.data,
            self._pointers.ctypes.data,
            self._a_parts.ctypes.data,
            self._b_parts.ctypes.data,
            a_ends,
            b_ends,
        )
        self._counts = (
            self._p_width,
            num_segments,
            num_parts,
            shape.num_inputs,
            shape.rank,
            num_a_ends,
            num_b_ends,
            num_segments * self._p_width // LANES,
            num_segments * num_outputs // LANES,
        )
        numbers = num_segments * (self._p_width * shape.num_inputs + num_outputs * shape.rank)
        self.most_threads = max(numbers // NUMBERS_OF_A_THREAD, 1)
        """Threads that are worth their beginning."""

    def add_(self, y: Tensor, x: Tensor) -> None:
        """Add each row's own adapter to y [N, out] for x [N, in]; rows without one stay."""
        p = x.new_empty(len(x), self._p_width)
        arguments = _FORMAT.pack(
            x.data_ptr(),
            y.data_ptr(),
            p.data_ptr(),
            *self._places,
            x.stride(0),
            y.stride(0),
            *self._counts,
        )
        _kernel()(arguments, min(torch.get_num_threads(), self.most_threads))


@functools.cache
def _parts(shape: AdapterShape) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each part of a round, its tiles, its first input and its first output."""
    num_parts = len(shape.num_outputs)
    stops = np.cumsum(shape.num_outputs)
    of_b = [
        (width // LANES, part * shape.rank, int(stops[part]) - width)
        for part, width in enumerate(shape.num_outputs)
    ]
    of_a = [(num_parts * shape.rank // LANES, 0, 0)]
    return np.asarray(of_a, dtype=np.int64), np.asarray(of_b, dtype=np.int64)


@functools.cache
def _kernel() -> Callable[[bytes, int], None]:
    return compiled_kernel(_source())


def _source() -> str:
    """Return the kernel in LLVM's language.

    `share` is what a thread does: its tiles of 16 outputs of both rounds, with all of the first
    done before the second. `round` walks the segments, and `tile<rows>` is a tile of one.
    """
    fields = [*("ptr" for _ in _POINTERS), *("i64" for _ in _COUNTS)]
    lines = [
        "declare void @GOMP_parallel(ptr, ptr, i32, i32)",
        "declare void @GOMP_barrier()",
        "declare i32 @omp_get_thread_num()",
        "declare i32 @omp_get_num_threads()",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        f"declare {VECTOR} @llvm.fma.v{LANES}f32({VECTOR}, {VECTOR}, {VECTOR})",
        f"%arguments = type {{ {', '.join(fields)} }}",
    ]
    for num_rows in KERNEL_ROWS:
        lines += _tile(num_rows)
    return "\n".join([*lines, *_round(), *_share(fields)])


_TILE_ARGUMENTS = (
    "ptr %x, ptr %weight, ptr %out, ptr %ends, i64 %row_of_x, i64 %row_of_weight, "
    "i64 %row_of_out, i64 %num_blocks, i1 %adds, float %scale"
)


def _tile(num_rows: int) -> list[str]:
    rows = range(num_rows)
    lines = [f"define internal void @tile{num_rows}({_TILE_ARGUMENTS}) {{", "entry:"]
    for m in rows:
        lines += [
            f"  %place{m} = mul i64 %row_of_out, {m}",
            f"  %target{m} = getelementptr float, ptr %out, i64 %place{m}",
        ]
    lines += [
        f"  %one_scale = insertelement {VECTOR} poison, float %scale, i32 0",
        f"  %scales = shufflevector {VECTOR} %one_scale, {VECTOR} poison, "
        f"<{LANES} x i32> zeroinitializer",
        "  br i1 %adds, label %with_sums, label %begin",
        "with_sums:",
        *(f"  %given{m} = load {VECTOR}, ptr %target{m}, align 4" for m in rows),
        "  br label %begin",
        "begin:",
        *(
            f"  %first{m} = phi {VECTOR} [ zeroinitializer, %entry ], [ %given{m}, %with_sums ]"
            for m in rows
        ),
        *chains(num_rows, [f"%first{m}" for m in rows]),
    ]
    for m in rows:
        lines += [
            f"  %scaled{m} = fmul {VECTOR} %added{m}, %scales",
            f"  store {VECTOR} %scaled{m}, ptr %target{m}, align 4",
        ]
    return [*lines, "  ret void", "}"]


_ROUND = """
define internal void @round(ptr %x, ptr %out, ptr %segments, ptr %adapters, ptr %parts, ptr %ends,
    i64 %row_of_x, i64 %row_of_out, i64 %row_of_weight, i64 %num_segments, i64 %num_parts,
    i64 %pointers, i64 %first_pointer, i64 %num_ends, i64 %begin, i64 %end, i1 %adds) {
entry:
  br label %segment
segment:
  %s = phi i64 [ 0, %entry ], [ %next_s, %end_of_segment ]
  %base = phi i64 [ 0, %entry ], [ %next_base, %end_of_segment ]
  %word = mul i64 %s, 4
  %row_place = getelementptr i64, ptr %segments, i64 %word
  %row = load i64, ptr %row_place
  %rows_place = getelementptr i64, ptr %row_place, i64 1
  %rows = load i64, ptr %rows_place
  %adapter_place = getelementptr i64, ptr %row_place, i64 2
  %adapter = load i64, ptr %adapter_place
  %scale_place = getelementptr i64, ptr %row_place, i64 3
  %given_scale = load float, ptr %scale_place
  %scale = select i1 %adds, float 1.0, float %given_scale
  %x_offset = mul i64 %row, %row_of_x
  %x_of_segment = getelementptr float, ptr %x, i64 %x_offset
  %out_offset = mul i64 %row, %row_of_out
  %out_of_segment = getelementptr float, ptr %out, i64 %out_offset
  %adapter_offset = mul i64 %adapter, %pointers
  %pointer_offset = add i64 %adapter_offset, %first_pointer
  %weights = getelementptr ptr, ptr %adapters, i64 %pointer_offset
  br label %part
part:
  %i = phi i64 [ 0, %segment ], [ %next_i, %end_of_part ]
  %base_of_part = phi i64 [ %base, %segment ], [ %next_base, %end_of_part ]
  %part_word = mul i64 %i, 3
  %tiles_place = getelementptr i64, ptr %parts, i64 %part_word
  %tiles = load i64, ptr %tiles_place
  %x_start_place = getelementptr i64, ptr %tiles_place, i64 1
  %x_start = load i64, ptr %x_start_place
  %out_start_place = getelementptr i64, ptr %tiles_place, i64 2
  %out_start = load i64, ptr %out_start_place
  %next_base = add i64 %base_of_part, %tiles
  %from_begin = sub i64 %begin, %base_of_part
  %is_behind = icmp sgt i64 %from_begin, 0
  %low = select i1 %is_behind, i64 %from_begin, i64 0
  %to_end = sub i64 %end, %base_of_part
  %is_short = icmp slt i64 %to_end, %tiles
  %high = select i1 %is_short, i64 %to_end, i64 %tiles
  %weight_place = getelementptr ptr, ptr %weights, i64 %i
  %weight = load ptr, ptr %weight_place
  %x_of_part = getelementptr float, ptr %x_of_segment, i64 %x_start
  %out_of_part = getelementptr float, ptr %out_of_segment, i64 %out_start
  %has_tile = icmp slt i64 %low, %high
  br i1 %has_tile, label %tile, label %end_of_part
tile:
  %t = phi i64 [ %low, %part ], [ %next_t, %end_of_tile ]
  %column = mul i64 %t, LANES
  %weight_offset = mul i64 %column, %row_of_weight
  %weight_of_tile = getelementptr float, ptr %weight, i64 %weight_offset
  %out_of_tile = getelementptr float, ptr %out_of_part, i64 %column
  switch i64 %rows, label %end_of_tile [ CASES ]
CALLS
end_of_tile:
  %next_t = add i64 %t, 1
  %has_next = icmp slt i64 %next_t, %high
  br i1 %has_next, label %tile, label %end_of_part
end_of_part:
  %next_i = add i64 %i, 1
  %has_part = icmp slt i64 %next_i, %num_parts
  br i1 %has_part, label %part, label %end_of_segment
end_of_segment:
  %next_s = add i64 %s, 1
  %has_segment = icmp slt i64 %next_s, %num_segments
  br i1 %has_segment, label %segment, label %done
done:
  ret void
}
"""


def _round() -> list[str]:
    calls = [
        f"rows{count}:\n  call void @tile{count}(ptr %x_of_part, ptr %weight_of_tile, "
        "ptr %out_of_tile, ptr %ends, i64 %row_of_x, i64 %row_of_weight, i64 %row_of_out, "
        "i64 %num_ends, i1 %adds, float %scale)\n  br label %end_of_tile"
        for count in KERNEL_ROWS
    ]
    cases = " ".join(f"i64 {count}, label %rows{count}" for count in KERNEL_ROWS)
    source = _ROUND.replace("LANES", str(LANES)).replace("CASES", cases)
    return [source.replace("CALLS", "\n".join(calls))]


def _share(fields: Sequence[str]) -> list[str]:
    lines = ["define internal void @share(ptr %given) {", "entry:"]
    for index, (name, kind) in enumerate(zip((*_POINTERS, *_COUNTS), fields, strict=True)):
        lines += [
            f"  %field{index} = getelementptr %arguments, ptr %given, i32 0, i32 {index}",
            f"  %{name} = load {kind}, ptr %field{index}",
        ]
    lines += [
        "  %thread = call i32 @omp_get_thread_num()",
        "  %threads = call i32 @omp_get_num_threads()",
        "  %mine = sext i32 %thread to i64",
        "  %all = sext i32 %threads to i64",
        "  %after = add i64 %mine, 1",
        "  %pointers = add i64 %num_parts, 1",
    ]
    for name in ("a", "b"):
        lines += [
            f"  %{name}_begin_product = mul i64 %{name}_units, %mine",
            f"  %{name}_begin = sdiv i64 %{name}_begin_product, %all",
            f"  %{name}_end_product = mul i64 %{name}_units, %after",
            f"  %{name}_end = sdiv i64 %{name}_end_product, %all",
        ]
    return [
        *lines,
        "  call void @round(ptr %x, ptr %p, ptr %segments, ptr %adapters, ptr %a_parts,",
        "      ptr %a_ends, i64 %row_of_x, i64 %row_of_p, i64 %row_of_a, i64 %num_segments, i64 1,",
        "      i64 %pointers, i64 0, i64 %num_a_ends, i64 %a_begin, i64 %a_end, i1 0)",
        "  call void @GOMP_barrier()",
        "  call void @round(ptr %p, ptr %y, ptr %segments, ptr %adapters, ptr %b_parts,",
        "      ptr %b_ends, i64 %row_of_p, i64 %row_of_y, i64 %row_of_b, i64 %num_segments,",
        "      i64 %num_parts, i64 %pointers, i64 1, i64 %num_b_ends, i64 %b_begin, i64 %b_end,",
        "      i1 1)",
        "  ret void",
        "}",
        "define void @product(ptr %given, i32 %threads) {",
        "  call void @GOMP_parallel(ptr @share, ptr %given, i32 %threads, i32 0)",
        "  ret void",
        "}",
    ]
