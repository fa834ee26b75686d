"""Attention to long sequences: close to torch's, and of the same bits at any length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects

from tinsmith_engine.model.attention import PackedAttention
from tinsmith_engine.packing.packing import PackedRows, pack
from tinsmith_engine.products.split_products import KSplit

SPLIT = KSplit(512, 16)
NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 4, 2, 16


def rows_of(length: int) -> PackedRows:
    tokens = np.zeros(length, dtype=np.int64)
    return pack([[tokens]], quantum=16, device=torch.device("cpu"))


def numbers(length: int, num_heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, num_heads, HEAD_DIM, generator=generator)


@pytest.mark.parametrize("length", [192, 320, 704])
def test_output_and_gradient_are_torchs(length: int) -> None:
    q, k, v = (
        numbers(length, heads, seed)
        for seed, heads in enumerate((NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS))
    )
    dout = numbers(length, NUM_HEADS, 3)
    attention = PackedAttention(rows_of(length), SPLIT, keeps_graph=True)
    out = attention.forward(0, q, k, v)
    found = attention.backward(0, dout)
    inputs = [one.double().requires_grad_() for one in (q, k, v)]
    q_64, k_64, v_64 = (one.transpose(0, 1)[None] for one in inputs)
    wanted = F.scaled_dot_product_attention(q_64, k_64, v_64, is_causal=True, enable_gqa=True)
    wanted = wanted[0].transpose(0, 1)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(wanted, inputs, dout.double())
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=1e-4)


def test_a_query_has_the_same_bits_in_sequences_of_all_lengths() -> None:
    length = 900
    q, k, v = (
        numbers(length, heads, seed)
        for seed, heads in enumerate((NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS))
    )

    def attended(count: int) -> torch.Tensor:
        rows = rows_of(count)
        filled = [F.pad(one[:count], (0, 0, 0, 0, 0, len(rows) - count)) for one in (q, k, v)]
        attention = PackedAttention(rows, SPLIT, keeps_graph=False)
        return attention.forward(0, filled[0], filled[1], filled[2])[:count]

    whole = attended(length)
    for count in (16, 33, 100, 129, 200, 385, 513, 700):
        assert torch.equal(attended(count), whole[:count])
