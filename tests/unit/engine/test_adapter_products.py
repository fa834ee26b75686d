"""Adapters of a decode batch read in place: the trainer's bits, whichever rows use which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from tinsmith_engine.lora.lora import LoraTarget
from tinsmith_engine.products.adapter_products import (
    AdapterProducts,
    AdapterSegments,
    AdapterShape,
)
from tinsmith_engine.products.small_products import SmallProducts, is_available
from tinsmith_engine.products.split_products import (
    KSplit,
    candidates,
    k_blocks,
    with_small_products,
)

NUM_ADAPTERS = 5
ROWS: list[int | None] = [0] * 17 + [1] * 7 + [None] * 2 + [2] + [3] * 2 + [4] * 4 + [None, 0]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def split() -> KSplit:
    """Return the split of this machine, with the kernel for few rows."""
    plain = candidates(torch.float32, torch.device("cpu"))[0]
    found = with_small_products(plain, [(random(64, 768).t(), None), (random(64, 64).t(), None)])
    assert found.small is not None
    return found


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapter(num_inputs: int, num_outputs: Sequence[int], rank: int, seed: int) -> LoraTarget:
    return LoraTarget(
        a=random(1, len(num_outputs) * rank, num_inputs, seed=seed) * num_inputs**-0.5,
        b=tuple(random(1, width, rank, seed=10 * seed + 1) for width in num_outputs),
        a_grad=None,
        b_grad=(),
        scale=0.25 + seed,
    )


def products(adapters: Sequence[LoraTarget], small: SmallProducts) -> AdapterProducts:
    num_inputs = adapters[0].a.shape[-1]
    shape = AdapterShape(
        num_inputs, tuple(b.shape[1] for b in adapters[0].b), adapters[0].b[0].shape[2]
    )
    assert shape.is_taken
    return AdapterProducts(
        shape,
        [(one.a[0], [b[0] for b in one.b]) for one in adapters],
        AdapterSegments.of(ROWS, [one.scale for one in adapters]),
        [block.stop for block in k_blocks(num_inputs, 256)],
        small.library_block,
    )


@pytest.mark.parametrize("rank", [16, 32, 320])
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs"), [(256, (256, 128, 128)), (768, (256,)), (64, (192, 192))]
)
def test_rows_have_the_bits_of_the_trainers_product(
    num_inputs: int, num_outputs: tuple[int, ...], rank: int, split: KSplit
) -> None:
    adapters = [adapter(num_inputs, num_outputs, rank, seed) for seed in range(NUM_ADAPTERS)]
    x, y = random(len(ROWS), num_inputs, seed=1), random(len(ROWS), sum(num_outputs), seed=2)
    wanted = y.clone()
    for index, target in enumerate(adapters):
        rows = [row for row, used in enumerate(ROWS) if used == index]
        filled = (rows * 32)[:32]
        added = y[filled]
        target.add_forward_(added, x[filled], split)
        wanted[rows] = added[: len(rows)]
    assert split.small is not None
    made = products(adapters, split.small)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        found = y.clone()
        made.add_(found, x)
        assert torch.equal(found, wanted), num_threads


def test_many_adapters_are_worth_more_threads_than_a_few_small_ones() -> None:
    assert is_available()
    small, large = (
        products([adapter(width, (width,), 16, seed) for seed in range(5)], SmallProducts(512))
        for width in (64, 1024)
    )
    # Nine segments of 1024 x 16 numbers each way.
    assert (small.most_threads, large.most_threads) == (1, 9)


def test_a_nan_spoils_no_row_but_its_own() -> None:
    assert is_available()
    adapters = [adapter(64, (32, 16), 16, seed) for seed in range(NUM_ADAPTERS)]
    made = products(adapters, SmallProducts(512))
    x, y = random(len(ROWS), 64), random(len(ROWS), 48)
    wanted, found = y.clone(), y.clone()
    made.add_(wanted, x)
    x[3] = float("nan")
    made.add_(found, x)
    assert found[3].isnan().all()
    kept = [row for row in range(len(ROWS)) if row != 3]
    assert torch.equal(found[kept], wanted[kept])


def test_rows_without_an_adapter_stay_as_they_are() -> None:
    assert is_available()
    made = products([adapter(64, (32,), 16, seed) for seed in range(5)], SmallProducts(512))
    y = torch.full((len(ROWS), 32), 7.0)
    made.add_(y, random(len(ROWS), 64))
    changed = (y != 7.0).any(dim=1).tolist()
    assert changed == [used is not None for used in ROWS]


@pytest.mark.parametrize(
    ("shape", "is_taken"),
    [
        pytest.param(AdapterShape(64, (32, 16), 16), True, id="whole-tiles"),
        pytest.param(AdapterShape(60, (32,), 16), False, id="inputs-left-over"),
        pytest.param(AdapterShape(64, (40,), 16), False, id="outputs-left-over"),
        pytest.param(AdapterShape(64, (32,), 8), False, id="a-rank-that-is-not-filled-up"),
    ],
)
def test_what_the_kernel_takes(shape: AdapterShape, is_taken: bool) -> None:
    assert shape.is_taken is is_taken
