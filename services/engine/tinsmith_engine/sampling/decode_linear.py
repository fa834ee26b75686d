"""Linear layers of a decode batch: rows of many adapters over one frozen weight.

Frozen products are those of training (`products.py`): one for all rows, the last tile filled up.
LoRA products run as batches of 4-row tiles, each tile with one adapter, so that shapes are fixed.
Adapters are stacked once per composition of the batch, which changes far less often than a token is
made. Their ranks are filled up with zeros: at small ones a tile's bits would depend on its place in
the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor

from tinsmith_engine.lora.lora import LoraTarget
from tinsmith_engine.model.decoder_weights import LAYER_TARGETS, AdapterWeights, DecoderWeights
from tinsmith_engine.model.experts import AdaptedExperts, ExpertTarget
from tinsmith_engine.model.linear import LinearTarget, Saved
from tinsmith_engine.model.mlp import DenseMlp
from tinsmith_engine.products.split_products import KSplit

_LORA_TILE = 4
_RANK_STEP = 8


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """Which rows the tiles of adapters of one shape take."""

    adapters: tuple[int, ...]
    """For each tile, whose adapter it applies: an index into the batch's weights."""
    sources: Tensor
    """Row that fills each place of the tiles, int64 [tiles * 4]; places left over repeat one."""
    places: Tensor
    """Where each row of the batch lies in the tiles, int64 [N]; anywhere for one that does not."""
    is_used: Tensor | None
    """Which rows take part, bool [N, 1]; None if all do."""


@dataclass(frozen=True, slots=True)
class TargetMix:
    """The adapters of one linear target."""

    tiles: AdapterTiles
    a: Tensor
    """[tiles, in, parts * rank], the rank a multiple of 8."""
    b: tuple[Tensor, ...]
    """For each part [tiles, rank, out]."""
    scales: Tensor
    """[tiles, 1, 1]."""

    def add_forward_(self, y: Tensor, x: Tensor, split: KSplit) -> None:
        """Add each row's own adapter to y [N, out]."""
        tiles = self.tiles
        num_tiles = len(tiles.adapters)
        tiled = x.index_select(0, tiles.sources).view(num_tiles, _LORA_TILE, -1)
        projected = split.batched(tiled, self.a).mul_(self.scales)
        # As in training, products are added to y itself: a narrow number is rounded once.
        added = y.index_select(0, tiles.sources).view(num_tiles, _LORA_TILE, -1)
        rank, start = self.b[0].shape[1], 0
        for index, b in enumerate(self.b):
            part = projected[:, :, index * rank : (index + 1) * rank]
            added[:, :, start : start + b.shape[2]].baddbmm_(part, b)
            start += b.shape[2]
        spread = added.flatten(0, 1).index_select(0, tiles.places)
        if tiles.is_used is None:
            y.copy_(spread)
        else:
            torch.where(tiles.is_used, spread, y, out=y)


@dataclass(frozen=True, slots=True)
class DecodeTarget(LinearTarget):
    """A target for decode batches."""

    mixes: tuple[TargetMix, ...] = ()

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        """Return y [N, out] for x [N, in]."""
        y = self.split.product(x, self.weight.t(), self.bias)
        for mix in self.mixes:
            mix.add_forward_(y, x, self.split)
        return y, ()


def decode_weights(
    base: DecoderWeights, adapters: Sequence[AdapterWeights], adapter_of_row: Sequence[int | None]
) -> DecoderWeights:
    """Return weights for a decode batch.

    Args:
        base: The frozen weights of every row.
        adapters: The bound adapter versions that take part.
        adapter_of_row: Which of them each row uses, filling included; None for the base alone.
    """
    runs = _runs_of_rows(adapter_of_row)
    tilings = _tilings(base, adapters, adapter_of_row)

    def target(plain: LinearTarget, index: int) -> LinearTarget:
        return _mixed(plain, index, adapters, tilings)

    def experts(plain: ExpertTarget, index: int) -> ExpertTarget:
        used = [(rows, adapters[adapter].experts(index)) for adapter, rows in runs]
        return ExpertTarget(
            weight=plain.weight,
            split=plain.split,
            adapted=tuple(AdaptedExperts(rows, lora) for rows, lora in used if lora is not None),
        )

    layers = []
    for index, layer in enumerate(base.layers):
        first, mlp = index * LAYER_TARGETS, layer.mlp
        layers.append(
            dataclasses.replace(
                layer,
                qkv=target(layer.qkv, first),
                o=target(layer.o, first + 1),
                mlp=DenseMlp(target(mlp.gate_up, first + 2), target(mlp.down, first + 3), mlp.ops)
                if isinstance(mlp, DenseMlp)
                else dataclasses.replace(
                    mlp,
                    router=_plain(mlp.router),
                    gate_up=experts(mlp.gate_up, first + 2),
                    down=experts(mlp.down, first + 3),
                    group_tile=_LORA_TILE,
                ),
            )
        )
    head = target(base.head, len(base.layers) * LAYER_TARGETS)
    return dataclasses.replace(base, layers=tuple(layers), head=head)


def head_weights(
    base: DecoderWeights, adapters: Sequence[AdapterWeights], adapter_of_row: Sequence[int | None]
) -> LinearTarget:
    """Return the unembedding for rows of many adapters; arguments as of `decode_weights`."""
    tilings = _tilings(base, adapters, adapter_of_row)
    return _mixed(base.head, len(base.layers) * LAYER_TARGETS, adapters, tilings)


_Tiling = tuple[AdapterTiles, list[int]]
"""Tiles, and the adapters that they are of."""


def _tilings(
    base: DecoderWeights, adapters: Sequence[AdapterWeights], adapter_of_row: Sequence[int | None]
) -> list[_Tiling]:
    shapes: dict[tuple[object, ...], list[int]] = {}
    for index, adapter in enumerate(adapters):
        shapes.setdefault(_shape(adapter), []).append(index)
    return [
        (_tiles(members, adapter_of_row, base.embedding), members) for members in shapes.values()
    ]


def _mixed(
    plain: LinearTarget,
    index: int,
    adapters: Sequence[AdapterWeights],
    tilings: Sequence[_Tiling],
) -> DecodeTarget:
    mixes = [
        _mix(tiles, [adapter.linear(index) for adapter in adapters])
        for tiles, members in tilings
        if adapters[members[0]].targets[index] is not None
    ]
    return dataclasses.replace(_plain(plain), mixes=tuple(mixes))


def _plain(target: LinearTarget) -> DecodeTarget:
    return DecodeTarget(weight=target.weight, split=target.split, bias=target.bias)


def _runs_of_rows(adapter_of_row: Sequence[int | None]) -> list[tuple[int, slice]]:
    """Return which neighbouring rows use which adapter."""
    found = []
    for adapter, group in groupby(range(len(adapter_of_row)), key=lambda row: adapter_of_row[row]):
        rows = list(group)
        if adapter is not None:
            found.append((adapter, slice(rows[0], rows[-1] + 1)))
    return found


def _shape(adapter: AdapterWeights) -> tuple[object, ...]:
    """Return what must be equal for adapters to be stacked: which targets they adapt, and rank."""
    return tuple(None if target is None else target.b[0].shape[-1] for target in adapter.targets)


def _tiles(
    members: Sequence[int], adapter_of_row: Sequence[int | None], like: Tensor
) -> AdapterTiles:
    adapters: list[int] = []
    sources: list[int] = []
    places = [0] * len(adapter_of_row)
    for adapter in members:
        used_by = [row for row, used in enumerate(adapter_of_row) if used == adapter]
        for start in range(0, len(used_by), _LORA_TILE):
            part = used_by[start : start + _LORA_TILE]
            for place, row in enumerate(part, start=len(sources)):
                places[row] = place
            sources.extend(part + [part[0]] * (_LORA_TILE - len(part)))
            adapters.append(adapter)
    if len(adapters) == 1:
        # A lone product is shared out between the threads in another way than those of a batch.
        adapters *= 2
        sources *= 2
    is_used = torch.tensor([[used in members] for used in adapter_of_row])
    return AdapterTiles(
        adapters=tuple(adapters),
        sources=torch.tensor(sources, device=like.device),
        places=torch.tensor(places, device=like.device),
        is_used=None if bool(is_used.all()) else is_used.to(like.device),
    )


def _mix(tiles: AdapterTiles, targets: Sequence[LoraTarget | None]) -> TargetMix:
    used = [_given(targets[adapter]).run(0) for adapter in tiles.adapters]
    scales = torch.tensor([lora.scale for lora in used], dtype=used[0].a.dtype)
    num_parts, rank = len(used[0].b), used[0].b[0].shape[-1]
    filling = -rank % _RANK_STEP
    a = torch.cat([lora.a for lora in used]).view(len(used), num_parts, rank, -1)
    return TargetMix(
        tiles=tiles,
        a=F.pad(a, (0, 0, 0, filling)).flatten(1, 2).transpose(1, 2),
        b=tuple(
            F.pad(torch.cat([lora.b[part] for lora in used]), (0, filling)).transpose(1, 2)
            for part in range(num_parts)
        ),
        scales=scales.view(-1, 1, 1).to(used[0].a.device),
    )


def _given(target: LoraTarget | None) -> LoraTarget:
    if target is None:
        raise AssertionError("adapters of one shape adapt the same units")
    return target
