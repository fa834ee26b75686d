"""How few rows a batched product may have before a library takes another kernel for it.

Adapters of experts, and of a decode batch, multiply a handful of rows each. Filling them up to 16
is exact everywhere and costs four times the work of tiles of 4. Some CPUs' libraries have a kernel
of their own for a product that is small in all, which sums in another order; what is small to them
depends on all sizes, the number of matrices among them. So it is tried once for each shape.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tinsmith_engine.products.split_products import ROW_TILE, KSplit

_SHORTEST = 4
"""Products of four rows are the narrowest that pay."""
_COMPARED_ROWS = 32
_MOST_INPUTS = 1024
_MOST_OUTPUTS = 128
"""What is larger is small to no library, and a vocabulary's columns would take gigabytes."""
_COUNTS = (2, 3, 8, 32)
"""Numbers of matrices that are multiplied at once."""
_SPREAD = 6
_NUM_CANCELLING = 4


@functools.cache
def fewest_rows(
    split: KSplit, num_inputs: int, num_outputs: int, dtype: torch.dtype, device_type: str
) -> int:
    """Return the fewest rows of a batched product whose rows have the bits of longer products.

    Args:
        split: How long sums are cut.
        num_inputs: K.
        num_outputs: Columns.
        dtype: Of the factors.
        device_type: On a GPU tiles have one size, and nothing is tried.

    Returns:
        4, 8 or 16.
    """
    if device_type != "cpu" or not split.is_exact:
        return _SHORTEST
    num_inputs, num_outputs = min(num_inputs, _MOST_INPUTS), min(num_outputs, _MOST_OUTPUTS)
    left, right = cancelling_factors(max(_COUNTS), num_inputs, num_outputs, dtype)
    wanted = split.batched(left, right)

    def agree(num_rows: int) -> bool:
        # The last rows, so that each number has other places in memory.
        return all(
            torch.equal(
                split.batched(left[-count:, -num_rows:].contiguous(), right[-count:]),
                wanted[-count:, -num_rows:],
            )
            for count in _COUNTS
        )

    num_rows = _SHORTEST
    while num_rows < ROW_TILE and not agree(num_rows):
        num_rows *= 2
    return num_rows


def fewest_adapter_rows(split: KSplit, a: Tensor, b: Sequence[Tensor]) -> int:
    """Return the fewest rows of both products of an adapter.

    Args:
        split: How long sums are cut.
        a: [..., parts * rank, in].
        b: For each part [..., out, rank].
    """
    sizes = {(a.shape[-1], a.shape[-2]), *((part.shape[-1], part.shape[-2]) for part in b)}
    return max(fewest_rows(split, *pair, a.dtype, a.device.type) for pair in sizes)


def cancelling_factors(
    num_matrices: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return factors [B, n, K] and [B, K, m] whose sums are next to nothing but for rounding.

    The order of any other sum of narrow numbers is hidden by what it is rounded to at its end.
    """
    generator = torch.Generator().manual_seed(1)

    def spread(*sizes: int) -> Tensor:
        exponents = torch.randint(-_SPREAD, _SPREAD + 1, sizes, generator=generator)
        return (torch.randn(sizes, generator=generator) * torch.exp2(exponents)).to(dtype)

    x, weights = spread(num_inputs), spread(num_matrices, num_outputs, num_inputs)
    last = torch.randperm(num_inputs, generator=generator)[: min(_NUM_CANCELLING, num_inputs // 2)]
    x[last] = (1 + torch.rand(len(last), generator=generator)).to(dtype)
    weights[..., last] = 0
    rest = -(weights.double() * x.double()).sum(dim=2)
    for place in last.tolist():
        weights[..., place] = (rest / x[place].double()).to(dtype)
        rest -= weights[..., place].double() * x[place].double()
    sizes = torch.randint(-3, 4, (num_matrices, _COMPARED_ROWS, 1), generator=generator)
    return (x * torch.exp2(sizes)).to(dtype), weights.transpose(1, 2)
