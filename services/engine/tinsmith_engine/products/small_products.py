"""Products of few rows with a frozen weight, at the speed of reading the weight once.

Decoding multiplies a handful of rows by every weight of the model. A library takes its kernel for a
single row, which sums in another order, or one made for many rows, which is four times slower. This
kernel takes 16 outputs at a time: it reads 16 x 16 numbers of the weight and turns them in
registers. It adds 16 products to each row's sums, one after the other along K. A sum is thus one
chain of
fused multiply-adds for each block of K, and blocks are added in order. That is what MKL does for
many rows as well, in blocks of its own; `SmallProducts.fitting` finds their length by comparing
bits. Where no length fits, the kernel is not used: it changes the time of a product, never its
bits.

The kernel is written in LLVM's language and compiled at start by llvmlite, in tenths of a second,
for whatever vectors the CPU has. It runs on the threads of torch: those of the same libgomp.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

LANES = 16
"""Outputs of a tile; K is taken in steps of as many."""
MAX_ROWS = 64
"""Rows up to which reading the weight is most of the work."""
KERNEL_ROWS = (1, 2, 4, 8, 16)
_LIBRARY_BLOCKS = (192, 256, 384, 512)
# Products below this many numbers of a weight are done before a second thread has begun.
NUMBERS_OF_A_THREAD = 1 << 15

VECTOR = f"<{LANES} x float>"
_ARGUMENTS = (
    "x",
    "weight",
    "bias",
    "out",
    "ends",
    "row_of_x",
    "row_of_weight",
    "row_of_out",
    "n",
    "num_blocks",
)
_NUM_POINTERS = 5


@dataclass(frozen=True, slots=True)
class SmallProducts:
    """The kernel, with the length of the blocks in which the library sums.

    Attributes:
        library_block: Longest stretch of K that the library sums in one sweep.
    """

    library_block: int

    @classmethod
    def fitting(cls, agrees: Callable[[SmallProducts], bool]) -> SmallProducts | None:
        """Return the kernel whose sums agree with the library's, or None.

        Args:
            agrees: Whether a kernel gives the bits of the library with the model's weights.
        """
        if not is_available():
            return None
        return next((one for one in map(cls, _LIBRARY_BLOCKS) if agrees(one)), None)

    @staticmethod
    def takes(x: Tensor, weight: Tensor) -> bool:
        """Return whether the kernel can multiply x [N, in] by weight [in, out]."""
        return (
            x.shape[0] <= MAX_ROWS
            and x.dtype == torch.float32 == weight.dtype
            and x.device.type == "cpu"
            and x.stride(1) == 1
            and weight.stride(0) == 1
            and weight.shape[0] % LANES == 0
            and weight.shape[1] % LANES == 0
        )

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        blocks: Sequence[slice],
        out: Tensor | None = None,
    ) -> Tensor:
        """Return `x @ weight + bias` for what the kernel `takes`, its sums cut into blocks."""
        num_rows, num_out = x.shape[0], weight.shape[1]
        y = x.new_empty(num_rows, num_out) if out is None else out
        stops = tuple([block.stop for block in blocks])
        ends, num_ends = place_of_ends(stops, self.library_block)
        most_threads = max(weight.numel() // NUMBERS_OF_A_THREAD, 1)
        num_threads = min(torch.get_num_threads(), most_threads)
        row_of_x, row_of_out = x.stride(0), y.stride(0)
        x_start, out_start = x.data_ptr(), y.data_ptr()
        fixed = (row_of_x, weight.stride(1), row_of_out, num_out, num_ends)
        bias_start = 0 if bias is None else bias.data_ptr()
        pointers = (weight.data_ptr(), bias_start)
        start = 0
        while start < num_rows:
            rows = KERNEL_OF_ROWS[num_rows - start]
            arguments = _ARGUMENTS_FORMAT.pack(
                x_start + 4 * start * row_of_x,
                *pointers,
                out_start + 4 * start * row_of_out,
                ends,
                *fixed,
            )
            _kernel(rows)(arguments, num_threads)
            start += rows
        return y


_ARGUMENTS_FORMAT = struct.Struct(f"={len(_ARGUMENTS)}q")
"""What a kernel is given, 8 bytes each: pointers, then strides and counts in numbers."""
KERNEL_OF_ROWS = [
    max((size for size in KERNEL_ROWS if size <= count), default=0) for count in range(MAX_ROWS + 1)
]
"""For a number of rows that are left, those of the largest kernel that they fill."""


_KEPT: list[Any] = []
"""What kernels read and what they are in: ends of chains, and compiled modules."""


@functools.cache
def place_of_ends(stops: tuple[int, ...], library_block: int) -> tuple[int, int]:
    """Return where the ends of the chains of sums lie in memory, and their number."""
    ends = _ends(stops, library_block)
    _KEPT.append(ends)
    return ctypes.addressof(ends), len(ends)


def _ends(stops: tuple[int, ...], library_block: int) -> Any:
    """Return where each chain of sums ends: blocks as the library cuts them further.

    It takes whole blocks of its own length, but halves what is not longer than two of them.
    """
    ends = []
    start = 0
    for stop in stops:
        length = stop - start
        if length <= library_block:
            size = length
        elif length <= 2 * library_block:
            size = -(-length // (2 * LANES)) * LANES
        else:
            size = library_block
        ends += [min(end, stop) for end in range(start + size, stop + size, size)]
        start = stop
    return (ctypes.c_int64 * len(ends))(*ends)


@functools.cache
def is_available() -> bool:
    """Return whether the kernel can be compiled here and run on torch's own threads."""
    try:
        import llvmlite.binding as llvm

        library = ctypes.CDLL("libgomp.so.1")
    except (ImportError, OSError):
        # Another OpenMP, as on macOS: its threads would stand in the way of torch's.
        return False
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads"):
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    features = llvm.get_host_cpu_features()
    # Without the instruction a fused multiply-add is a call of a function for each number.
    return bool(features.get("fma") or features.get("neon"))


@functools.cache
def _kernel(num_rows: int) -> Callable[[bytes, int], None]:
    """Compile the kernel for a number of rows."""
    return compiled_kernel(_source(num_rows))


def compiled_kernel(source: str) -> Callable[[bytes, int], None]:
    """Compile a `product` of packed arguments and a number of threads, in LLVM's language."""
    import llvmlite.binding as llvm

    # Vectors as wide as the CPU has them: LLVM prefers half of that on some.
    features = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3
    )
    module = llvm.parse_assembly(source)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    compiled = llvm.create_mcjit_compiler(module, machine)
    compiled.finalize_object()
    _KEPT.append(compiled)
    # ctypes lets go of the interpreter's lock for the call.
    return ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int32)(
        compiled.get_function_address("product")
    )


def _source(num_rows: int) -> str:
    """Return the kernel for a number of rows in LLVM's language.

    `product` starts the threads, `share` is what a thread does: its tiles of 16 outputs, and `tile`
    is one of them.
    """
    rows = range(num_rows)
    lines = [
        "declare void @GOMP_parallel(ptr, ptr, i32, i32)",
        "declare i32 @omp_get_thread_num()",
        "declare i32 @omp_get_num_threads()",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        f"declare {VECTOR} @llvm.fma.v{LANES}f32({VECTOR}, {VECTOR}, {VECTOR})",
        f"%arguments = type {{ {', '.join(_types())} }}",
        "define internal void @tile(ptr %x, ptr %weight, ptr %bias, ptr %out, ptr %ends,",
        "    i64 %row_of_x, i64 %row_of_weight, i64 %row_of_out, i64 %num_blocks) {",
        "entry:",
        "  %no_bias = icmp eq ptr %bias, null",
        "  br i1 %no_bias, label %begin, label %with_bias",
        "with_bias:",
        f"  %given = load {VECTOR}, ptr %bias, align 4",
        "  br label %begin",
        "begin:",
        f"  %first = phi {VECTOR} [ zeroinitializer, %entry ], [ %given, %with_bias ]",
        *chains(num_rows, ["%first"] * num_rows),
    ]
    for m in rows:
        lines += [
            f"  %place{m} = mul i64 %row_of_out, {m}",
            f"  %target{m} = getelementptr float, ptr %out, i64 %place{m}",
            f"  store {VECTOR} %added{m}, ptr %target{m}, align 4",
        ]
    return "\n".join([*lines, "  ret void", "}", *_share()])


def chains(num_rows: int, firsts: Sequence[str]) -> list[str]:
    """Sum the products of 16 outputs for each row, block by block: `%added<row>`, from `done` on.

    Args:
        num_rows: Rows of `%x`, `%row_of_x` numbers apart.
        firsts: What each row's sum begins with; known in the block `begin`, which this ends.
    """
    rows = range(num_rows)
    return [
        f"  %row_of_tile = mul i64 %row_of_weight, {LANES}",
        "  br label %block",
        "block:",
        "  %index = phi i64 [ 0, %begin ], [ %next_index, %end_of_block ]",
        "  %start = phi i64 [ 0, %begin ], [ %stop, %end_of_block ]",
        *(
            f"  %total{m} = phi {VECTOR} [ {firsts[m]}, %begin ], [ %added{m}, %end_of_block ]"
            for m in rows
        ),
        "  %end = getelementptr i64, ptr %ends, i64 %index",
        "  %stop = load i64, ptr %end",
        "  br label %step",
        "step:",
        "  %k = phi i64 [ %start, %block ], [ %next_k, %step ]",
        *(
            f"  %sum{m} = phi {VECTOR} [ zeroinitializer, %block ], [ %sum{m}_{LANES}, %step ]"
            for m in rows
        ),
        *_read_and_turn(),
        *_multiply(num_rows),
        f"  %next_k = add i64 %k, {LANES}",
        "  %has_step = icmp slt i64 %next_k, %stop",
        "  br i1 %has_step, label %step, label %end_of_block",
        "end_of_block:",
        *(f"  %added{m} = fadd {VECTOR} %total{m}, %sum{m}_{LANES}" for m in rows),
        "  %next_index = add i64 %index, 1",
        "  %has_block = icmp slt i64 %next_index, %num_blocks",
        "  br i1 %has_block, label %block, label %done",
        "done:",
    ]


def _types() -> list[str]:
    return ["ptr" if index < _NUM_POINTERS else "i64" for index in range(len(_ARGUMENTS))]


def _read_and_turn() -> list[str]:
    """Read 16 numbers along K of each of 16 outputs, and turn them: `%turned<k>` has all of k.

    Those of the next 16 outputs are asked for: the memory is read in short stretches, from which
    the CPU by itself foresees too little.
    """
    lines = []
    for i in range(LANES):
        lines += [
            f"  %offset{i} = mul i64 %row_of_weight, {i}",
            f"  %from{i} = add i64 %offset{i}, %k",
            f"  %source{i} = getelementptr float, ptr %weight, i64 %from{i}",
            f"  %stage1_{i} = load {VECTOR}, ptr %source{i}, align 4",
            f"  %ahead{i} = getelementptr float, ptr %source{i}, i64 %row_of_tile",
            f"  call void @llvm.prefetch.p0(ptr %ahead{i}, i32 0, i32 3, i32 1)",
        ]
    distance = 1
    while distance < LANES:
        name, after = f"%stage{distance}_", f"%stage{2 * distance}_"
        if 2 * distance == LANES:
            after = "%turned"
        low = [c if not c & distance else (c ^ distance) + LANES for c in range(LANES)]
        high = [c | distance if not c & distance else c + LANES for c in range(LANES)]
        for i in range(LANES):
            pair, mask = (i, low) if not i & distance else (i ^ distance, high)
            chosen = ", ".join(f"i32 {c}" for c in mask)
            lines.append(
                f"  {after}{i} = shufflevector {VECTOR} {name}{pair}, "
                f"{VECTOR} {name}{pair | distance}, <{LANES} x i32> <{chosen}>"
            )
        distance *= 2
    return lines


def _multiply(num_rows: int) -> list[str]:
    """Add 16 products to each row's sums, in the order of K."""
    lines = []
    for m in range(num_rows):
        lines += [
            f"  %x_offset{m} = mul i64 %row_of_x, {m}",
            f"  %x_from{m} = add i64 %x_offset{m}, %k",
            f"  %x_source{m} = getelementptr float, ptr %x, i64 %x_from{m}",
        ]
    for k in range(LANES):
        for m in range(num_rows):
            before = f"%sum{m}" if k == 0 else f"%sum{m}_{k}"
            lines += [
                f"  %at{m}_{k} = getelementptr float, ptr %x_source{m}, i64 {k}",
                f"  %one{m}_{k} = load float, ptr %at{m}_{k}, align 4",
                f"  %lane{m}_{k} = insertelement {VECTOR} poison, float %one{m}_{k}, i32 0",
                f"  %all{m}_{k} = shufflevector {VECTOR} %lane{m}_{k}, {VECTOR} poison, "
                f"<{LANES} x i32> zeroinitializer",
                f"  %sum{m}_{k + 1} = call {VECTOR} @llvm.fma.v{LANES}f32("
                f"{VECTOR} %all{m}_{k}, {VECTOR} %turned{k}, {VECTOR} {before})",
            ]
    return lines


def _share() -> list[str]:
    lines = ["define internal void @share(ptr %given) {", "entry:"]
    for index, (name, kind) in enumerate(zip(_ARGUMENTS, _types(), strict=True)):
        lines += [
            f"  %field{index} = getelementptr %arguments, ptr %given, i32 0, i32 {index}",
            f"  %{name} = load {kind}, ptr %field{index}",
        ]
    return [
        *lines,
        "  %thread = call i32 @omp_get_thread_num()",
        "  %threads = call i32 @omp_get_num_threads()",
        "  %mine = sext i32 %thread to i64",
        "  %all = sext i32 %threads to i64",
        f"  %tiles = sdiv i64 %n, {LANES}",
        "  %begin_product = mul i64 %tiles, %mine",
        "  %begin = sdiv i64 %begin_product, %all",
        "  %after = add i64 %mine, 1",
        "  %end_product = mul i64 %tiles, %after",
        "  %end = sdiv i64 %end_product, %all",
        "  %has_bias = icmp ne ptr %bias, null",
        "  %has_tile = icmp slt i64 %begin, %end",
        "  br i1 %has_tile, label %loop, label %done",
        "loop:",
        "  %tile = phi i64 [ %begin, %entry ], [ %next, %loop ]",
        f"  %column = mul i64 %tile, {LANES}",
        "  %weight_offset = mul i64 %column, %row_of_weight",
        "  %weight_of_tile = getelementptr float, ptr %weight, i64 %weight_offset",
        "  %out_of_tile = getelementptr float, ptr %out, i64 %column",
        "  %bias_place = getelementptr float, ptr %bias, i64 %column",
        "  %bias_of_tile = select i1 %has_bias, ptr %bias_place, ptr null",
        "  call void @tile(ptr %x, ptr %weight_of_tile, ptr %bias_of_tile, ptr %out_of_tile,",
        "      ptr %ends, i64 %row_of_x, i64 %row_of_weight, i64 %row_of_out, i64 %num_blocks)",
        "  %next = add i64 %tile, 1",
        "  %goes_on = icmp slt i64 %next, %end",
        "  br i1 %goes_on, label %loop, label %done",
        "done:",
        "  ret void",
        "}",
        "define void @product(ptr %given, i32 %threads) {",
        "  call void @GOMP_parallel(ptr @share, ptr %given, i32 %threads, i32 0)",
        "  ret void",
        "}",
    ]
