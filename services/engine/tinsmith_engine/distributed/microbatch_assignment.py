"""Which rank computes which piece of a batch, and in which order gradients are added.

The pieces of an operation are dealt to *lanes*, as many as there are ranks: piece 0 to lane 0,
piece 1 to lane 1, and so on in turns. A lane is computed by one rank, which adds its pieces in
order in its own copy of the run's gradient row. Lane 0 continues what the run accumulated before,
the others start fresh. At the end the gradient is lane 0 + lane 1 + ..., added in this order.

So which numbers are added, and in which order, follows from the operation and the number of ranks
alone. The number of ranks is part of the numerics fingerprint. Which *rank* has which lane is free,
since equal ranks give equal bits, and is chosen so that all have the same amount of work: a
neighbour may move a lane to another rank and yet changes no bit. An operation of one piece has one
lane, and so the bits that it has on one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith_engine.distributed.process_group import Ranks


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of one operation."""

    first_rank: int
    """Which rank has lane 0; the ranks after it have the lanes after it."""
    num_lanes: int
    """At most the number of ranks; less if there are fewer pieces."""
    num_ranks: int

    def rank_of(self, lane: int) -> int:
        """Return which rank computes a lane."""
        return (self.first_rank + lane) % self.num_ranks

    @property
    def owners(self) -> list[int]:
        """The ranks of all lanes, in order."""
        return [self.rank_of(lane) for lane in range(self.num_lanes)]


@dataclass(slots=True)
class Loads:
    """Rows given to each rank so far."""

    num_ranks: int
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.rows = [0] * self.num_ranks

    def place_lanes(self, piece_rows: Sequence[int]) -> Lanes:
        """Deal the pieces of an operation so that the busiest rank has as little as possible."""
        of_lane = [sum(piece_rows[lane :: self.num_ranks]) for lane in range(self.num_ranks)]
        first_rank = min(range(self.num_ranks), key=lambda first: self._busiest(first, of_lane))
        lanes = Lanes(first_rank, min(len(piece_rows), self.num_ranks), self.num_ranks)
        for lane, num_rows in enumerate(of_lane):
            self.rows[lanes.rank_of(lane)] += num_rows
        return lanes

    def place_one(self, num_rows: int) -> int:
        """Return the rank for a piece without a gradient, which needs no order."""
        rank = self.rows.index(min(self.rows))
        self.rows[rank] += num_rows
        return rank

    def _busiest(self, first_rank: int, of_lane: Sequence[int]) -> int:
        return max(
            self.rows[(first_rank + lane) % self.num_ranks] + num_rows
            for lane, num_rows in enumerate(of_lane)
        )


def share_rows(ranks: Ranks, rows: Sequence[tuple[Tensor, int]]) -> None:
    """Overwrite rows [P], given with the rank that has them, by that rank's numbers."""
    for owner in range(ranks.world_size):
        owned = [row_P for row_P, rank in rows if rank == owner]
        if len(owned) == 1:
            ranks.share(owned[0], owner)
        elif owned:
            together = torch.cat(owned)
            ranks.share(together, owner)
            if ranks.rank != owner:
                for row_P, found_P in zip(
                    owned, torch.split(together, [len(row_P) for row_P in owned]), strict=True
                ):
                    row_P.copy_(found_P)


def sum_lanes_(ranks: Ranks, row_P: Tensor, owners: Sequence[int]) -> None:
    """Overwrite a gradient row on all ranks by the sum of its lanes, in their order.

    Each rank adds one part of the row for everybody, so a rank sends and receives twice the row
    however many ranks there are.
    """
    part = -(-len(row_P) // ranks.world_size)
    padded = row_P.new_zeros(ranks.world_size, part)
    padded.view(-1)[: len(row_P)] = row_P
    found = ranks.exchange(padded)
    total = found[owners[0]].clone()
    for owner in owners[1:]:
        total += found[owner]
    ranks.gather(padded.view(-1), total).wait()
    row_P.copy_(padded.view(-1)[: len(row_P)])
