"""Attention backends: the one part of the decoder that knows where keys and values live.

The decoder hands a backend the rotated q, k and v of its packed rows and gets the attended values
back. Training attends within the sequences of a pass; prefill and decoding attend to a cache
(`kv_cache.py`).

Training attention is padded, in buckets of each sequence's own length, and needs no mask for the
padding: it is on the right, so causality keeps it from every real row, and its own rows are never
read back. Padding repeats the sequence's own last row, not zeros or another row. What is finite
stays finite, and another tenant's NaN stays with the other tenant.

On a CPU, scores, their softmax and the weighted sum of values are plain products. A query's sums
are cut at fixed places along its keys, and keys that it does not see add zeros. So its bits depend
on the keys before it alone: not on the length of the sequence, nor on the queries beside it.
Decoding attends by the same operations, with the same bits.

The backward of short sequences is written out. Long ones go through their queries in chunks, which
needs no [T, T] matrix, and leave their backward to torch's fused kernel; on a GPU it has both.
Which one a sequence gets depends on its padded length alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tinsmith_engine.packing.packing import Bucket, PackedRows
from tinsmith_engine.products.split_products import KSplit

# Measured, forward and backward, on one core: at 64 tokens the products take 0.8 of the fused
# kernel's time in float32 and 0.2 in bfloat16; from these lengths on they take more.
_LONGEST_BY_PRODUCTS = {torch.float32: 128, torch.bfloat16: 256}
_KEY_BLOCK = 128
"""Keys whose weighted values are summed in one product: cut here whatever the sequence's length."""
PRODUCTS_RULE = "/".join(map(str, (*_LONGEST_BY_PRODUCTS.values(), _KEY_BLOCK)))
"""The rule, for the fingerprint."""
_CHUNK_STEP, _LONGEST_CHUNK = 16, 128
_CHUNK_NUMBERS = 16 << 20
"""Scores of a chunk of queries at a time, at most: 64 MB in float32."""


class AttentionBackend(Protocol):
    """What the decoder needs of attention."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attended values [N, Hq, D] for q [N, Hq, D] and k, v [N, Hkv, D]."""


class PackedAttention:
    """Causal attention within the sequences of one pass, with a backward."""

    def __init__(self, rows: PackedRows, split: KSplit, *, keeps_graph: bool) -> None:
        self._buckets = rows.buckets
        self._split = split
        # Rows that no sequence fills must hold zeros, not what the memory held.
        self._new = torch.zeros_like if rows.has_padding else torch.empty_like
        self._keeps_graph = keeps_graph
        self._num_key_heads = 0
        self._saved: dict[int, list[_Kept]] = {}

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attended values [N, Hq, D]; keeps what the backward of the layer needs."""
        saved: list[_Kept] = []
        self._num_key_heads = k.shape[1]
        out = self._new(q, memory_format=torch.contiguous_format)
        for bucket in self._buckets:
            found, kept = _attend_by(bucket, q)(
                _padded(bucket, q),
                _padded(bucket, k),
                _padded(bucket, v),
                self._split,
                self._keeps_graph,
            )
            _put(bucket, out, found)
            if kept is not None:
                saved.append(kept)
        if self._keeps_graph:
            self._saved[layer] = saved
        return out

    def backward(self, layer: int, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v for that of the layer's output [N, Hq, D]."""
        num_key_heads = self._num_key_heads
        dq = self._new(dout, memory_format=torch.contiguous_format)
        dk, dv = (
            self._new(dout[:, :num_key_heads], memory_format=torch.contiguous_format)
            for _ in range(2)
        )
        for bucket, kept in zip(self._buckets, self._saved.pop(layer), strict=True):
            found = kept.backward(_padded_gradient(bucket, dout))
            for whole, part in zip((dq, dk, dv), found, strict=True):
                _put(bucket, whole, part)
        return dq, dk, dv


class _ByProducts(NamedTuple):
    """What the backward of attention by products needs.

    Batches are sequences times key heads; the query heads of a key head are stacked as queries.
    """

    q: Tensor
    """Scaled, [S * Hkv, G * L, D]."""
    k: Tensor
    """[S * Hkv, L, D]."""
    v: Tensor
    probabilities: Tensor
    """Float32 [S * Hkv, G * L, L]."""
    shape: tuple[int, int, int, int, int]
    """S, L, Hkv, G, D."""
    split: KSplit

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, [S, L, heads, D], for that of the output."""
        dtype = self.v.dtype
        dout = _stack_queries(dout, self.shape)
        probabilities = self.probabilities.to(dtype)
        dv = self.split.batched(probabilities.transpose(1, 2), dout)
        dprobabilities = torch.bmm(dout, self.v.transpose(1, 2)).float()
        dscores = torch.ops.aten._softmax_backward_data(
            dprobabilities, self.probabilities, -1, torch.float32
        ).to(dtype)
        dq = torch.bmm(dscores, self.k).mul_(_scale(self.shape))
        dk = self.split.batched(dscores.transpose(1, 2), self.q)
        num_sequences, length, num_key_heads, _, head_dim = self.shape
        by_key = (num_sequences, num_key_heads, length, head_dim)
        return (
            _unstack_queries(dq, self.shape),
            dk.view(by_key).transpose(1, 2),
            dv.view(by_key).transpose(1, 2),
        )


class _Fused(NamedTuple):
    """One bucket's tensors with their autograd graph, [S, L, heads, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v for that of the output."""
        dq, dk, dv = torch.autograd.grad(self.out, (self.q, self.k, self.v), dout)
        return dq, dk, dv


class _InChunks(NamedTuple):
    """What the backward of long sequences needs."""

    q: Tensor
    """[S, L, Hq, D]."""
    k: Tensor
    """[S, L, Hkv, D]."""
    v: Tensor
    out: Tensor
    """[S, Hq, L, D]."""
    totals: Tensor
    """Logarithm of the sum of each query's exponentials, float32 [S, Hq, L]."""

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, [S, L, heads, D], for that of the output."""
        num_groups = self.q.shape[2] // self.k.shape[2]
        k, v = (t.transpose(1, 2).repeat_interleave(num_groups, 1) for t in (self.k, self.v))
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout.transpose(1, 2), self.q.transpose(1, 2), k, v, self.out, self.totals, 0.0, True
        )
        dk, dv = (t.unflatten(1, (-1, num_groups)).sum(2).transpose(1, 2) for t in (dk, dv))
        return dq.transpose(1, 2), dk, dv


_Kept = _ByProducts | _Fused | _InChunks
_Attend = Callable[[Tensor, Tensor, Tensor, KSplit, bool], tuple[Tensor, _Kept | None]]


def _attend_by_products(
    q: Tensor, k: Tensor, v: Tensor, split: KSplit, keeps_graph: bool
) -> tuple[Tensor, _ByProducts | None]:
    num_sequences, length, num_heads, head_dim = q.shape
    num_key_heads = k.shape[2]
    shape = (num_sequences, length, num_key_heads, num_heads // num_key_heads, head_dim)
    q_stacked = _stack_queries(q, shape) * _scale(shape)
    by_key = (num_sequences * num_key_heads, length, head_dim)
    k_stacked = k.transpose(1, 2).reshape(by_key)
    v_stacked = v.transpose(1, 2).reshape(by_key)
    scores = torch.bmm(q_stacked, k_stacked.transpose(1, 2)).float()
    probabilities = torch.softmax(scores.add_(_causal_mask(length, shape[3], q.device)), dim=-1)
    out = _unstack_queries(weighted_values(probabilities.to(q.dtype), v_stacked, split), shape)
    if not keeps_graph:
        return out, None
    return out, _ByProducts(q_stacked, k_stacked, v_stacked, probabilities, shape, split)


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, split: KSplit, keeps_graph: bool
) -> tuple[Tensor, _Fused | None]:
    num_groups = q.shape[2] // k.shape[2]
    with torch.set_grad_enabled(keeps_graph):
        q, k, v = (tensor.detach().requires_grad_(keeps_graph) for tensor in (q, k, v))
        queries, keys, values = (tensor.transpose(1, 2) for tensor in (q, k, v))
        if split.is_exact:
            # The backward of the flash kernel sums a query's keys in as many parts as the other
            # sequences leave room for; this one's in one. Heads of odd sizes are left to products.
            keys, values = (one.repeat_interleave(num_groups, 1) for one in (keys, values))
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=num_groups > 1
            )
        out = out.transpose(1, 2)
    return out.detach(), _Fused(q, k, v, out) if keeps_graph else None


def _attend_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, split: KSplit, keeps_graph: bool
) -> tuple[Tensor, _InChunks | None]:
    num_sequences, length, num_heads, head_dim = q.shape
    num_key_heads = k.shape[2]
    num_groups = num_heads // num_key_heads
    batch = num_sequences * num_key_heads
    queries = q.view(num_sequences, length, num_key_heads, num_groups, head_dim)
    scaled = queries.permute(0, 2, 3, 1, 4).reshape(batch, num_groups, length, head_dim)
    scaled = scaled * head_dim**-0.5
    k_stacked, v_stacked = (t.transpose(1, 2).reshape(batch, length, head_dim) for t in (k, v))
    totals = None
    if keeps_graph:
        totals = q.new_empty(batch, num_groups, length, dtype=torch.float32)
    out = attend_behind(scaled, k_stacked, v_stacked, split, totals=totals)
    by_head = out.view(num_sequences, num_heads, length, head_dim)
    kept = None
    if totals is not None:
        kept = _InChunks(q, k, v, by_head, totals.view(num_sequences, num_heads, length))
    return by_head.transpose(1, 2), kept


def attend_behind(
    scaled: Tensor,
    keys: Tensor,
    values: Tensor,
    split: KSplit,
    *,
    first: int = 0,
    totals: Tensor | None = None,
) -> Tensor:
    """Return attended values [B, G, n, D] of n neighbouring queries, each behind its keys.

    Args:
        scaled: Queries, [B, G, n, D]; n is a multiple of 16.
        keys: [B, L, D], L at least `first` + n; those behind a query's own are not seen.
        values: As the keys; finite.
        split: How the sums of products are cut.
        first: Which key is the first query's own, a multiple of 16.
        totals: Where to put the logarithm of the sum of each query's exponentials, [B, G, n].
    """
    batch, num_groups, length, head_dim = scaled.shape
    out = torch.empty_like(scaled)
    step = _chunk_of_queries(batch * num_groups * (first + length))
    for start in range(0, length, step):
        stop = min(start + step, length)
        seen = slice(0, first + stop)
        chunk = scaled[:, :, start:stop].reshape(batch, -1, head_dim)
        scores = torch.bmm(chunk, keys[:, seen].transpose(1, 2)).float()
        own = scores.view(batch, num_groups, stop - start, first + stop)[..., first + start :]
        own += _causal_mask(stop - start, 1, scaled.device)
        if totals is not None:
            totals[:, :, start:stop] = scores.logsumexp(-1).view(batch, num_groups, -1)
        probabilities = torch.softmax(scores, dim=-1).to(scaled.dtype)
        found = weighted_values(probabilities, values[:, seen], split)
        out[:, :, start:stop] = found.view(batch, num_groups, stop - start, head_dim)
    return out


def _chunk_of_queries(scores_of_all: int) -> int:
    """Return how many queries go together, for what they have scores of; changes no bit."""
    fitting = _CHUNK_NUMBERS // scores_of_all
    return max(min(fitting, _LONGEST_CHUNK) // _CHUNK_STEP, 1) * _CHUNK_STEP


def weighted_values(
    probabilities: Tensor, values: Tensor, split: KSplit, *, out: Tensor | None = None
) -> Tensor:
    """Return `probabilities @ values` for [B, Q, L] and [B, L, D], the sum cut at fixed keys.

    Args:
        probabilities: Of each query over the keys, in the dtype of the values.
        values: Finite, also where a probability is zero.
        split: How the sums of products are cut.
        out: Where to put it, [B, Q, D].
    """
    if values.dtype != torch.float32:
        if split.block is None:
            # The library sums all keys in one sweep.
            return _product(probabilities, values, out)
        found = weighted_values(probabilities.float(), values.float(), split).to(values.dtype)
        return found if out is None else out.copy_(found)
    first = slice(0, _KEY_BLOCK)
    y = _product(probabilities[:, :, first], values[:, first], out)
    for start in range(_KEY_BLOCK, values.shape[1], _KEY_BLOCK):
        block = slice(start, start + _KEY_BLOCK)
        y.baddbmm_(probabilities[:, :, block], values[:, block])
    return y


def _product(left: Tensor, right: Tensor, out: Tensor | None) -> Tensor:
    return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)


def _attend_by(bucket: Bucket, q: Tensor) -> _Attend:
    """Return how a bucket's sequences are attended to."""
    if q.device.type != "cpu":
        return _attend_fused
    is_short = bucket.length <= _LONGEST_BY_PRODUCTS[q.dtype]
    return _attend_by_products if is_short else _attend_in_chunks


@functools.lru_cache(maxsize=64)
def _causal_mask(length: int, num_groups: int, device: torch.device) -> Tensor:
    """Return what to add to scores [G * L, L]: 0 for what a query may see, else -inf."""
    mask = torch.full((length, length), float("-inf"), device=device).triu_(1)
    return mask.repeat(num_groups, 1)


def _scale(shape: tuple[int, int, int, int, int]) -> float:
    scale: float = shape[-1] ** -0.5
    return scale


def _stack_queries(q: Tensor, shape: tuple[int, int, int, int, int]) -> Tensor:
    """Return [S, L, Hkv * G, D] as [S * Hkv, G * L, D]."""
    num_sequences, length, num_key_heads, num_groups, head_dim = shape
    grouped = q.view(num_sequences, length, num_key_heads, num_groups, head_dim)
    stacked = grouped.permute(0, 2, 3, 1, 4)
    return stacked.reshape(num_sequences * num_key_heads, num_groups * length, head_dim)


def _unstack_queries(q: Tensor, shape: tuple[int, int, int, int, int]) -> Tensor:
    """Return [S * Hkv, G * L, D] as [S, L, Hkv * G, D]."""
    num_sequences, length, num_key_heads, num_groups, head_dim = shape
    stacked = q.view(num_sequences, num_key_heads, num_groups, length, head_dim)
    return stacked.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _padded(bucket: Bucket, rows: Tensor) -> Tensor:
    """Return a bucket's sequences [S, L, ...] of packed rows [N, ...]."""
    flat = rows[bucket.rows] if bucket.source is None else rows.index_select(0, bucket.source)
    return flat.view(bucket.num_sequences, bucket.length, *rows.shape[1:])


def _padded_gradient(bucket: Bucket, rows: Tensor) -> Tensor:
    """Return a bucket's output gradient [S, L, ...]: nothing flows out of padding."""
    if bucket.places is None or isinstance(bucket.rows, slice):
        return _padded(bucket, rows)
    flat = rows.new_zeros(bucket.num_sequences * bucket.length, *rows.shape[1:])
    flat.index_copy_(0, bucket.places, rows.index_select(0, bucket.rows))
    return flat.view(bucket.num_sequences, bucket.length, *rows.shape[1:])


def _put(bucket: Bucket, out: Tensor, found: Tensor) -> None:
    """Write a bucket's padded result [S, L, ...] to the packed rows [N, ...] of its tokens."""
    if isinstance(bucket.rows, slice):
        out[bucket.rows].view(found.shape).copy_(found)
        return
    flat = found.flatten(0, 1)
    real = flat if bucket.places is None else flat.index_select(0, bucket.places)
    out.index_copy_(0, bucket.rows, real)
