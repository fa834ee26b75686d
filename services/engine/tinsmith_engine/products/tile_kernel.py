"""The kernel of `tile_products.py`; a module of its own, since it needs Triton to be imported."""

# ruff: noqa: ANN001, ANN201 - Triton reads annotations, and knows its own alone.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    out,
    left,
    right,
    bias,
    num_rows,
    num_columns,
    length,
    out_batch,
    out_row,
    out_column,
    left_batch,
    left_row,
    left_k,
    right_batch,
    right_k,
    right_column,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute one tile of one product of a batch."""
    GROUP: tl.constexpr = 8
    program = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    tiles_down = tl.cdiv(num_rows, ROWS)
    tiles_across = tl.cdiv(num_columns, COLUMNS)
    # Tiles in groups of rows, so that the weights of a group are still in the cache.
    group = program // (GROUP * tiles_across)
    first = group * GROUP
    size = min(tiles_down - first, GROUP)
    within = program % (GROUP * tiles_across)
    rows = (first + within % size) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    columns = (within // size) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    k = tl.arange(0, STEP)
    is_row = rows < num_rows
    is_column = columns < num_columns
    left_at = left + batch * left_batch + rows[:, None] * left_row + k[None, :] * left_k
    right_at = right + batch * right_batch + k[:, None] * right_k + columns[None, :] * right_column
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, length, STEP):
        if IS_WHOLE:
            of_left = tl.load(left_at, mask=is_row[:, None], other=0.0)
            of_right = tl.load(right_at, mask=is_column[None, :], other=0.0)
        else:
            is_inside = k < length - start
            of_left = tl.load(left_at, mask=is_row[:, None] & is_inside[None, :], other=0.0)
            of_right = tl.load(right_at, mask=is_inside[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(of_left, of_right, total, input_precision="ieee")
        left_at += STEP * left_k
        right_at += STEP * right_k
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out + batch * out_batch + rows[:, None] * out_row + columns[None, :] * out_column
    is_inside_out = is_row[:, None] & is_column[None, :]
    if ADDS:
        total += tl.load(out_at, mask=is_inside_out, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=is_inside_out)
