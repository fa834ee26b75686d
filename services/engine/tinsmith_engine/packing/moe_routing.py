"""Which expert computes which token, and where its rows lie.

A token goes to K experts, which makes K *pairs* of token and expert. The pairs of a pass are laid
out as rows of their own, sorted by expert; the block of an expert is filled up to what frozen
products need. Adapters see *groups* within a block: the pairs of one run (or one tile of them, when
decoding) and one expert. Rows of a group, and the number of rows that it is padded to, depend on
the run's own tokens alone. A run's bits do not depend on what else is in the pass.

All of this is planned on the CPU, once for each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_engine.base.types import IntArray
from tinsmith_engine.products.split_products import padded_rows

_ROW_STEP = 16


def group_length(num_rows: int, shortest: int) -> int:
    """Return the rows that a group is padded to: a function of the group alone.

    Args:
        num_rows: Of the group, at least 1.
        shortest: Fewest rows of a group, a divisor of 16.
    """
    if num_rows <= _ROW_STEP:
        return padded_rows(num_rows, shortest)
    step = max(_ROW_STEP, 1 << (num_rows.bit_length() - 3))
    return padded_rows(num_rows, step)


class Routes(NamedTuple):
    """What a layer's router chose."""

    num_experts: int
    experts_TK: IntArray
    """Of each token, in the order of the pass."""

    def seen(self, tokens: slice) -> NDArray[np.bool_]:
        """Return which experts some tokens went to, bool [E]."""
        return np.bincount(self.experts_TK[tokens].ravel(), minlength=self.num_experts) > 0


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where the pairs of a pass lie: T tokens of its N rows, K experts each, M rows of pairs."""

    num_tokens: int
    tokens_T: Tensor
    """The rows of the pass that are routed, ascending, int64; the last ones repeat the first to
    make a multiple of 16."""
    experts_TK: IntArray
    """Of the tokens, without those that repeat."""
    places_TK: Tensor
    """Row of each pair, int64; as long as `tokens_T`."""
    sources_M: Tensor
    """Row of the pass that each row of pairs comes from, int64; filling repeats the first token."""
    filling: Tensor
    """Rows of pairs that are filling, int64."""
    blocks: tuple[tuple[int, slice], ...]
    """Each expert that has tokens, and its rows, filling included."""
    _places: IntArray
    """As `places_TK`, flat, on the CPU, without those that repeat."""

    @classmethod
    def of(cls, experts_NK: Tensor, tokens_T: IntArray, num_experts: int, quantum: int) -> Dispatch:
        """Lay out the pairs of some rows.

        Args:
            experts_NK: The experts of each row of the pass.
            tokens_T: The rows that are routed, ascending; at least one.
            num_experts: How many there are.
            quantum: Each expert's block is filled up to a multiple of this.
        """
        device = experts_NK.device
        experts_TK: IntArray = experts_NK.cpu().numpy()[tokens_T]
        flat = experts_TK.reshape(-1)
        order = np.argsort(flat, kind="stable")
        counts = np.bincount(flat, minlength=num_experts)
        sizes = -(-counts // quantum) * quantum
        starts = np.cumsum(sizes) - sizes
        within = np.arange(flat.size) - np.repeat(np.cumsum(counts) - counts, counts)
        places = np.empty(flat.size, dtype=np.int64)
        places[order] = starts[flat[order]] + within
        num_rows = int(sizes.sum())
        sources = np.full(num_rows, tokens_T[0], dtype=np.int64)
        sources[places] = np.repeat(tokens_T, flat.size // len(tokens_T))
        is_filling = np.ones(num_rows, dtype=bool)
        is_filling[places] = False
        # Rows in multiples of 16, as everywhere: kernels treat what is left over differently.
        repeats = np.zeros(padded_rows(len(tokens_T), _ROW_STEP), dtype=np.int64)
        repeats[: len(tokens_T)] = np.arange(len(tokens_T))
        places_TK = places.reshape(experts_TK.shape)
        return cls(
            num_tokens=len(tokens_T),
            tokens_T=torch.from_numpy(tokens_T[repeats]).to(device),
            experts_TK=experts_TK,
            places_TK=torch.from_numpy(places_TK[repeats]).to(device),
            sources_M=torch.from_numpy(sources).to(device),
            filling=torch.from_numpy(np.flatnonzero(is_filling)).to(device),
            blocks=tuple(
                (int(expert), slice(int(starts[expert]), int(starts[expert] + sizes[expert])))
                for expert in np.flatnonzero(counts)
            ),
            _places=places,
        )

    def spread(self, x: Tensor) -> Tensor:
        """Return the rows of pairs [M, ...] of rows of the pass [N, ...]."""
        return x.index_select(0, self.sources_M)

    def spread_gradient(self, dy: Tensor) -> Tensor:
        """Return the rows of pairs, with zeros for filling: nothing flows out of it."""
        return self.spread(dy).index_fill_(0, self.filling, 0.0)

    def of_pairs(self, weights_NK: Tensor) -> Tensor:
        """Return [M] the numbers of pairs that rows of the pass have as [N, K]; filling has 0."""
        out = weights_NK.new_zeros(len(self.sources_M))
        places = self.places_TK[: self.num_tokens]
        out[places] = weights_NK.index_select(0, self.tokens_T[: self.num_tokens])
        return out

    def by_token(self, numbers_M: Tensor, num_rows: int) -> Tensor:
        """Return [N, K] the numbers [M] of pairs; rows that are not routed get zeros."""
        return self.put(numbers_M[self.places_TK], num_rows)

    def gathered(self, rows: Tensor, num_rows: int) -> Tensor:
        """Return for each row of the pass the sum over its pairs, [N, H] of [M, H].

        Rows that are not routed get zeros. Sums are taken in float32, in the order of the choices.
        """
        total = rows.index_select(0, self.places_TK[:, 0]).float()
        for choice in range(1, self.places_TK.shape[1]):
            total += rows.index_select(0, self.places_TK[:, choice])
        return self.put(total.to(rows.dtype), num_rows)

    def put(self, values: Tensor, num_rows: int) -> Tensor:
        """Return values of the tokens [T, ...] as rows of the pass [N, ...], zeros elsewhere."""
        if self.num_tokens == num_rows:
            return values
        out = values.new_zeros(num_rows, *values.shape[1:])
        out.index_copy_(0, self.tokens_T[: self.num_tokens], values[: self.num_tokens])
        return out

    def groups(
        self,
        tokens: slice,
        num_runs: int,
        num_experts: int,
        *,
        shortest: int,
        are_tiled: bool = False,
    ) -> tuple[GroupBatch, ...]:
        """Return the groups of the rows that an adapter group has in the pass, by padded length.

        Args:
            tokens: Rows of the pass; each run has as many.
            num_runs: How many runs share them.
            num_experts: How many there are.
            shortest: Fewest rows of a group.
            are_tiled: Whether groups are taken apart into groups of so many rows.
        """
        routed = self.tokens_T[: self.num_tokens].cpu().numpy()
        first, last = np.searchsorted(routed, (tokens.start, tokens.stop))
        num_chosen = self.experts_TK.shape[1]
        rows_of_run = (tokens.stop - tokens.start) // num_runs
        run = (routed[first:last] - tokens.start) // rows_of_run
        keys = (run[:, None] * num_experts + self.experts_TK[first:last]).reshape(-1)
        members = self._places[first * num_chosen : last * num_chosen][
            np.argsort(keys, kind="stable")
        ]
        counts = np.bincount(keys, minlength=num_runs * num_experts)
        owners = np.flatnonzero(counts)
        sizes = counts[owners]
        groups = _Groups(
            runs=owners // num_experts,
            experts=owners % num_experts,
            firsts=np.cumsum(sizes) - sizes,
            sizes=sizes,
            device=self.tokens_T.device,
        )
        if are_tiled:
            groups = groups.tiled(shortest)
        lengths = np.array([group_length(size, shortest) for size in groups.sizes.tolist()])
        return tuple(
            GroupBatch.of(members, groups, np.flatnonzero(lengths == length), int(length))
            for length in np.unique(lengths)
        )


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """G groups of one padded length L."""

    runs: Tensor
    """Of each group, int64 [G]."""
    experts: Tensor
    """Of each group, int64 [G]."""
    length: int
    sources: Tensor
    """Row of pairs that fills each place of the batch, int64 [G * L]; padding repeats the group's
    own last row."""
    places: Tensor
    """Places whose rows are written, int64: each row once."""
    padding: Tensor
    """Places that are padding, int64."""

    @classmethod
    def of(
        cls, members: IntArray, groups: _Groups, chosen: NDArray[np.int64], length: int
    ) -> GroupBatch:
        """Batch some of the groups."""
        # A batch of one goes another way through the library, and in bfloat16 may be rounded
        # differently. The second copy finds the same gradient, which is put where the first's is.
        chosen = np.repeat(chosen, 2) if len(chosen) == 1 else chosen
        sizes = groups.sizes[chosen][:, None]
        within = np.arange(length)[None]
        index = groups.firsts[chosen][:, None] + np.minimum(within, sizes - 1)
        is_real = (within < sizes).reshape(-1)
        is_first = np.repeat(np.append(True, np.diff(chosen) > 0), length)
        fields = (
            groups.runs[chosen],
            groups.experts[chosen],
            members[index.reshape(-1)],
            np.flatnonzero(is_real & is_first),
            np.flatnonzero(~is_real),
        )
        runs, experts, sources, places, padding = (
            torch.from_numpy(field).to(groups.device) for field in fields
        )
        return cls(runs, experts, length, sources, places, padding)

    def spread(self, rows_M: Tensor) -> Tensor:
        """Return the groups' rows [G, L, ...] of rows of pairs [M, ...]."""
        found = rows_M.index_select(0, self.sources)
        return found.view(-1, self.length, *rows_M.shape[1:])

    def spread_gradient(self, rows_M: Tensor) -> Tensor:
        """Return the groups' rows, with zeros for padding: nothing flows out of it."""
        found = rows_M.index_select(0, self.sources)
        if len(self.padding):
            found.index_fill_(0, self.padding, 0.0)
        return found.view(-1, self.length, *rows_M.shape[1:])

    def add_to_(self, rows_M: Tensor, values: Tensor) -> None:
        """Add values [G, L, ...] to rows of pairs [M, ...], each once."""
        values = values.flatten(0, 1)
        rows = self.sources
        if len(self.places) < len(rows):
            rows, values = rows.index_select(0, self.places), values.index_select(0, self.places)
        rows_M.index_add_(0, rows, values)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups as stretches of a list of rows."""

    runs: NDArray[np.int64]
    experts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    device: torch.device

    def tiled(self, tile: int) -> _Groups:
        """Return groups of at most `tile` rows."""
        num_tiles = -(-self.sizes // tile)
        source = np.repeat(np.arange(len(num_tiles)), num_tiles)
        start = tile * (np.arange(len(source)) - (np.cumsum(num_tiles) - num_tiles)[source])
        return _Groups(
            runs=self.runs[source],
            experts=self.experts[source],
            firsts=self.firsts[source] + start,
            sizes=np.minimum(self.sizes[source] - start, tile),
            device=self.device,
        )
