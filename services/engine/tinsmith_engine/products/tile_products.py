"""Matrix products on a GPU whose every sum has one order: a Triton kernel with tiles of one size.

A GPU's library chooses a kernel by the number of rows, and some of its kernels share out a long sum
among blocks: on an H200, rows of a product over 3,072 numbers in bfloat16 had other bits from 256
rows on. Here a tile's program adds along K from its beginning to its end, in float32, and tiles
have the same size whatever the product. So the bits of a row depend on that row and the weight.

Triton comes with torch's builds for CUDA. Its name is not known to builds for a CPU.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_PRODUCTS_OF_A_LAUNCH = 65_535
"""Products that a launch takes: the grid's second axis."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """How a tile is cut and computed: constants of the compiled kernel."""

    rows: int
    columns: int
    step: int
    """Numbers of K that are read at a time."""
    num_warps: int
    num_stages: int


# Measured on an H200 with rows of 1,024 to 12,288: 0.72 of cuBLAS in bfloat16, and in float32
# 0.4 where K is contiguous in the weight and 0.85 where it is not.
_SHAPES = {
    torch.bfloat16: TileShape(128, 128, 64, 8, 3),
    torch.float16: TileShape(128, 128, 64, 8, 3),
    torch.float32: TileShape(128, 128, 16, 8, 3),
}


@dataclass(frozen=True, slots=True)
class TileProducts:
    """Products by the kernel; all methods sum in float32 and round once."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        """Return `x @ weight + bias` for x [N, in] and weight [in, out], in `out` if given."""
        y = x.new_empty(x.shape[0], weight.shape[1]) if out is None else out
        _launch(y[None], x[None], weight[None], bias=bias)
        return y

    def batched(self, left: Tensor, right: Tensor) -> Tensor:
        """Return `left @ right` for left [B, n, K] and right [B, K, m], in their dtype."""
        y = left.new_empty((left.shape[0], left.shape[1], right.shape[2]))
        _launch(y, left, right)
        return y

    def add_batched_(self, out: Tensor, left: Tensor, right: Tensor, *, adds: bool = True) -> None:
        """Add `left @ right` to out [B, n, m] of any dtype, or put it there."""
        _launch(out, left, right, adds=adds)


def _launch(
    out: Tensor, left: Tensor, right: Tensor, *, bias: Tensor | None = None, adds: bool = False
) -> None:
    """Compute out [B, n, m] of left [B, n, K] and right [B, K, m], whatever their strides."""
    num_products, num_rows, length = left.shape
    num_columns = right.shape[2]
    if not out.numel():
        return
    shape = _SHAPES[left.dtype]
    num_tiles = -(-num_rows // shape.rows) * -(-num_columns // shape.columns)
    kernel = _kernel()
    # Unlike torch, Triton launches on the device that the thread has chosen.
    with torch.cuda.device(out.device):
        for start in range(0, num_products, _PRODUCTS_OF_A_LAUNCH):
            part = slice(start, start + _PRODUCTS_OF_A_LAUNCH)
            outs, lefts, rights = out[part], left[part], right[part]
            kernel[(num_tiles, len(outs))](
                outs,
                lefts,
                rights,
                outs if bias is None else bias,
                num_rows,
                num_columns,
                length,
                *outs.stride(),
                *lefts.stride(),
                *rights.stride(),
                HAS_BIAS=bias is not None,
                ADDS=adds,
                IS_WHOLE=length % shape.step == 0,
                ROWS=shape.rows,
                COLUMNS=shape.columns,
                STEP=shape.step,
                num_warps=shape.num_warps,
                num_stages=shape.num_stages,
            )


@functools.cache
def is_available(device: torch.device) -> bool:
    """Return whether the kernel runs on a GPU: Triton is there, and what it compiles with."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    ones = torch.ones(1, 16, 16, device=device)
    try:
        TileProducts().batched(ones, ones)
    except Exception as error:
        # Whatever the compiler raises, the library's products are left.
        logger.warning("products in tiles cannot be compiled (%s): %s", type(error).__name__, error)
        return False
    return True


@functools.cache
def _kernel() -> Any:
    """Return the kernel; it is compiled for each dtype and layout when it is first launched."""
    from tinsmith_engine.products import tile_kernel

    kernel: Callable[..., Any] = tile_kernel.product_kernel
    return kernel
