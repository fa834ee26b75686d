"""Attention backends: the one part of the decoder that knows where keys and values live.

The decoder hands a backend the rotated q, k and v of its packed rows and gets the attended values
back. Training attends within the sequences of a micro-batch; prefill and decoding attend to a cache
(`kv_cache.py`).

Training attention is padded, in buckets of each sequence's own length, and needs no mask: padding
is on the right, so causality keeps it from every real row, and its own rows are never read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor

from tinsmith_engine.packing import Bucket


class Attended(NamedTuple):
    """One bucket's tensors with their autograd graph, kept between forward and backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


class AttentionBackend(Protocol):
    """What the decoder needs of attention."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attended values [N, Hq, D] for q [N, Hq, D] and k, v [N, Hkv, D]."""


class PackedAttention:
    """Causal attention within the sequences of one micro-batch, with a backward."""

    def __init__(self, buckets: Sequence[Bucket], *, keeps_graph: bool) -> None:
        self._buckets = buckets
        self._keeps_graph = keeps_graph
        self._saved: dict[int, list[Attended]] = {}

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attended values [N, Hq, D]; keeps what the backward of the layer needs."""
        saved = []
        with torch.set_grad_enabled(self._keeps_graph):
            for bucket in self._buckets:
                rows = slice(bucket.start, bucket.stop)
                bucket_q, bucket_k, bucket_v = (
                    tensor[rows].detach().requires_grad_(self._keeps_graph) for tensor in (q, k, v)
                )
                out = _attend(bucket, bucket_q, bucket_k, bucket_v)
                saved.append(Attended(bucket_q, bucket_k, bucket_v, out))
        if self._keeps_graph:
            self._saved[layer] = saved
        outs = [attended.out.detach() for attended in saved]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def backward(self, layer: int, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v for that of the layer's output [N, Hq, D]."""
        parts = []
        for bucket, attended in zip(self._buckets, self._saved.pop(layer), strict=True):
            parts.append(
                torch.autograd.grad(
                    attended.out,
                    (attended.q, attended.k, attended.v),
                    dout[bucket.start : bucket.stop],
                )
            )
        if len(parts) == 1:
            return parts[0][0], parts[0][1], parts[0][2]
        dq, dk, dv = (torch.cat(grads) for grads in zip(*parts, strict=True))
        return dq, dk, dv


def _attend(bucket: Bucket, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def padded(tensor: Tensor) -> Tensor:
        shape = (bucket.num_sequences, bucket.length, *tensor.shape[1:])
        if bucket.places is not None:
            flat = tensor.new_zeros(shape[0] * shape[1], *shape[2:])
            tensor = flat.index_copy(0, bucket.places, tensor)
        # Axes: sequence, head, token, D.
        return tensor.view(shape).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        padded(q), padded(k), padded(v), is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if bucket.places is None else flat.index_select(0, bucket.places)
