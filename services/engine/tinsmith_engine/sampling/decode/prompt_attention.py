"""Attention of prompts that are read, whole or piece by piece, many in one pass.

A piece that begins its prompt attends within itself, as training does. One that continues attends
to what the cache holds of its prompt, by the same operations. A query's sums are cut at fixed keys,
so its bits are those of the prompt read in one pass, wherever the prompt is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor

from tinsmith_engine.model.attention import PackedAttention, attend_behind
from tinsmith_engine.packing.packing import SEGMENT_ROWS, PackedRows, attention_buckets
from tinsmith_engine.products.split_products import KSplit, padded_rows
from tinsmith_engine.sampling.cache.block_pool import blocks_for
from tinsmith_engine.sampling.cache.kv_cache import KvCache, place_of


class CachedPiece(NamedTuple):
    """Neighbouring tokens of a prompt as rows of a pass."""

    row: int
    """Of its first token."""
    start: int
    """Position of its first token: those before it are cached."""
    stop: int
    blocks: Sequence[int]
    """Of its prompt."""

    @property
    def rows(self) -> slice:
        """Those of its tokens."""
        return slice(self.row, self.row + self.stop - self.start)


class PromptAttention:
    """Causal attention of pieces of prompts; leaves their keys and values in blocks."""

    def __init__(
        self, cache: KvCache, pieces: Sequence[CachedPiece], rows: PackedRows, split: KSplit
    ) -> None:
        self._cache, self._split = cache, split
        device = cache.keys[0].device
        places = [
            place_of(piece.blocks, position)
            for piece in pieces
            for position in range(piece.start, piece.stop)
        ]
        self._places = torch.tensor(places, device=device)
        self._rows = torch.from_numpy(rows.token_rows).to(device)
        beginning = [(piece.row, piece.stop) for piece in pieces if piece.start == 0]
        self._continuing = [piece for piece in pieces if piece.start > 0]
        within = dataclasses.replace(
            rows,
            buckets=attention_buckets(beginning, device),
            has_padding=rows.has_padding or bool(self._continuing),
        )
        self._packed = PackedAttention(within, split, keeps_graph=False)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attended values [N, Hq, D]."""
        for stored, new in ((self._cache.keys, k), (self._cache.values, v)):
            self._cache.by_position(stored[layer]).index_copy_(
                1, self._places, new.index_select(0, self._rows).transpose(0, 1)
            )
        out = self._packed.forward(layer, q, k, v)
        for piece in self._continuing:
            out[piece.rows] = self._attended(layer, piece, q[piece.rows])
        return out

    def _attended(self, layer: int, piece: CachedPiece, q: Tensor) -> Tensor:
        """Return attended values [n, Hq, D] of a piece's queries."""
        num_tokens, _, head_dim = q.shape
        num_rows = padded_rows(num_tokens, SEGMENT_ROWS)
        blocks = piece.blocks[: blocks_for(piece.start + num_rows)]
        keys, values = (
            self._cache.of_blocks(stored[layer], blocks)
            for stored in (self._cache.keys, self._cache.values)
        )
        grouped = q.view(num_tokens, len(keys), -1, head_dim).permute(1, 2, 0, 3)
        # Padding is never read back; what it attends to is finite.
        scaled = F.pad(grouped, (0, 0, 0, num_rows - num_tokens)) * head_dim**-0.5
        found = attend_behind(scaled, keys, values, self._split, first=piece.start)
        return found[:, :, :num_tokens].permute(2, 0, 1, 3).flatten(1, 2)
