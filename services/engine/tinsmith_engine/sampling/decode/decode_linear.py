"""Linear layers of a decode batch: rows of many adapters over one frozen weight.

Frozen products are those of training (`split_products.py`): one for all rows, with a full last
tile. LoRA products of float32 on a CPU are one call for a target, which reads adapters where they
lie (`adapter_products.py`). It is used for shapes whose bits are those of the trainer's products,
which is tried once for each shape.

Other LoRA products run as batches of tiles, each tile with one adapter, so that shapes are fixed.
Adapters are stacked once per composition of the batch, which changes far less often than a token is
made. Tiles have as few rows as keep the bits of the trainer's segments (`few_rows.py`). Where ranks
are no multiple of 8 a tile's bits would depend on its place; there it is as long as a segment.
"""

from __future__ import annotations

import dataclasses
import functools
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
from tinsmith_engine.packing.packing import SEGMENT_ROWS
from tinsmith_engine.products.adapter_products import (
    AdapterProducts,
    AdapterSegments,
    AdapterShape,
)
from tinsmith_engine.products.few_rows import fewest_adapter_rows
from tinsmith_engine.products.small_products import KERNEL_ROWS, LANES
from tinsmith_engine.products.split_products import KSplit, padded_rows

_LORA_TILE = 4
_RANK_STEP = 8
_COMPARED_SCALE = 0.7


@dataclass(frozen=True, slots=True)
class AdapterTiles:
    """Which rows the tiles of adapters of one shape take."""

    adapters: tuple[int, ...]
    """For each tile, whose adapter it applies: an index into the batch's weights."""
    num_rows: int
    """Of a tile."""
    sources: Tensor
    """Row that fills each place of the tiles, int64 [tiles * rows]; places left over repeat one."""
    places: Tensor
    """Where each row of the batch lies in the tiles, int64 [N]; anywhere for one that does not."""
    is_used: Tensor | None
    """Which rows take part, bool [N, 1]; None if all do."""


@dataclass(frozen=True, slots=True)
class TargetMix:
    """The adapters of one linear target."""

    tiles: AdapterTiles
    a: Tensor
    """[tiles, in, parts * rank]."""
    b: tuple[Tensor, ...]
    """For each part [tiles, rank, out]."""
    scales: Tensor
    """Float32 [tiles, 1, 1]."""

    def add_forward_(self, y: Tensor, x: Tensor, split: KSplit) -> None:
        """Add each row's own adapter to y [N, out]."""
        tiles = self.tiles
        num_tiles = len(tiles.adapters)
        tiled = x.index_select(0, tiles.sources).view(num_tiles, tiles.num_rows, -1)
        # As a number times a tensor: a scale is not narrowed, and the product is rounded once.
        projected = split.batched(tiled, self.a)
        projected.copy_(projected.float().mul_(self.scales))
        # As in training, products are added to y itself: a narrow number is rounded once.
        added = y.index_select(0, tiles.sources).view(num_tiles, tiles.num_rows, -1)
        rank, start = self.b[0].shape[1], 0
        for index, b in enumerate(self.b):
            part = projected[:, :, index * rank : (index + 1) * rank]
            split.add_narrow_(added[:, :, start : start + b.shape[2]], part, b)
            start += b.shape[2]
        spread = added.flatten(0, 1).index_select(0, tiles.places)
        if tiles.is_used is None:
            y.copy_(spread)
        else:
            torch.where(tiles.is_used, spread, y, out=y)


@dataclass(frozen=True, slots=True)
class DecodeTarget(LinearTarget):
    """A target for decode batches."""

    in_place: tuple[AdapterProducts, ...] = ()
    """Adapters that are read where they lie."""
    mixes: tuple[TargetMix, ...] = ()
    """The others."""

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        """Return y [N, out] for x [N, in]."""
        y = self.split.product(x, self.weight.t(), self.bias)
        for products in self.in_place:
            products.add_(y, x)
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
    likes = _likes(base, adapters, adapter_of_row)

    def target(plain: LinearTarget, index: int) -> LinearTarget:
        return _mixed(plain, index, adapters, likes)

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
                    has_tiles=True,
                ),
            )
        )
    head = target(base.head, len(base.layers) * LAYER_TARGETS)
    return dataclasses.replace(base, layers=tuple(layers), head=head)


def head_weights(
    base: DecoderWeights, adapters: Sequence[AdapterWeights], adapter_of_row: Sequence[int | None]
) -> LinearTarget:
    """Return the unembedding for rows of many adapters; arguments as of `decode_weights`."""
    likes = _likes(base, adapters, adapter_of_row)
    return _mixed(base.head, len(base.layers) * LAYER_TARGETS, adapters, likes)


class _Likes:
    """Adapters of a batch that have one shape, and the rows that use them.

    Args:
        members: Which of the batch's adapters they are.
        adapters: All of them.
        adapter_of_row: Which one each row uses.
        like: A tensor of the batch's device.
        split: How long sums are cut.
    """

    def __init__(
        self,
        members: Sequence[int],
        adapters: Sequence[AdapterWeights],
        adapter_of_row: Sequence[int | None],
        like: Tensor,
        split: KSplit,
    ) -> None:
        self.members = members
        self._adapters, self._adapter_of_row, self._like = adapters, adapter_of_row, like
        self._split = split

    @functools.cached_property
    def tiles(self) -> AdapterTiles:
        """The tiles that the rows take."""
        targets = self._adapters[self.members[0]].targets
        num_rows = max(
            (_tile_rows(one, self._split) for one in targets if isinstance(one, LoraTarget)),
            default=_LORA_TILE,
        )
        return _tiles(self.members, self._adapter_of_row, num_rows, self._like)

    @functools.cached_property
    def segments(self) -> AdapterSegments:
        """Neighbouring rows of one adapter, which is given by its place among the members."""
        places = {adapter: place for place, adapter in enumerate(self.members)}
        scales = [_scale(self._adapters[adapter]) for adapter in self.members]
        of_row = [places.get(-1 if one is None else one) for one in self._adapter_of_row]
        return AdapterSegments.of(of_row, scales)


def _likes(
    base: DecoderWeights, adapters: Sequence[AdapterWeights], adapter_of_row: Sequence[int | None]
) -> list[_Likes]:
    shapes: dict[tuple[object, ...], list[int]] = {}
    for index, adapter in enumerate(adapters):
        shapes.setdefault(_shape(adapter), []).append(index)
    return [
        _Likes(members, adapters, adapter_of_row, base.embedding, base.head.split)
        for members in shapes.values()
    ]


def _mixed(
    plain: LinearTarget,
    index: int,
    adapters: Sequence[AdapterWeights],
    likes: Sequence[_Likes],
) -> DecodeTarget:
    in_place: list[AdapterProducts] = []
    mixes: list[TargetMix] = []
    for like in likes:
        if adapters[like.members[0]].targets[index] is None:
            continue
        targets = [_given(adapters[member].linear(index)) for member in like.members]
        if _is_read_in_place(targets[0], plain.split):
            in_place.append(_in_place(targets, like.segments, plain.split))
        else:
            mixes.append(_mix(like.tiles, [adapter.linear(index) for adapter in adapters]))
    return dataclasses.replace(_plain(plain), in_place=tuple(in_place), mixes=tuple(mixes))


def _is_read_in_place(target: LoraTarget, split: KSplit) -> bool:
    like = target.a
    if split.small is None or like.dtype != torch.float32 or like.device.type != "cpu":
        return False
    return _has_the_trainers_bits(_sizes(target), split)


@functools.cache
def _has_the_trainers_bits(shape: AdapterShape, split: KSplit) -> bool:
    """Whether adapters of these sizes give the bits of the trainer's products here."""
    if not shape.is_taken:
        return False
    generator = torch.Generator().manual_seed(1)
    rank = shape.rank - shape.rank_filling

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    num_parts, num_outputs = len(shape.num_outputs), sum(shape.num_outputs)
    target = LoraTarget(
        a=random(1, num_parts * rank, shape.num_inputs) * shape.num_inputs**-0.5,
        b=tuple(random(1, width, rank) for width in shape.num_outputs),
        a_grad=None,
        b_grad=(),
        scale=_COMPARED_SCALE,
    )
    # As many rows as need each of the kernels once.
    count = sum(KERNEL_ROWS)
    num_rows = padded_rows(count, split.row_tile)
    x, wanted = random(num_rows, shape.num_inputs), random(num_rows, num_outputs)
    found = wanted[:count].clone()
    target.add_forward_(wanted, x, split)
    segments = AdapterSegments.of([0] * count, [target.scale])
    _in_place([target], segments, split).add_(found, x[:count])
    return torch.equal(found, wanted[:count])


def _tile_rows(target: LoraTarget, split: KSplit) -> int:
    """Return the rows of a tile of such adapters that gives the trainer's bits."""
    rank = target.b[0].shape[-1]
    if rank % _RANK_STEP and (target.a.device.type == "cpu" or rank < _RANK_STEP):
        return SEGMENT_ROWS
    if _is_read_in_place(target, split):
        return _LORA_TILE
    return fewest_adapter_rows(split, target.a, target.b)


def _in_place(
    targets: Sequence[LoraTarget], segments: AdapterSegments, split: KSplit
) -> AdapterProducts:
    if split.small is None:
        raise AssertionError("adapters are read in place where few rows have a kernel")
    shape = _sizes(targets[0])
    return AdapterProducts(
        shape,
        [_factors(target, shape.rank_filling) for target in targets],
        segments,
        split.batched_stops(shape.num_inputs),
        split.small.library_block,
    )


def _sizes(target: LoraTarget) -> AdapterShape:
    rank = target.b[0].shape[-1]
    return AdapterShape(
        num_inputs=target.a.shape[-1],
        num_outputs=tuple(b.shape[-2] for b in target.b),
        rank=padded_rows(rank, LANES),
        rank_filling=-rank % LANES,
    )


def _factors(target: LoraTarget, filling: int) -> tuple[Tensor, list[Tensor]]:
    """Return A and each part's B of a run; copies with zeros behind a rank that fills no tile."""
    a, parts = target.a[0], [b[0] for b in target.b]
    if not filling:
        return a, parts
    by_part = a.unflatten(0, (len(parts), -1))  # type: ignore[no-untyped-call]
    return F.pad(by_part, (0, 0, 0, filling)).flatten(0, 1), [
        F.pad(part, (0, filling)) for part in parts
    ]


def _scale(adapter: AdapterWeights) -> float:
    return next((target.scale for target in adapter.targets if isinstance(target, LoraTarget)), 1.0)


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
    members: Sequence[int], adapter_of_row: Sequence[int | None], num_rows: int, like: Tensor
) -> AdapterTiles:
    adapters: list[int] = []
    sources: list[int] = []
    places = [0] * len(adapter_of_row)
    for adapter in members:
        used_by = [row for row, used in enumerate(adapter_of_row) if used == adapter]
        for start in range(0, len(used_by), num_rows):
            part = used_by[start : start + num_rows]
            for place, row in enumerate(part, start=len(sources)):
                places[row] = place
            sources.extend(part + [part[0]] * (num_rows - len(part)))
            adapters.append(adapter)
    if len(adapters) == 1:
        # A lone product is shared out between the threads in another way than those of a batch.
        adapters *= 2
        sources *= 2
    is_used = torch.tensor([[used in members] for used in adapter_of_row])
    return AdapterTiles(
        adapters=tuple(adapters),
        num_rows=num_rows,
        sources=torch.tensor(sources, device=like.device),
        places=torch.tensor(places, device=like.device),
        is_used=None if bool(is_used.all()) else is_used.to(like.device),
    )


def _mix(tiles: AdapterTiles, targets: Sequence[LoraTarget | None]) -> TargetMix:
    used = [_given(targets[adapter]).run(0) for adapter in tiles.adapters]
    scales = torch.tensor([lora.scale for lora in used], dtype=torch.float32)
    return TargetMix(
        tiles=tiles,
        a=torch.cat([lora.a for lora in used]).transpose(1, 2),
        b=tuple(
            torch.cat([lora.b[part] for lora in used]).transpose(1, 2)
            for part in range(len(used[0].b))
        ),
        scales=scales.view(-1, 1, 1).to(used[0].a.device),
    )


def _given(target: LoraTarget | None) -> LoraTarget:
    if target is None:
        raise AssertionError("adapters of one shape adapt the same units")
    return target
