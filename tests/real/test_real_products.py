"""Products at real widths, fuzzed over rows 1 to 4,096 and threads 1 to 4: no bit differs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tinsmith_engine.products.split_products import (
    ROW_TILE,
    KSplit,
    candidates,
    check_split,
    with_small_products,
)
from tinsmith_local.random_shapes import SHAPES

MOST_ROWS = 4096
NUM_TRIES = 24


def widths(shape: str) -> list[tuple[int, int]]:
    """Return inputs and outputs of the linear layers of a shape."""
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    queries = head_dim * config["num_attention_heads"]
    keys = head_dim * config["num_key_value_heads"]
    return [(hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden)]


def split_for(dtype: torch.dtype, weight: torch.Tensor) -> KSplit:
    factors = [(weight.t(), None), (weight, None)]
    split = next(one for one in candidates(dtype, torch.device("cpu")) if check_split(one, factors))
    return with_small_products(split, factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "qwen3-8b"])
def test_no_bit_depends_on_rows_places_or_threads(shape: str, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    random = np.random.default_rng(len(shape))
    generator = torch.Generator().manual_seed(0)
    try:
        for num_in, num_out in widths(shape):
            weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
            split = split_for(dtype, weight)
            for is_forward in (True, False):
                right = weight.t() if is_forward else weight
                x = torch.randn(MOST_ROWS, right.shape[0], generator=generator).to(dtype)
                torch.set_num_threads(2)
                wanted = split.product(x, right)
                for _ in range(NUM_TRIES):
                    torch.set_num_threads(int(random.integers(1, 5)))
                    count = int(2 ** random.uniform(0, np.log2(MOST_ROWS)))
                    rows = split.rows_for(count) if is_forward else -(-count // ROW_TILE) * ROW_TILE
                    start = int(random.integers(0, MOST_ROWS - rows + 1))
                    found = split.product(x[start : start + rows], right)
                    assert torch.equal(found, wanted[start : start + rows]), (
                        num_in,
                        num_out,
                        is_forward,
                        rows,
                        start,
                        torch.get_num_threads(),
                    )
    finally:
        torch.set_num_threads(before)
