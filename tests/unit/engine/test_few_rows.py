"""Batched products of few rows have the bits of longer ones, whatever is multiplied beside them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tinsmith_engine.products.few_rows import cancelling_factors, fewest_rows
from tinsmith_engine.products.split_products import ROW_TILE, WHOLE, KSplit, candidates

CPU = torch.device("cpu")
SMALLEST = 400
"""Steps of a matrix below which torch has a loop of its own; a width of 25 is above it."""
DTYPES = (torch.float32, torch.bfloat16)
MANY = 48
WIDTHS = (1, 2, 8, 12, 16, 32, 64)


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many threads as a process may have."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def split_of(dtype: torch.dtype) -> KSplit:
    return candidates(dtype, CPU)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_inputs", [1, 2, 8, 12, 32, 64, 96, 128, 192, 256, 640])
def test_a_row_has_the_same_bits_in_any_batch(
    num_threads: int, dtype: torch.dtype, num_inputs: int
) -> None:
    split = split_of(dtype)
    for num_outputs in WIDTHS:
        if num_inputs > 1 and ROW_TILE * num_inputs * num_outputs < SMALLEST:
            continue
        left, right = cancelling_factors(MANY, num_inputs, num_outputs, dtype)
        wanted = split.batched(left, right)
        begun = torch.ones_like(wanted)
        wanted_sum = begun.clone()
        split.add_narrow_(wanted_sum, left, right)
        shortest = fewest_rows(split, num_inputs, num_outputs, dtype, "cpu")
        for num_rows in {shortest, ROW_TILE, 2 * ROW_TILE}:
            for count in (1, 2, 5, MANY):
                if count == 1 and num_rows % ROW_TILE:
                    continue
                part, factor = left[:count, :num_rows].contiguous(), right[:count]
                place = (num_threads, num_outputs, num_rows, count)
                found = split.batched(part, factor)
                assert torch.equal(found, wanted[:count, :num_rows]), place
                total = begun[:count, :num_rows].clone()
                split.add_narrow_(total, part, factor)
                assert torch.equal(total, wanted_sum[:count, :num_rows]), place


def test_where_nothing_is_promised_tiles_are_the_narrowest_that_pay() -> None:
    assert fewest_rows(WHOLE, 256, 8, torch.float32, "cpu") == 4
    assert fewest_rows(split_of(torch.float32), 256, 8, torch.float32, "cuda") == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_that_cancel_show_their_order(dtype: torch.dtype) -> None:
    left, right = cancelling_factors(4, 192, 16, dtype)
    wanted = left.double() @ right.double()
    turned = left.flip(2).float() @ right.flip(1).float()
    assert not torch.equal((left.float() @ right.float()).to(dtype), turned.to(dtype))
    terms = (left.double().abs() @ right.double().abs()).mean()
    assert wanted.abs().mean() < 1e-4 * terms
