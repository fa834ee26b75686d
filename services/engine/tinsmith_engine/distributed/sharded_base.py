"""A frozen base model of which each rank keeps a part.

The row of weights (`decoder_config.full_layout`) is cut into *blocks*: the embedding, each layer,
and the unembedding where it is not the embedding. A rank keeps its share of every block. Before a
block is read, the shares of all ranks are gathered into a buffer that is used again and again: two
for layers, so that the next one can be on its way while one is read, and one for embedding and
unembedding. A rank thus holds 1/W of the model, two layers, and the embedding.

Nothing is ever sent back: frozen weights have no gradient.

Gatherings are collective, so all ranks must make the same ones in the same order. The order is that
of a pass, and known before it begins; `begin` and `finish` frame it. What a failed pass did not
read, `finish` gathers nevertheless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.distributed.process_group import Pending, Ranks
from tinsmith_engine.files.hub_files import read_parameters
from tinsmith_engine.model.decoder_config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
# A share is a multiple of this many numbers, so that every block begins on a cache line.
_ALIGNMENT = 64
_WIDE_SLOT, _NUM_LAYER_SLOTS = 0, 2


@dataclass(frozen=True, slots=True)
class Block:
    """Tensors that are gathered together."""

    layout: ParameterLayout
    share: Tensor
    """This rank's numbers."""
    slot: int
    """Which buffer the block is gathered into."""


class ShardedBase:
    """This rank's shares of all blocks, and the buffers.

    Args:
        config: Shapes of the model.
        layout: Of the whole row.
        directory: Weights of the model.
        dtype: Of the passes.
        ranks: All ranks.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layout: ParameterLayout,
        directory: Path,
        dtype: torch.dtype,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self.dtype = dtype
        self.num_layers = config.num_layers
        names = [[EMBEDDING]]
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}."
            names.append([name for name in layout.entries if name.startswith(prefix)])
        if not config.is_tied:
            names.append([HEAD])
        self.blocks = [
            self._load(names_of_block, layout, directory, _slot(index, config.num_layers))
            for index, names_of_block in enumerate(names)
        ]
        norm_layout = ParameterLayout([(FINAL_NORM, layout.entries[FINAL_NORM].shape)])
        self.final_norm = norm_layout.view(
            read_parameters(directory, norm_layout, dtype, ranks.device), FINAL_NORM
        )
        self.slots = [
            torch.zeros(
                max((len(b.share) for b in self.blocks if b.slot == slot), default=0)
                * ranks.world_size,
                dtype=dtype,
                device=ranks.device,
            )
            for slot in range(1 + _NUM_LAYER_SLOTS)
        ]
        self._held: list[int | None] = [None] * len(self.slots)

    @property
    def head_block(self) -> int:
        """The block that holds the unembedding."""
        return len(self.blocks) - 1 if HEAD in self.blocks[-1].layout else 0

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank holds for the base model, buffers included."""
        held = [*self.slots, *(block.share for block in self.blocks), self.final_norm]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def begin_gather(self, index: int) -> Pending | None:
        """Begin to gather a block into its buffer; None if it is there."""
        block = self.blocks[index]
        if self._held[block.slot] == index:
            return None
        self._held[block.slot] = index
        return self._ranks.gather(self._whole(block), block.share)

    def gathered(self, index: int) -> Tensor:
        """Return the gathered weights of a block, which last until its buffer is used again."""
        block = self.blocks[index]
        if self._held[block.slot] != index:
            raise RuntimeError(f"block {index} is read without having been gathered")
        return self._whole(block)[: block.layout.width]

    def _whole(self, block: Block) -> Tensor:
        return self.slots[block.slot][: len(block.share) * self._ranks.world_size]

    def _load(
        self, names: Sequence[str], whole: ParameterLayout, directory: Path, slot: int
    ) -> Block:
        layout = ParameterLayout([(name, whole.entries[name].shape) for name in names])
        first, last = whole.entries[names[0]], whole.entries[names[-1]]
        if last.offset + last.num_numbers - first.offset != layout.num_numbers:
            raise ValueError(f"the tensors from {first.name} to {last.name} are not neighbours")
        size = -(-layout.width // (self._ranks.world_size * _ALIGNMENT)) * _ALIGNMENT
        # One block at a time is whole, on the host.
        row = read_parameters(directory, layout, self.dtype, torch.device("cpu"))
        mine = row[self._ranks.rank * size : (self._ranks.rank + 1) * size]
        share = torch.zeros(size, dtype=self.dtype, device=self._ranks.device)
        share[: len(mine)].copy_(mine)
        return Block(layout, share, slot)


class GatherStream:
    """Gathers blocks in the order of a pass, one ahead of the reader."""

    def __init__(self, base: ShardedBase) -> None:
        self._base = base
        self._order: list[int] = []
        self._position = 0
        self._pending: Pending | None = None

    def begin(self, *, needs_gradient: bool) -> None:
        """Begin a pass; the first block is on its way when this returns."""
        layers = list(range(1, self._base.num_layers + 1))
        self._order = [0, *layers, self._base.head_block]
        if needs_gradient:
            self._order += reversed(layers)
        self._position = 0
        self._pending = self._base.begin_gather(self._order[0])

    def take(self, index: int) -> Tensor:
        """Return the weights of a block; the block that was taken before may be overwritten.

        Raises:
            RuntimeError: The pass has another order.
        """
        if self._position >= len(self._order) or self._order[self._position] != index:
            raise RuntimeError(f"block {index} is read out of order")
        self._advance()
        return self._base.gathered(index)

    def finish(self) -> None:
        """Gather what the pass did not read, as the other ranks do."""
        while self._position < len(self._order):
            self._advance()

    def _advance(self) -> None:
        if self._pending is not None:
            self._pending.wait()
        self._position += 1
        following = self._order[self._position : self._position + 1]
        self._pending = self._base.begin_gather(following[0]) if following else None


def _slot(index: int, num_layers: int) -> int:
    """Return the buffer of a block: layers take turns, so that neighbours never share one."""
    is_layer = 1 <= index <= num_layers
    return 1 + index % _NUM_LAYER_SLOTS if is_layer else _WIDE_SLOT
