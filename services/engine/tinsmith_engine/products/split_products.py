"""Matrix products whose rows keep their bits whatever the rows beside them and the threads.

A library splits the sum over K by the number of rows and of threads, and the order of a float sum
changes its bits. Then what a tenant learns would depend on the other runs of the pass, and a
replay on
another machine would diverge. So K is cut here, from K alone: each block is short enough for the
library to sum it in one sweep, and the blocks' sums are added in order, in float32. Tiles, threads
and the number of rows are left to the library: they no longer touch the order of a sum.

In bfloat16 some CPUs' kernels sum all of K in one sweep, and torch cannot return their float32
sums. There the whole product is tried first. A CPU that has no kernels for it multiplies in float32
and rounds once. `check_split` looks at what holds on this
machine with the model's own weights; it takes a second and searches nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_engine.products import tile_products
from tinsmith_engine.products.small_products import MAX_ROWS, SmallProducts
from tinsmith_engine.products.tile_products import TileProducts

_BLOCK = 512
"""Longest stretch of K in one product with a frozen weight."""
_BATCHED_BLOCK = 256
"""Longest stretch of K in one batched product: adapters, their gradients, attention."""
_BLOCK_STEP = 64
_SHARED_STEP = 16
ROW_TILE = 16
"""Exact products take a multiple of this many rows: below it kernels of another kind take over."""
_CHECKED_ROWS = {"cpu": (64,), "cuda": (64, 256, 1024, 8192)}
"""Rows of the products that are compared; a GPU's library has another kernel for each."""
_COMPARED_OUTPUTS = 512
_MOST_CHECKED_NUMBERS = 2**28
"""Of a product that is compared; a vocabulary's with thousands of rows takes gigabytes."""
WIDENED_AT_ONCE = 1 << 25
"""Numbers of a narrow weight that are made float32 at once: 128 MiB."""

_NARROW_LEAST = 16**3
"""Products of narrow numbers of so many steps and fewer have another kernel in torch on a CPU."""

Factor = tuple[Tensor, Tensor | None]
"""Weight [in, out] and bias of a product."""


@functools.lru_cache(maxsize=1024)
def k_blocks(length: int, longest: int) -> tuple[slice, ...]:
    """Cut a sum of this length into blocks of nearly one size: a function of the length alone."""
    num_blocks = max(-(-length // longest), 1)
    size = max(-(-length // (num_blocks * _BLOCK_STEP)), 1) * _BLOCK_STEP
    return tuple(
        slice(start, min(start + size, length)) for start in range(0, max(length, 1), size)
    )


@dataclass(frozen=True, slots=True)
class KSplit:
    """How the sums of a model's products are cut.

    Attributes:
        block: Longest stretch of K in one product; None leaves the order to the library.
        row_tile: Products take a multiple of this many rows.
        small: Computes products of few rows, of any number, with the same bits; None if nothing
            does on this machine.
        tiles: Computes all products, on a GPU; None leaves them to the library.
    """

    block: int | None
    row_tile: int
    small: SmallProducts | None = None
    tiles: TileProducts | None = None

    def __str__(self) -> str:
        if self.tiles is not None:
            return "tiles"
        return "whole" if self.block is None else str(self.block)

    @property
    def is_exact(self) -> bool:
        """Whether rows are meant to keep their bits."""
        return self.row_tile > 1

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return `x @ weight + bias` for x [N, in] and weight [in, out], in `out` if given."""
        if self.tiles is not None:
            return self.tiles.product(x, weight, bias, out)
        blocks = self._blocks(weight.shape[0], self.block)
        if self.small is not None and self.small.takes(x, weight):
            return self.small.product(x, weight, bias, blocks, out)
        if x.dtype != torch.float32 and (
            len(blocks) > 1 or not has_kernels(x.dtype, x.device.type)
        ):
            return _rounded_once(x, weight, bias, blocks, out)
        first = blocks[0]
        if bias is None:
            y = torch.mm(x[:, first], weight[first], out=out)
        else:
            y = torch.addmm(bias, x[:, first], weight[first], out=out)
        for block in blocks[1:]:
            y.addmm_(x[:, block], weight[block])
        return y

    def rows_for(self, num_rows: int) -> int:
        """Return the rows of a product with weights [out, in] that holds this many."""
        if self.small is not None and num_rows <= MAX_ROWS:
            return num_rows
        return padded_rows(num_rows, self.row_tile)

    def batched_stops(self, length: int) -> list[int]:
        """Return where the blocks end that a batched product sums this length in."""
        return [block.stop for block in self._blocks(length, _BATCHED_BLOCK)]

    def batched(self, left: Tensor, right: Tensor) -> Tensor:
        """Return `left @ right` for left [B, n, K] and right [B, K, m]."""
        if self.tiles is not None:
            return self.tiles.batched(left, right)
        blocks = self._blocks(left.shape[2], _BATCHED_BLOCK)
        if left.dtype != torch.float32 and len(blocks) > 1 and self.block is not None:
            return self.batched(left.float(), right.float()).to(left.dtype)
        return self._summed(left, right, blocks)

    def narrow(self, left: Tensor, right: Tensor) -> Tensor:
        """Return `left @ right` for left [B, n, K] and right [B, K, m], K too short to be cut."""
        if self.tiles is not None:
            return self.tiles.batched(left, right)
        return self._summed(left, right, self._blocks(left.shape[2], None))

    def add_batched_(self, out: Tensor, left: Tensor, right: Tensor, *, adds: bool = True) -> None:
        """Add `left @ right` to out [B, n, m], all of one dtype, or put it there."""
        if self.tiles is not None:
            self.tiles.add_batched_(out, left, right, adds=adds)
        else:
            blocks = self._blocks(left.shape[2], _BATCHED_BLOCK)
            self._add_summed_(out, left, right, blocks, adds=adds)

    def add_narrow_(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """Add to out [B, n, m], of the factors' dtype, what `narrow` returns."""
        if self.tiles is not None:
            self.tiles.add_batched_(out, left, right)
        else:
            self._add_summed_(out, left, right, self._blocks(left.shape[2], None), adds=True)

    def _summed(self, left: Tensor, right: Tensor, blocks: Sequence[slice]) -> Tensor:
        if self._is_outer(left):
            return left * right
        if (times := self._times(left, right)) > 1:
            num_matrices = len(left)
            left, right = _repeated(left, times), _repeated(right, times)
            return _sum_blocks(left, right, blocks)[:num_matrices]
        return _sum_blocks(left, right, blocks)

    def _add_summed_(
        self, out: Tensor, left: Tensor, right: Tensor, blocks: Sequence[slice], *, adds: bool
    ) -> None:
        if self._is_outer(left):
            _add_outer_(out, left, right, adds=adds)
        elif (times := self._times(left, right)) > 1:
            more = out.repeat(times, 1, 1)
            left, right = _repeated(left, times), _repeated(right, times)
            _add_blocks_(more, left, right, blocks, adds=adds)
            out.copy_(more[: len(out)])
        else:
            _add_blocks_(out, left, right, blocks, adds=adds)

    def _times(self, left: Tensor, right: Tensor) -> int:
        """Return how often a batch is computed beside itself, to be summed as larger ones are.

        The threads may share out a lone product: a thread that is left with few rows or columns
        sums in another order. In a batch each product is one thread's, so a lone one is computed
        twice. A batch of narrow numbers that is small in all has a kernel of its own.
        """
        if not self.is_exact or left.device.type != "cpu":
            return 1
        if left.dtype != torch.float32:
            return _NARROW_LEAST // max(left.numel() * right.shape[2], 1) + 1
        is_shared = left.shape[1] % _SHARED_STEP != 0 or right.shape[2] % _SHARED_STEP != 0
        return 2 if len(left) == 1 and is_shared else 1

    def _is_outer(self, left: Tensor) -> bool:
        """Whether a product sums nothing, and its bits have to be those of any other like it.

        Some libraries round such a product before it is added and others do not, by the number of
        matrices and where they lie. So it is rounded here, whatever lies beside it.
        """
        return left.shape[2] == 1 and self.is_exact

    def add_product_(self, out: Tensor, left: Tensor, right: Tensor) -> None:
        """Add `left @ right` to float32 out [n, m], whatever the dtype of the factors."""
        if self.tiles is not None:
            self.tiles.add_batched_(out[None], left[None], right[None])
            return
        if left.dtype != out.dtype:
            out.add_(self.product(left, right))
            return
        for block in self._blocks(left.shape[1], self.block):
            out.addmm_(left[:, block], right[block])

    def _blocks(self, length: int, longest: int | None) -> tuple[slice, ...]:
        if self.block is None or longest is None:
            return (slice(0, length),)
        return k_blocks(length, longest)


WHOLE = KSplit(None, 1)
"""Any number of rows, in the library's own order: the fastest mode, which promises no bits."""


def candidates(dtype: torch.dtype, device: torch.device) -> tuple[KSplit, ...]:
    """Return the splits that may keep the bits of rows, the one to prefer first."""
    if dtype == torch.float32 and device.type == "cpu":
        return (KSplit(_BLOCK, ROW_TILE),)
    if device.type == "cuda" and tile_products.is_available(device):
        return (KSplit(None, ROW_TILE, tiles=TileProducts()),)
    return KSplit(None, ROW_TILE), KSplit(_BLOCK, ROW_TILE)


def check_split(split: KSplit, factors: Sequence[Factor]) -> bool:
    """Return whether a split keeps the bits of rows on this machine.

    Rows are computed by themselves and in the middle of others that hold NaN, by the threads of
    now and by another number: a kernel may read beyond the end of a row and multiply what it
    finds there by zero. It has the right bits until the next row holds a NaN.

    Args:
        split: The split.
        factors: One product of each shape, forward and backward, with the model's weights.
    """
    return all(_keeps_rows(split, weight, bias) for weight, bias in _distinct(factors))


def with_small_products(split: KSplit, factors: Sequence[Factor]) -> KSplit:
    """Return the split with the kernel for few rows, where that gives the same bits."""
    forward = [
        (weight, bias)
        for weight, bias in _distinct(factors)
        if weight.stride(0) == 1 and min(weight.shape) > 1
    ]
    if split.block is None or any(
        not SmallProducts.takes(weight[:, :1].t(), weight) for weight, _ in forward
    ):
        return split

    def agrees(small: SmallProducts) -> bool:
        return all(_has_same_bits(split, small, weight, bias) for weight, bias in forward)

    return dataclasses.replace(split, small=SmallProducts.fitting(agrees))


def _has_same_bits(
    split: KSplit, small: SmallProducts, weight: Tensor, bias: Tensor | None
) -> bool:
    # A part of a large weight: what is compared is the order along K.
    num_out = min(weight.shape[1], _COMPARED_OUTPUTS)
    weight, bias = weight[:, :num_out], None if bias is None else bias[:num_out]
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROW_TILE, weight.shape[0], generator=generator)
    wanted = split.product(rows, weight, bias)
    with_small = dataclasses.replace(split, small=small)
    return all(
        torch.equal(with_small.product(rows[:count], weight, bias), wanted[:count])
        for count in (1, 2, ROW_TILE - 1, ROW_TILE)
    )


def _keeps_rows(split: KSplit, weight: Tensor, bias: Tensor | None) -> bool:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROW_TILE, weight.shape[0], generator=generator).to(weight)
    place = slice(ROW_TILE, 2 * ROW_TILE)
    wanted = split.product(rows, weight, bias)
    num_threads = torch.get_num_threads()
    try:
        for count in (num_threads, 2 if num_threads == 1 else 1):
            torch.set_num_threads(count)
            for num_rows in _CHECKED_ROWS[weight.device.type]:
                if num_rows * max(weight.shape) > _MOST_CHECKED_NUMBERS:
                    continue
                among = weight.new_full((num_rows, weight.shape[0]), float("nan"))
                among[place] = rows
                if not torch.equal(split.product(among, weight, bias)[place], wanted):
                    return False
    finally:
        torch.set_num_threads(num_threads)
    return True


def _distinct(factors: Sequence[Factor]) -> Iterator[Factor]:
    """Yield one factor of each shape and layout."""
    seen = set()
    for weight, bias in factors:
        key = (weight.shape, weight.stride(), bias is None)
        if key not in seen:
            seen.add(key)
            yield weight, bias


def _repeated(matrices: Tensor, times: int) -> Tensor:
    """Return a batch as often as given, one after the other; of a lone matrix only the view."""
    return matrices.expand(times, -1, -1) if len(matrices) == 1 else matrices.repeat(times, 1, 1)


def _sum_blocks(left: Tensor, right: Tensor, blocks: Sequence[slice]) -> Tensor:
    y = torch.bmm(left[:, :, blocks[0]], right[:, blocks[0]])
    if len(blocks) > 1:
        _add_blocks_(y, left, right, blocks[1:], adds=True)
    return y


def _add_blocks_(
    out: Tensor, left: Tensor, right: Tensor, blocks: Sequence[slice], *, adds: bool
) -> None:
    # beta 0 does not read what is there, so it may be anything, NaN included.
    beta = 1 if adds else 0
    for block in blocks:
        out.baddbmm_(left[:, :, block], right[:, block], beta=beta)
        beta = 1


def _add_outer_(out: Tensor, left: Tensor, right: Tensor, *, adds: bool = True) -> None:
    """Add `left @ right` with a K of 1 to out, or put it there; a narrow sum is rounded once."""
    product = left.float() * right.float()
    out.copy_(out.float().add_(product) if adds else product)


def _rounded_once(
    x: Tensor, weight: Tensor, bias: Tensor | None, blocks: Sequence[slice], out: Tensor | None
) -> Tensor:
    """Return a product of narrow numbers whose sum is kept in float32 until its end."""
    total = None if bias is None else bias.float()
    for block in blocks:
        part = _wide_product(x[:, block], weight[block])
        total = part if total is None else part.add_(total)
    if total is None:
        raise AssertionError("a sum has at least one block")
    return total.to(x.dtype) if out is None else out.copy_(total)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight` of narrow numbers in float32."""
    if x.device.type == "cuda":
        return torch.mm(x, weight, out_dtype=torch.float32)
    wide = x.float()
    num_in, num_out = weight.shape
    most = max(WIDENED_AT_ONCE // num_in, 1)
    if num_out <= most:
        return torch.mm(wide, weight.float())
    # A vocabulary's rows would take gigabytes all at once.
    y = torch.empty(x.shape[0], num_out)
    for start in range(0, num_out, most):
        columns = slice(start, min(start + most, num_out))
        torch.mm(wide, weight[:, columns].float(), out=y[:, columns])
    return y


@functools.cache
def has_kernels(dtype: torch.dtype, device_type: str) -> bool:
    """Whether a device multiplies narrow numbers itself.

    A CPU without such instructions falls back to a loop that is 90 times as slow as products in
    float32 (AVX2, rows of 896, measured).
    """
    if device_type != "cpu":
        return True
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype not in supported or bool(supported[dtype]())


def padded_rows(num_rows: int, tile: int) -> int:
    """Return the smallest multiple of the tile that holds the rows."""
    return -(-num_rows // tile) * tile
