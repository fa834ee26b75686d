"""Products, exponentials and sums give a row the same bits whatever the rows and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tinsmith_engine.arena.adam import grad_norm
from tinsmith_engine.products import split_products
from tinsmith_engine.products.ops import (
    exponentials_,
    row_blocks,
    row_sums,
    swiglu,
    swiglu_backward,
)
from tinsmith_engine.products.split_products import (
    ROW_TILE,
    WHOLE,
    KSplit,
    candidates,
    check_split,
    k_blocks,
    padded_rows,
)

CPU = torch.device("cpu")
FLOAT32 = candidates(torch.float32, CPU)[0]
THREADS = (1, 2, 3, 4)
# Hidden and MLP sizes of SmolLM2-135M, Qwen2.5-0.5B, Qwen3-0.6B, Llama-3.2-1B and Qwen2.5-1.5B.
WIDTHS = [(576, 1536), (896, 4864), (1024, 3072), (2048, 8192), (1536, 8960)]
ROWS = (16, 48, 112, 256, 1040)


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def for_threads(call: Callable[[], torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        yield num_threads, call()


@pytest.mark.parametrize(
    ("length", "longest", "sizes"),
    [
        pytest.param(0, 512, [0], id="nothing"),
        pytest.param(24, 512, [24], id="shorter-than-a-step"),
        pytest.param(512, 512, [512], id="one-block"),
        pytest.param(576, 512, [320, 256], id="nearly-one-size"),
        pytest.param(896, 512, [448, 448], id="halves"),
        pytest.param(4864, 512, [512] * 9 + [256], id="a-shorter-last-one"),
    ],
)
def test_sums_are_cut_by_their_length_alone(length: int, longest: int, sizes: list[int]) -> None:
    blocks = k_blocks(length, longest)
    assert [block.stop - block.start for block in blocks] == sizes
    assert [place for block in blocks for place in range(block.start, block.stop)] == list(
        range(length)
    )


@pytest.mark.parametrize("split", [WHOLE, KSplit(64, 16), KSplit(512, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_a_cut_product_is_the_product(split: KSplit, dtype: torch.dtype, has_bias: bool) -> None:
    # Small integers: sums are exact whatever their order, and what bfloat16 rounds is the end.
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randint(-3, 4, shape, generator=generator).to(dtype)
        for shape in ((32, 200), (200, 40), (40,))
    )
    given = bias if has_bias else None
    exact = x.double() @ weight.double() + (bias.double() if has_bias else 0.0)
    assert torch.equal(split.product(x, weight, given), exact.to(dtype))
    out = torch.full((32, 40), float("nan"), dtype=dtype)
    assert split.product(x, weight, given, out=out) is out
    assert torch.equal(out, exact.to(dtype))


def test_a_sum_of_narrow_numbers_is_rounded_once() -> None:
    # 1 + 64 blocks of 1/512 each: rounded to bfloat16 after each block, the sum would stay 1.
    x = torch.ones(16, 65 * 64, dtype=torch.bfloat16)
    weight = torch.zeros(65 * 64, 16, dtype=torch.bfloat16)
    weight[0] = 1.0
    weight[64::64] = 1 / 512
    found = KSplit(64, 16).product(x, weight)
    assert torch.equal(found, torch.full((16, 16), 1.125, dtype=torch.bfloat16))


@pytest.mark.parametrize("widths", WIDTHS, ids=lambda widths: f"{widths[0]}x{widths[1]}")
@pytest.mark.parametrize("is_transposed", [False, True], ids=["backward", "forward"])
def test_rows_keep_their_bits_at_real_widths(widths: tuple[int, int], is_transposed: bool) -> None:
    hidden, inner = widths
    for num_in, num_out in ((hidden, inner), (inner, hidden)):
        weight = random(num_in, num_out)
        if is_transposed:
            weight = weight.t().contiguous().t()
        x = random(max(ROWS), num_in, seed=1)
        wanted = FLOAT32.product(x, weight)
        for count in ROWS:
            for num_threads, found in for_threads(lambda: FLOAT32.product(x[:count], weight)):  # noqa: B023
                assert torch.equal(found, wanted[:count]), (num_in, count, num_threads)


@pytest.mark.parametrize("rank", [1, 4, 8, 16, 20, 32])
@pytest.mark.parametrize("num_rows", [16, 48, 272])
def test_products_of_adapters_do_not_depend_on_threads_or_on_the_stack(
    rank: int, num_rows: int
) -> None:
    num_runs, num_in, num_out, columns = 3, 896, 576, 3 * rank
    x, dy = random(num_runs, num_rows, num_in), random(num_runs, num_rows, num_out, seed=1)
    a, b = random(num_runs, columns, num_in, seed=2), random(num_runs, num_out, rank, seed=3)

    def products(runs: slice) -> list[torch.Tensor]:
        projected = FLOAT32.batched(x[runs], a[runs].transpose(1, 2))
        of_b, of_a = torch.zeros_like(b[runs]), torch.zeros_like(a[runs])
        FLOAT32.add_batched_(of_b, dy[runs].transpose(1, 2), projected[:, :, :rank])
        FLOAT32.add_batched_(of_a, projected.transpose(1, 2), x[runs], adds=False)
        return [projected, FLOAT32.batched(dy[runs], b[runs]), of_b, of_a]

    torch.set_num_threads(1)
    wanted = products(slice(0, num_runs))
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        for index in range(num_runs) if rank > 1 else ():
            alone = products(slice(index, index + 1))
            for found, stacked in zip(alone, wanted, strict=True):
                assert torch.equal(found[0], stacked[index]), (num_threads, index)
        for found, stacked in zip(products(slice(0, num_runs)), wanted, strict=True):
            assert torch.equal(found, stacked), num_threads


@pytest.mark.parametrize("width", [96, 576, 4864, 8960])
@pytest.mark.parametrize("num_rows", [16, 48, 528])
def test_activations_do_not_depend_on_threads(width: int, num_rows: int) -> None:
    gate_up, dy = random(num_rows, 2 * width), random(num_rows, width, seed=1)
    torch.set_num_threads(1)
    wanted, wanted_gradient = swiglu(gate_up), swiglu_backward(dy, gate_up)
    alone = swiglu(gate_up[:16].clone())
    assert torch.equal(alone, wanted[:16])
    for num_threads, found in for_threads(lambda: swiglu(gate_up)):
        assert torch.equal(found, wanted), num_threads
    for num_threads, found in for_threads(lambda: swiglu_backward(dy, gate_up)):
        assert torch.equal(found, wanted_gradient), num_threads


@pytest.mark.parametrize("vocab_size", [96, 1000, 50257, 151_936])
def test_sums_of_exponentials_do_not_depend_on_threads_or_rows(vocab_size: int) -> None:
    x = random(32, vocab_size)
    torch.set_num_threads(1)
    wanted = row_sums(exponentials_(x.clone()))
    for count in (1, 2, 5, 16, 32):

        def sums(count: int = count) -> torch.Tensor:
            return row_sums(exponentials_(x[:count].clone()))

        for num_threads, found in for_threads(sums):
            assert torch.equal(found, wanted[:count]), (count, num_threads)


@pytest.mark.parametrize("num_numbers", [64, 4096, 64 * 9973, 4096 * 300])
def test_the_norm_of_a_gradient_does_not_depend_on_threads(num_numbers: int) -> None:
    gradient = random(num_numbers)
    found = {grad_norm(gradient) for _ in for_threads(lambda: gradient)}
    assert len(found) == 1
    assert found.pop() == pytest.approx(float(gradient.double().norm()), rel=1e-5)
    gradient[-1] = float("nan")
    assert grad_norm(gradient) != grad_norm(gradient)


@pytest.mark.parametrize("num_threads", [1, 2, 4, 8])
def test_rows_are_one_block_where_threads_are_a_power_of_two(num_threads: int) -> None:
    assert row_blocks(512, 4864, num_threads) == (slice(0, 512),)


@pytest.mark.parametrize("num_threads", [3, 5, 6, 7, 12])
@pytest.mark.parametrize(("num_rows", "width"), [(512, 4864), (1040, 576), (16, 8960), (48, 96)])
def test_no_share_ends_within_a_vector(num_rows: int, width: int, num_threads: int) -> None:
    blocks = row_blocks(num_rows, width, num_threads)
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(
        range(num_rows)
    )
    for block in blocks:
        num_numbers = (block.stop - block.start) * width
        shares = max(min(num_threads, -(-num_numbers // 32768)), 1)
        share = -(-num_numbers // shares)
        assert shares == 1 or share % 64 == 0 or share % width == 0
    assert len(blocks) <= num_threads + 1


# The check at start.


def position_dependent_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a product round later rows of a call differently."""
    real = torch.mm

    def mm(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        found: torch.Tensor = real(x, weight, **options)
        found[len(x) // 2 :] *= 1 + 1e-5
        return found

    monkeypatch.setattr(torch, "mm", mm)


def thread_dependent_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a product depend on the number of threads."""
    real = torch.mm

    def mm(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        return real(x, weight, **options).mul_(1 + 1e-5 * torch.get_num_threads())

    monkeypatch.setattr(torch, "mm", mm)


def mm_that_reads_beyond_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a product multiply the next row by zero."""
    real = torch.mm

    def mm(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        found: torch.Tensor = real(x, weight, **options)
        found[:-1] += 0.0 * x[1:, :1]
        return found

    monkeypatch.setattr(torch, "mm", mm)


@pytest.mark.parametrize(
    "patch", [position_dependent_mm, thread_dependent_mm, mm_that_reads_beyond_rows]
)
def test_the_check_finds_kernels_that_do_not_keep_rows(
    monkeypatch: pytest.MonkeyPatch, patch: Callable[[pytest.MonkeyPatch], None]
) -> None:
    factors = [(random(64, 48), None), (random(200, 96), None)]
    assert check_split(FLOAT32, factors)
    patch(monkeypatch)
    assert not check_split(FLOAT32, factors)


def test_rows_are_filled_up_to_the_tile() -> None:
    assert [padded_rows(rows, ROW_TILE) for rows in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert [padded_rows(rows, WHOLE.row_tile) for rows in (0, 1, 17)] == [0, 1, 17]


@pytest.mark.parametrize("at_once", [split_products.WIDENED_AT_ONCE, 100 * 300])
def test_a_cpu_without_kernels_for_bfloat16_rounds_a_float32_product_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_products, "has_kernels", lambda dtype, device_type: False)
    monkeypatch.setattr(split_products, "WIDENED_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 300, generator=generator).bfloat16()
    weight = torch.randn(300, 250, generator=generator).bfloat16()
    bias = torch.randn(250, generator=generator).bfloat16()
    wanted = (x.double() @ weight.double() + bias.double()).bfloat16()
    for split in (WHOLE, KSplit(512, ROW_TILE)):
        found = split.product(x, weight, bias)
        # A sum in float32 lies on the other side of a rounding border now and then.
        assert (found != wanted).float().mean() < 0.01
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-3)
