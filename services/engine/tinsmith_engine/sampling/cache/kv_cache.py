"""Keys and values of the sequences that are being sampled, and attention to them.

The cache is cut into blocks of `BLOCK_TOKENS` positions. Its size in bytes is fixed when it is
made, whatever is sampled; `block_pool.py` says which blocks are free. A decoding row attends to the
blocks of its sequence, so to a padded length that depends on its own length alone. Rows of equal
padded length share one call. Each row of such a call is computed by itself, so neighbours change no
bit of it. What lies behind a row's length is finite (zeros, or what an earlier sequence left; a
block with other numbers is cleared before it is used again) and masked.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor

from tinsmith_engine.model.attention import weighted_values
from tinsmith_engine.model.decoder_config import DecoderConfig
from tinsmith_engine.products.split_products import KSplit
from tinsmith_engine.sampling.cache.block_pool import BLOCK_TOKENS, blocks_for

_COPIED_BLOCKS = 2
"""Rows of up to as many blocks are copied together where they do not lie in order.

Copying so little costs less than a call for each."""
# Products of fewer rows take other kernels, with other orders of sums.
_FEWEST_QUERIES = 4


def block_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the memory of one block over all layers."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    return BLOCK_TOKENS * per_token


class KvCache:
    """Keys and values in `num_blocks` blocks in every layer, [Hkv * blocks, 64 * D] each.

    Memory is not written to before a block is cleared or used: on a CPU it is not taken earlier.
    """

    def __init__(self, config: DecoderConfig, num_blocks: int, like: Tensor) -> None:
        self.num_blocks, self.num_heads, self.head_dim = (
            num_blocks,
            config.num_kv_heads,
            config.head_dim,
        )
        self._device = like.device
        shape = (config.num_kv_heads * num_blocks, BLOCK_TOKENS * config.head_dim)
        self.keys = [like.new_empty(shape) for _ in range(config.num_layers)]
        self.values = [like.new_empty(shape) for _ in range(config.num_layers)]

    @property
    def num_bytes(self) -> int:
        """Memory of all blocks."""
        return sum(stored.nbytes for stored in (*self.keys, *self.values))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks to others."""
        source, target = (torch.tensor(one, device=self._device) for one in (sources, targets))
        for blocks in map(self._by_block, (*self.keys, *self.values)):
            blocks.index_copy_(1, target, blocks.index_select(1, source))

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros."""
        index = torch.tensor(blocks, device=self._device)
        for stored in map(self._by_block, (*self.keys, *self.values)):
            stored.index_fill_(1, index, 0)

    def of_blocks(self, stored: Tensor, blocks: Sequence[int]) -> Tensor:
        """Return what a layer holds in blocks, [Hkv, 64 * blocks, D]; a view of a run."""
        if is_run(blocks):
            places = slice(blocks[0] * BLOCK_TOKENS, (blocks[-1] + 1) * BLOCK_TOKENS)
            return self.by_position(stored)[:, places]
        index = torch.tensor(blocks, device=self._device)
        chosen = self._by_block(stored).index_select(1, index)
        return chosen.view(self.num_heads, -1, self.head_dim)

    def by_position(self, stored: Tensor) -> Tensor:
        """Return a layer's keys or values as [Hkv, positions, D]; block b begins at 64 b."""
        return stored.view(self.num_heads, self.num_blocks * BLOCK_TOKENS, self.head_dim)

    def _by_block(self, stored: Tensor) -> Tensor:
        return stored.view(self.num_heads, self.num_blocks, -1)


def place_of(blocks: Sequence[int], position: int) -> int:
    """Return where a position of a sequence lies among those of the cache."""
    return blocks[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS


class _Group(NamedTuple):
    """Rows of equal padded length whose blocks lie in order, or are copied."""

    rows: Tensor | None
    """Row numbers, int64 [n]; None for the first n rows in their order."""
    num_rows: int
    mask: Tensor
    """What to add to the scores: 0 for positions that a row may see, else -inf, float32 [n, 1, 1,
    length]."""
    first: int
    """First block of the first row."""
    spacing: int
    """Blocks from the beginning of a row to that of the next one."""
    copied: Tensor | None
    """Rows of the cache's tensors, int64 [n * Hkv * blocks]; None if the blocks lie in order."""

    def read(self, cache: KvCache, stored: Tensor) -> Tensor:
        """Return keys or values of the rows, [n, Hkv, length, D]."""
        shape = (self.num_rows, cache.num_heads, self.mask.shape[-1], cache.head_dim)
        if self.copied is not None:
            return stored.index_select(0, self.copied).view(shape)
        of_block = stored.shape[1]
        strides = (self.spacing * of_block, cache.num_blocks * of_block, cache.head_dim, 1)
        return stored.as_strided(shape, strides, self.first * of_block)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, split: KSplit) -> Tensor:
    """Return attended values [n, Hkv, G, D] of the newest tokens, as the trainer attends.

    Args:
        q: Scaled, [n, Hkv, G, D]; at least 4 rows of a key head.
        keys: [n, Hkv, L, D].
        values: [n, Hkv, L, D].
        mask: Float32 [n, 1, 1, L].
        split: How the sums of products are cut.
    """
    by_head = len(q) > keys.shape[1]
    if by_head:
        q, keys, values, mask = (one.transpose(0, 1) for one in (q, keys, values, mask))
    # Products over the shorter axis, one after the other: the other one is the batch.
    num_products, batch, num_queries, head_dim = q.shape
    is_lone = batch == 1
    if is_lone:
        # The threads would share out a lone product, and sum what is left over otherwise.
        q, keys, values = (one.expand(-1, 2, -1, -1) for one in (q, keys, values))
    if num_products == 1 and not is_lone:
        scores = torch.bmm(q[0], keys[0].transpose(1, 2)).float().add_(mask[0])
        return _placed(
            weighted_values(torch.softmax(scores, dim=-1).to(q.dtype), values[0], split)[None],
            by_head=by_head,
        )
    scores = q.new_empty(num_products, q.shape[1], num_queries, keys.shape[2])
    for index in range(num_products):
        torch.bmm(q[index], keys[index].transpose(1, 2), out=scores[index])
    probabilities = torch.softmax(scores.float().add_(mask), dim=-1).to(q.dtype)
    out = q.new_empty(num_products, q.shape[1], num_queries, head_dim)
    for index in range(num_products):
        weighted_values(probabilities[index], values[index], split, out=out[index])
    return _placed(out[:, :batch], by_head=by_head)


def _placed(out: Tensor, *, by_head: bool) -> Tensor:
    return out.transpose(0, 1) if by_head else out


class DecodeAttention:
    """One new token for each of several cached sequences.

    Args:
        cache: Where the sequences are stored.
        blocks: The blocks of each row's sequence; those beyond its new token are left out.
        positions: Position of each row's new token, equal to the tokens cached before it.
        num_rows: Rows of q, k and v; those beyond `blocks` are filling and attend to nothing.
        split: How the sums of products are cut.
    """

    def __init__(
        self,
        cache: KvCache,
        blocks: Sequence[Sequence[int]],
        positions: Sequence[int],
        num_rows: int,
        split: KSplit,
    ) -> None:
        self._cache, self._split = cache, split
        self._num_rows = num_rows
        self._num_active = len(positions)
        self._device = cache.keys[0].device
        places = [place_of(*pair) for pair in zip(blocks, positions, strict=True)]
        self._places = torch.tensor(places, device=self._device)
        by_length: dict[int, list[int]] = {}
        for row, position in enumerate(positions):
            by_length.setdefault(blocks_for(position + 1), []).append(row)
        self._groups: list[_Group] = []
        for num_blocks, rows in by_length.items():
            tables = [blocks[row][:num_blocks] for row in rows]
            runs, loose = _runs(tables)
            if len(runs) > 1 and num_blocks <= _COPIED_BLOCKS:
                runs, loose = [], list(range(len(rows)))
            for members in [*runs, *([loose] if loose else [])]:
                self._groups.append(
                    self._group(
                        [rows[member] for member in members],
                        [tables[member] for member in members],
                        [positions[rows[member]] for member in members],
                        is_copied=members is loose,
                    )
                )

    def _group(
        self,
        rows: list[int],
        tables: list[Sequence[int]],
        positions: list[int],
        *,
        is_copied: bool,
    ) -> _Group:
        cache, copied = self._cache, None
        if is_copied:
            heads = torch.arange(cache.num_heads) * cache.num_blocks
            index = torch.tensor(tables)[:, None] + heads[:, None]
            copied = index.flatten().to(self._device)
        seen = torch.arange(len(tables[0]) * BLOCK_TOKENS)
        mask = torch.zeros(len(rows), len(seen))
        mask.masked_fill_(seen > torch.tensor(positions)[:, None], float("-inf"))
        is_first = rows == list(range(len(rows)))
        return _Group(
            rows=None if is_first else torch.tensor(rows, device=self._device),
            num_rows=len(rows),
            mask=mask[:, None, None].to(self._device),
            first=tables[0][0],
            spacing=tables[1][0] - tables[0][0] if len(tables) > 1 else 0,
            copied=copied,
        )

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values and return attended values [N, Hq, D]."""
        cache = self._cache
        keys, values = cache.keys[layer], cache.values[layer]
        for stored, new in ((keys, k), (values, v)):
            cache.by_position(stored).index_copy_(
                1, self._places, new[: self._num_active].transpose(0, 1)
            )
        # The query heads that share a key head are taken as its queries: nothing is repeated.
        grouped = q.unflatten(1, (k.shape[1], -1))  # type: ignore[no-untyped-call]
        num_groups = grouped.shape[2]
        if q.device.type == "cpu":
            grouped = grouped * cache.head_dim**-0.5
            if num_groups < _FEWEST_QUERIES:
                grouped = F.pad(grouped, (0, 0, 0, _FEWEST_QUERIES - num_groups))
        if self._groups[0].rows is None and self._groups[0].num_rows == q.shape[0]:
            return self._attended(self._groups[0], grouped, layer, num_groups)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            chosen = slice(0, group.num_rows) if group.rows is None else group.rows
            out[chosen] = self._attended(group, grouped[chosen], layer, num_groups)
        return out

    def _attended(self, group: _Group, q: Tensor, layer: int, num_groups: int) -> Tensor:
        """Return attended values of a group's rows, [n, Hq, D], for grouped queries."""
        keys, values = (
            group.read(self._cache, stored[layer])
            for stored in (self._cache.keys, self._cache.values)
        )
        if q.device.type == "cpu":
            attended = _attend(q, keys, values, group.mask, self._split)
        else:
            attended = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=group.mask.to(q.dtype)
            )
        return attended[:, :, :num_groups].flatten(1, 2)


def _runs(tables: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the rows whose blocks lie in order, in runs of equal distance; and the others."""
    in_order: list[int] = []
    loose: list[int] = []
    for row, table in enumerate(tables):
        (in_order if is_run(table) else loose).append(row)
    in_order.sort(key=lambda row: tables[row][0])
    runs: list[list[int]] = []
    for row in in_order:
        start = tables[row][0]
        run = runs[-1] if runs else []
        starts = [tables[member][0] for member in run[-2:]]
        # Shared blocks have no distance.
        is_next = len(run) == 1 and start > starts[0]
        if is_next or (len(run) > 1 and start - starts[1] == starts[1] - starts[0]):
            run.append(row)
        else:
            runs.append([row])
    return runs, loose


def is_run(table: Sequence[int]) -> bool:
    """Return whether blocks lie behind each other."""
    if table[-1] - table[0] != len(table) - 1:
        return False
    return all(later == earlier + 1 for earlier, later in itertools.pairwise(table))
