"""Keys and values of the sequences that are being sampled, and attention to them.

A cache has a slot for each sequence; its length grows with the longest sequence in it. A
decoding row attends to its own slot, padded to a multiple that depends on its own length alone.
Rows of equal padded length share one call. Each row of such a call is computed by itself, so
neighbours
change no bit of it. What lies behind a row's length is finite (zeros, or what an earlier sequence
left; a slot with other numbers is cleared before it is used again) and masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor

from tinsmith_engine.model.attention import PackedAttention
from tinsmith_engine.model.decoder_config import DecoderConfig
from tinsmith_engine.packing.packing import PackedRows
from tinsmith_engine.products.split_products import KSplit

_LENGTH_STEP = 64
# Products of three rows have other bits where threads share the heads than where one has all.
_ODD_GROUPS = 3


def cached_length(num_tokens: int) -> int:
    """Return the number of cache positions that a row of this length attends to."""
    return -(-num_tokens // _LENGTH_STEP) * _LENGTH_STEP


def cache_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the memory of one cached position over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


class KvCache:
    """Keys and values of `num_slots` sequences in every layer, [slots, Hkv, capacity, D] each."""

    def __init__(self, config: DecoderConfig, num_slots: int, like: Tensor) -> None:
        self.num_slots = num_slots
        self.capacity = 0
        empty = like.new_zeros(num_slots, config.num_kv_heads, 0, config.head_dim)
        self.keys = [empty] * config.num_layers
        self.values = [empty] * config.num_layers

    def reserve(self, num_tokens: int) -> None:
        """Make room for sequences of this length, keeping what is stored."""
        if num_tokens <= self.capacity:
            return
        # Doubling: growing by a token at a time would copy the cache for each of them.
        added = max(cached_length(num_tokens), 2 * self.capacity) - self.capacity
        self.keys = [F.pad(keys, (0, 0, 0, added)) for keys in self.keys]
        self.values = [F.pad(values, (0, 0, 0, added)) for values in self.values]
        self.capacity += added

    def copy_prefix(self, source: int, targets: Sequence[int], num_tokens: int) -> None:
        """Copy the first positions of one slot to others."""
        if not targets:
            return
        for stored in (*self.keys, *self.values):
            stored[list(targets), :, :num_tokens] = stored[source, :, :num_tokens]

    def clear(self, slots: Sequence[int]) -> None:
        """Fill slots with zeros."""
        for stored in (*self.keys, *self.values):
            stored[list(slots)] = 0


class PrefillAttention:
    """Causal attention within one prompt, as in training; leaves its keys and values in a slot."""

    def __init__(
        self, cache: KvCache, slot: int, num_tokens: int, rows: PackedRows, split: KSplit
    ) -> None:
        self._cache, self._slot, self._num_tokens = cache, slot, num_tokens
        self._packed = PackedAttention(rows, split, keeps_graph=False)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attended values [N, Hq, D]."""
        place = (self._slot, slice(None), slice(self._num_tokens))
        # Rows behind the prompt are filling.
        self._cache.keys[layer][place] = k[: self._num_tokens].transpose(0, 1)
        self._cache.values[layer][place] = v[: self._num_tokens].transpose(0, 1)
        return self._packed.forward(layer, q, k, v)


class _Group(NamedTuple):
    """Rows of equal padded length."""

    rows: Tensor
    """Row numbers, int64 [n]."""
    slots: slice | Tensor
    length: int
    mask: Tensor
    """Which positions a row may see, bool [n, 1, 1, length]."""


class DecodeAttention:
    """One new token for each of several cached sequences.

    Args:
        cache: Where the sequences are stored.
        slots: The slot of each row.
        positions: Position of each row's new token, equal to the tokens cached before it.
        num_rows: Rows of q, k and v; those beyond `slots` are filling and attend to nothing.
    """

    def __init__(
        self, cache: KvCache, slots: Sequence[int], positions: Sequence[int], num_rows: int
    ) -> None:
        self._cache = cache
        self._num_rows = num_rows
        self._slots = torch.tensor(slots)
        self._positions = torch.tensor(positions)
        by_length: dict[int, list[int]] = {}
        for row, position in enumerate(positions):
            by_length.setdefault(cached_length(position + 1), []).append(row)
        self._groups = [self._group(length, rows) for length, rows in by_length.items()]

    def _group(self, length: int, rows: list[int]) -> _Group:
        slots = self._slots[rows]
        first, last = int(slots[0]), int(slots[-1])
        # A run of neighbouring slots is a view; other choices have to be gathered.
        is_run = torch.equal(slots, torch.arange(first, first + len(rows)))
        mask = torch.arange(length)[None, None, None] <= self._positions[rows][:, None, None, None]
        return _Group(
            rows=torch.tensor(rows),
            slots=slice(first, last + 1) if is_run else slots,
            length=length,
            mask=mask.to(self._cache.keys[0].device),
        )

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values and return attended values [N, Hq, D]."""
        num_active = len(self._slots)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._slots, :, self._positions] = k[:num_active]
        values[self._slots, :, self._positions] = v[:num_active]
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        # The query heads that share a key head are taken as its queries: nothing is repeated.
        grouped = q.unflatten(1, (k.shape[1], -1))  # type: ignore[no-untyped-call]
        num_groups = grouped.shape[2]
        if num_groups == _ODD_GROUPS:
            grouped = F.pad(grouped, (0, 0, 0, 1))
        for group in self._groups:
            attended = F.scaled_dot_product_attention(
                grouped[group.rows],
                keys[group.slots][:, :, : group.length],
                values[group.slots][:, :, : group.length],
                attn_mask=group.mask,
            )
            out[group.rows] = attended[:, :, :num_groups].flatten(1, 2)
        return out
