"""Which rank computes which microbatch of a batch, and in which order gradients are added.

The microbatches of an operation are dealt to *partial sums*, as many as there are ranks: microbatch
0 to partial sum 0, microbatch 1 to partial sum 1, and so on in turns. A partial sum is computed by
one rank, which adds its microbatches in order in its own copy of the run's gradient row. partial
sum 0 continues what the run accumulated before, the others start fresh. At the end the gradient is
partial sum 0 + partial sum 1 + ..., added in this order.

So which numbers are added, and in which order, follows from the operation and the number of ranks
alone. The number of ranks is part of the numerics fingerprint. Which *rank* has which partial
sum is free, since equal ranks give equal bits. It is chosen so that all ranks have the same
amount of work:
a neighbour may move a partial sum to another rank and yet changes no bit. An operation of one
microbatch has one partial sum, and so the bits that it has on one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinsmith_engine.distributed.process_group import Ranks


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The partial sums of one operation."""

    first_rank: int
    """Which rank has partial sum 0; the ranks after it have the partial sums after it."""
    num_partials: int
    """At most the number of ranks; less if there are fewer microbatches."""
    num_ranks: int

    def rank_of(self, partial: int) -> int:
        """Return which rank computes a partial sum."""
        return (self.first_rank + partial) % self.num_ranks

    @property
    def owners(self) -> list[int]:
        """The ranks of all partial sums, in order."""
        return [self.rank_of(partial) for partial in range(self.num_partials)]


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

    def assign(self, microbatch_rows: Sequence[int]) -> RankAssignment:
        """Deal the microbatches of an operation: the busiest rank gets as little as possible."""
        of_partial = [
            sum(microbatch_rows[partial :: self.num_ranks]) for partial in range(self.num_ranks)
        ]
        first_rank = min(range(self.num_ranks), key=lambda first: self._busiest(first, of_partial))
        assignment = RankAssignment(
            first_rank, min(len(microbatch_rows), self.num_ranks), self.num_ranks
        )
        for partial, num_rows in enumerate(of_partial):
            self.rows[assignment.rank_of(partial)] += num_rows
        return assignment

    def place_one(self, num_rows: int) -> int:
        """Return the rank for a microbatch without a gradient, which needs no order."""
        rank = self.rows.index(min(self.rows))
        self.rows[rank] += num_rows
        return rank

    def _busiest(self, first_rank: int, of_partial: Sequence[int]) -> int:
        return max(
            self.rows[(first_rank + partial) % self.num_ranks] + num_rows
            for partial, num_rows in enumerate(of_partial)
        )


def share_rows(ranks: Ranks, rows: Sequence[tuple[Tensor, int]]) -> None:
    """Overwrite rows [P], given with the rank that has them, by that rank's numbers."""
    for owner in range(ranks.world_size):
        owned = [flat_P for flat_P, rank in rows if rank == owner]
        if len(owned) == 1:
            ranks.share(owned[0], owner)
        elif owned:
            together = torch.cat(owned)
            ranks.share(together, owner)
            if ranks.rank != owner:
                for flat_P, found_P in zip(
                    owned, torch.split(together, [len(flat_P) for flat_P in owned]), strict=True
                ):
                    flat_P.copy_(found_P)


def sum_partials_(ranks: Ranks, flat_P: Tensor, owners: Sequence[int]) -> None:
    """Overwrite a gradient row on all ranks by the sum of its partial sums, in their order.

    Each rank adds one part of the gradient for all ranks. A rank thus sends and receives twice
    the gradient, however many ranks there are.
    """
    part = -(-len(flat_P) // ranks.world_size)
    padded = flat_P.new_zeros(ranks.world_size, part)
    padded.view(-1)[: len(flat_P)] = flat_P
    found = ranks.exchange(padded)
    total = found[owners[0]].clone()
    for owner in owners[1:]:
        total += found[owner]
    ranks.gather(padded.view(-1), total).wait()
    flat_P.copy_(padded.view(-1)[: len(flat_P)])
