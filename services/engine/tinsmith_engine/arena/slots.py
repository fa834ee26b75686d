"""Slot layouts and the arena: where every trained number of every run lives.

A run is one slot of `P` float32 numbers, four times: `theta`, `grad`, `m`, `v`. The layout says
which stretch of the slot is which named tensor, so the A and B of a layer are views. Zero, clip,
Adam, copy and snapshot are single operations on a slot. Runs with equal layouts (same rank
and same trained layers) share an arena; another rank has another `P` and an arena of its own. We
chose exact `P` over padding ranks up to buckets: nothing is computed or stored for slots that can
never train, and a state means the same whatever else is loaded.

Tensors that are read together (q, k and v; gate and up) lie next to each other, which makes their
fused matrix a view as well. The base model's own weights use the same scheme, as does a
full-parameter run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# A pass stacks the slots of a chunk without copying them, so a chunk holds many. Memory that no run
# has touched is not resident.
_CHUNK_BYTES = 256 << 20
_MAX_CHUNK_SLOTS = 64
# Slot stride in numbers: every slot starts on a cache line, and vector kernels leave no remainder.
_SLOT_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """One named tensor of a slot."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_numbers(self) -> int:
        """How many numbers of the slot the tensor takes."""
        return math.prod(self.shape)


class ParameterLayout:
    """Order, shape and place of the named tensors of a slot of `width` numbers."""

    def __init__(self, tensors: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        self.entries: dict[str, Entry] = {}
        offset = 0
        for name, shape in tensors:
            entry = Entry(name, shape, offset)
            self.entries[name] = entry
            offset += entry.num_numbers
        self.num_numbers = offset
        self.width = -(-offset // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def view(self, slots: Tensor, name: str) -> Tensor:
        """Return one tensor of a slot [P], or of each of several slots [R, P], as a view."""
        entry = self.entries[name]
        numbers = slots[..., entry.offset : entry.offset + entry.num_numbers]
        return numbers.view(*slots.shape[:-1], *entry.shape)

    def fused(self, slots: Tensor, names: Sequence[str]) -> Tensor:
        """Return neighbouring tensors as one, stacked along their first axis, as a view.

        `slots` is one slot [P], or several [R, P], whose axis comes first in the result.
        """
        entries = [self.entries[name] for name in names]
        for left, right in itertools.pairwise(entries):
            if left.offset + left.num_numbers != right.offset:
                raise ValueError(f"{left.name} and {right.name} are not neighbours")
        first = entries[0]
        length = sum(entry.shape[0] for entry in entries)
        numbers = sum(entry.num_numbers for entry in entries)
        stretch = slots[..., first.offset : first.offset + numbers]
        return stretch.view(*slots.shape[:-1], length, *first.shape[1:])

    def views(self, flat_P: Tensor) -> dict[str, Tensor]:
        """Return every tensor of a slot by name, as views."""
        return {name: self.view(flat_P, name) for name in self.entries}


@dataclass(slots=True)
class Slot:
    """The numbers of one run: float32 [P] views into an arena."""

    index: int
    theta_P: Tensor
    grad_P: Tensor
    m_P: Tensor
    v_P: Tensor


@dataclass(slots=True)
class Arena:
    """Slots of one layout, allocated in chunks and reused; zeroed when handed out."""

    layout: ParameterLayout
    device: torch.device
    _chunks: list[Tensor] = field(default_factory=list)
    _free: list[int] = field(default_factory=list)

    @property
    def _chunk_slots(self) -> int:
        return max(1, min(_MAX_CHUNK_SLOTS, _CHUNK_BYTES // (16 * max(1, self.layout.width))))

    def take(self) -> Slot:
        """Return a zeroed slot, growing the arena by a chunk if none is free."""
        if not self._free:
            first = len(self._chunks) * self._chunk_slots
            # Axes: theta/grad/m/v, slots, P.
            self._chunks.append(
                torch.empty(4, self._chunk_slots, self.layout.width, device=self.device)
            )
            self._free.extend(range(first, first + self._chunk_slots))
        # The lowest free index: the place of a run then depends on creations and drops alone.
        index = min(self._free)
        self._free.remove(index)
        chunk, place = divmod(index, self._chunk_slots)
        theta_P, grad_P, m_P, v_P = self._chunks[chunk][:, place]
        for numbers_P in (theta_P, grad_P, m_P, v_P):
            numbers_P.zero_()
        return Slot(index, theta_P, grad_P, m_P, v_P)

    def slot_views(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return theta and grad [R, P] of slots, as views.

        Args:
            indices: Slots that `uniform_runs` put together.
        """
        chunk, first = divmod(indices[0], self._chunk_slots)
        step = indices[1] - indices[0] if len(indices) > 1 else 1
        places = slice(first, first + (len(indices) - 1) * step + 1, step)
        theta_RP, grad_RP = self._chunks[chunk][:2, places]
        return theta_RP, grad_RP

    def uniform_runs(self, indices: Sequence[int]) -> list[list[int]]:
        """Part ascending slot indices so that each part can be stacked: one chunk, one stride."""
        parts: list[list[int]] = []
        for index in indices:
            part = parts[-1] if parts else []
            fits = (
                part
                and part[0] // self._chunk_slots == index // self._chunk_slots
                and (len(part) == 1 or index - part[-1] == part[1] - part[0])
            )
            if fits:
                part.append(index)
            else:
                parts.append([index])
        return parts

    def give_back(self, slot: Slot) -> None:
        """Make a slot available to the next run."""
        self._free.append(slot.index)
