"""The kernel for few rows: the library's bits for any number of rows and threads, or not used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tinsmith_engine.products import small_products
from tinsmith_engine.products.small_products import MAX_ROWS, SmallProducts
from tinsmith_engine.products.split_products import (
    KSplit,
    candidates,
    k_blocks,
    with_small_products,
)

LIBRARY = candidates(torch.float32, torch.device("cpu"))[0]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_out", "num_in"), [(320, 576), (896, 4864), (1152, 896), (64, 16)])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_few_rows_have_the_bits_that_they_have_among_many(
    num_out: int, num_in: int, has_bias: bool
) -> None:
    weight, bias = random(num_out, num_in), random(num_out, seed=1) if has_bias else None
    split = with_small_products(LIBRARY, [(weight.t(), bias)])
    assert split.small is not None
    x = random(MAX_ROWS, num_in, seed=2)
    wanted = LIBRARY.product(x, weight.t(), bias)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for count in (1, 2, 3, 5, 8, 15, 17, 31, MAX_ROWS):
            found = split.product(x[:count], weight.t(), bias)
            assert torch.equal(found, wanted[:count]), (num_threads, count)


def test_rows_and_results_may_be_parts_of_others() -> None:
    weight, whole = random(48, 64), random(6, 100)
    small = SmallProducts(512)
    x, out = whole[1:4, 20:84], torch.zeros(3, 96)
    found = small.product(x, weight.t(), None, k_blocks(64, 512), out[:, 24:72])
    torch.testing.assert_close(found, x @ weight.t())
    assert torch.equal(out[:, 24:72], found)
    assert not out[:, :24].any()
    assert not out[:, 72:].any()


def test_a_nan_spoils_no_row_but_its_own() -> None:
    weight, x = random(32, 64), random(5, 64)
    wanted = SmallProducts(512).product(x, weight.t(), None, k_blocks(64, 512))
    x[2] = float("nan")
    found = SmallProducts(512).product(x, weight.t(), None, k_blocks(64, 512))
    assert found[2].isnan().all()
    kept = [0, 1, 3, 4]
    assert torch.equal(found[kept], wanted[kept])


@pytest.mark.parametrize(
    ("x", "weight", "takes"),
    [
        pytest.param(random(1, 64), random(32, 64).t(), True, id="one-row"),
        pytest.param(random(MAX_ROWS, 64), random(32, 64).t(), True, id="the-most-rows"),
        pytest.param(random(MAX_ROWS + 1, 64), random(32, 64).t(), False, id="too-many-rows"),
        pytest.param(random(1, 64), random(64, 32), False, id="the-other-layout"),
        pytest.param(random(1, 60), random(32, 60).t(), False, id="a-step-left-over"),
        pytest.param(random(1, 64), random(40, 64).t(), False, id="a-tile-left-over"),
        pytest.param(random(1, 64).bfloat16(), random(32, 64).bfloat16().t(), False, id="bfloat16"),
    ],
)
def test_what_the_kernel_takes(x: torch.Tensor, weight: torch.Tensor, takes: bool) -> None:
    assert SmallProducts.takes(x, weight) is takes


@pytest.mark.parametrize(
    ("stops", "library_block", "ends"),
    [
        pytest.param((192,), 192, [192], id="one-sweep"),
        pytest.param((320,), 192, [160, 320], id="halves"),
        pytest.param((448, 896), 192, [192, 384, 448, 640, 832, 896], id="whole-blocks"),
        pytest.param((512, 576), 512, [512, 576], id="ours-alone"),
    ],
)
def test_where_chains_of_sums_end(
    stops: tuple[int, ...], library_block: int, ends: list[int]
) -> None:
    assert list(small_products._ends(stops, library_block)) == ends


def test_a_kernel_that_never_agrees_is_not_used() -> None:
    assert SmallProducts.fitting(lambda small: False) is None
    # Nor one that would have to take turns with the library: the rows of the two differ.
    odd = with_small_products(LIBRARY, [(random(40, 64).t(), None)])
    assert odd.small is None
    assert (odd.rows_for(3), KSplit(512, 16, SmallProducts(192)).rows_for(3)) == (16, 3)
