"""Which pieces of which runs share a pass, and which of them share a stack.

A *piece* is the part of one operation's batch that one pass takes: its split depends on the batch
alone (`packing.split_batch`). Pieces of one run are computed in order, at most one in a backward
pass, so that a gradient is always summed in the same order. Everything here is planning: it changes
how fast a pass is, never what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from tinsmith_engine.arena.rows import Arena


@dataclass(frozen=True, slots=True)
class Wearer:
    """What decides whether the segments of two runs can be computed as one stack."""

    arena: Arena
    row_index: int
    scale: float
    accumulates: bool
    num_rows: int
    """Rows of the segment."""

    @property
    def shape(self) -> tuple[int, float, bool, int]:
        """Equal for segments that stack if their rows in the arena lie well."""
        return id(self.arena), self.scale, self.accumulates, self.num_rows


ItemT = TypeVar("ItemT")


def fill_passes(items: Iterable[tuple[ItemT, int]], max_rows: int) -> list[list[ItemT]]:
    """Part items, given with their rows, into passes of at most `max_rows`, in order.

    An item with more rows is a pass of its own.
    """
    passes: list[list[ItemT]] = []
    num_rows = 0
    for item, item_rows in items:
        if not passes or num_rows + item_rows > max_rows:
            passes.append([])
            num_rows = 0
        passes[-1].append(item)
        num_rows += item_rows
    return passes


def stack_wearers(wearers: Sequence[Wearer | None], *, stacks_runs: bool) -> list[list[int]]:
    """Order segments so that those which stack are neighbours.

    Args:
        wearers: What each segment wears; None for the base model's weights alone.
        stacks_runs: Whether the model computes stacks; if not, each segment is alone.

    Returns:
        Indices of the segments, by stack; a segment that wears nothing is alone.
    """
    if not stacks_runs:
        return [[index] for index in range(len(wearers))]
    plain = [[index] for index, wearer in enumerate(wearers) if wearer is None]
    worn = sorted(
        ((wearer, index) for index, wearer in enumerate(wearers) if wearer is not None),
        key=lambda one: (one[0].shape, one[0].row_index),
    )
    stacks: list[list[int]] = []
    for _, group in groupby(worn, key=lambda one: one[0].shape):
        # A run may have several segments in a forward pass; a stack has one of each run.
        layers: list[dict[int, int]] = []
        for wearer, index in group:
            layer = next((one for one in layers if wearer.row_index not in one), None)
            if layer is None:
                layer = {}
                layers.append(layer)
            layer[wearer.row_index] = index
            arena = wearer.arena
        for layer in layers:
            stacks += [[layer[row] for row in rows] for rows in arena.uniform_runs(list(layer))]
    return plain + stacks
