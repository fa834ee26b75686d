"""Which microbatches of which runs share a pass, and which of them share an adapter group.

A *microbatch* is the part of one operation's batch that one pass takes: its split depends on the
batch alone (`packing.split_batch`). Microbatches of one run are computed in order, at most one
in a backward pass. A gradient is thus always summed in the same order. Everything here is
planning:
it changes how fast a pass is, never what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from tinsmith_engine.arena.slots import Arena


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """What decides whether the segments of two runs can be computed as one adapter group."""

    arena: Arena
    slot_index: int
    scale: float
    accumulates: bool
    num_rows: int
    """Rows of the segment."""

    @property
    def shape(self) -> tuple[int, float, bool, int]:
        """Equal for segments that group if their rows in the arena lie well."""
        return id(self.arena), self.scale, self.accumulates, self.num_rows


ItemT = TypeVar("ItemT")


def fill_passes(items: Iterable[tuple[ItemT, int]], max_tokens: int) -> list[list[ItemT]]:
    """Part items, given with their rows, into passes of at most `max_tokens`, in order.

    An item with more rows is a pass of its own.
    """
    passes: list[list[ItemT]] = []
    num_rows = 0
    for item, item_rows in items:
        if not passes or num_rows + item_rows > max_tokens:
            passes.append([])
            num_rows = 0
        passes[-1].append(item)
        num_rows += item_rows
    return passes


def group_adapters(uses: Sequence[AdapterUse | None], *, groups_adapters: bool) -> list[list[int]]:
    """Order segments so that members of a group are neighbours.

    Args:
        uses: What each segment uses; None for the base model's weights alone.
        groups_adapters: Whether the model computes adapter groups; if not, each segment is alone.

    Returns:
        Indices of the segments, by adapter group; a segment that uses nothing is alone.
    """
    if not groups_adapters:
        return [[index] for index in range(len(uses))]
    plain = [[index] for index, use in enumerate(uses) if use is None]
    used = sorted(
        ((use, index) for index, use in enumerate(uses) if use is not None),
        key=lambda one: (one[0].shape, one[0].slot_index),
    )
    groups: list[list[int]] = []
    for _, group in groupby(used, key=lambda one: one[0].shape):
        # A run may have several segments in a forward pass; an adapter group has one of each run.
        layers: list[dict[int, int]] = []
        for use, index in group:
            layer = next((one for one in layers if use.slot_index not in one), None)
            if layer is None:
                layer = {}
                layers.append(layer)
            layer[use.slot_index] = index
            arena = use.arena
        for layer in layers:
            groups += [[layer[slot] for slot in rows] for rows in arena.uniform_runs(list(layer))]
    return plain + groups
