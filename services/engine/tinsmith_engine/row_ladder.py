"""Products with a frozen weight whose rows do not depend on their neighbours.

A matrix product may round a row differently when the number of rows changes: the library picks
another kernel, or splits the sum in another way. Then what a tenant learns would depend on who else
is in the pass. So a frozen product is issued at row counts that were found, at start and for this
model on this machine, to give the same bits for the same row wherever it lies: the *ladder*. A pass
is padded to the lowest rung and taken apart into the largest rungs that fit. Large passes thus run
at nearly the speed of one product, and small ones pay little padding.

Which rungs agree depends on library, dtype, threads and shapes. With MKL in float32 it is every
count from 16 on; in bfloat16 some shapes agree from 512 rows on only, or skip rungs between. The
ladder is part of the numerics fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_runtime.errors import ExactnessUnavailableError

_RUNGS = (2048, 1024, 512, 256, 128, 64, 32, 16)
# Products above this many multiplications are not probed: they would cost the start seconds and
# gain the pass nothing, since a product of this size is as fast as any.
_PROBE_WORK = {"cpu": 1 << 31, "cuda": 1 << 36}
_LEAST_TOP = 64


@dataclass(frozen=True, slots=True)
class RowLadder:
    """Row counts at which a model's frozen products agree, largest first; empty: any count.

    An empty ladder gives up exactness for speed: each product takes all rows at once.
    """

    rungs: tuple[int, ...]

    @property
    def quantum(self) -> int:
        """The row count of a pass must be a multiple of this."""
        return self.rungs[-1] if self.rungs else 1

    def parts(self, num_rows: int) -> list[int]:
        """Return the row counts, in order, of the products that `num_rows` rows take.

        Raises:
            ValueError: The count is not a multiple of the quantum.
        """
        if not self.rungs:
            return [num_rows]
        parts: list[int] = []
        left = num_rows
        for rung in self.rungs:
            count, left = divmod(left, rung)
            parts += [rung] * count
        if left:
            raise ValueError(f"{num_rows} rows are no multiple of {self.quantum}")
        return parts

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """Return `x @ weight + bias` for x [N, in] and weight [in, out], in `out` if given."""
        parts = self.parts(len(x))
        if len(parts) == 1 and out is None:
            return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
        out = x.new_empty(len(x), weight.shape[1]) if out is None else out
        start = 0
        for size in parts:
            rows = slice(start, start + size)
            if bias is None:
                torch.mm(x[rows], weight, out=out[rows])
            else:
                torch.addmm(bias, x[rows], weight, out=out[rows])
            start += size
        return out


@dataclass(frozen=True, slots=True)
class Ladders:
    """At how many rows a model's frozen products are issued: in layers, experts and the head."""

    layers: RowLadder = RowLadder(())
    head: RowLadder = RowLadder(())
    experts: RowLadder = RowLadder(())


def padded_rows(num_rows: int, quantum: int) -> int:
    """Return the smallest multiple of the quantum that holds the rows."""
    return -(-num_rows // quantum) * quantum


def probe_ladder(
    factors: Sequence[tuple[Tensor, Tensor | None]], *, max_rows: int = _RUNGS[0]
) -> RowLadder:
    """Find the ladder that all products of a model share, by trying them.

    Args:
        factors: One weight [in, out] and bias for each shape, forward and backward, on the device
            and in the dtype of the passes; torch must be set to the threads of the passes.
        max_rows: The highest rung that is wanted.

    Raises:
        ExactnessUnavailableError: At no row count do rows keep their bits when they change places.
    """
    largest = max(weight.numel() for weight, _ in factors)
    limit = min(max(_PROBE_WORK[factors[0][0].device.type] // largest, _LEAST_TOP), max_rows)
    rungs = [rung for rung in _RUNGS if rung <= limit]
    for index, top in enumerate(rungs):
        agreeing = set(rungs[index:])
        for weight, bias in factors:
            agreeing &= _agreeing(weight, bias, rungs[index:])
        if top in agreeing:
            return RowLadder(tuple(rung for rung in rungs if rung in agreeing))
    raise ExactnessUnavailableError(
        "matrix products of this model give a row other bits in another place; start with "
        "exact=false to go on without the promise that tenants do not touch each other's bits"
    )


def _agreeing(weight: Tensor, bias: Tensor | None, rungs: Sequence[int]) -> set[int]:
    """Return the rungs that agree with the first; empty if the first does not with itself."""
    generator = torch.Generator().manual_seed(0)
    top = rungs[0]
    x = torch.randn(top, weight.shape[0], generator=generator).to(weight)
    wanted = RowLadder((top,)).product(x, weight, bias)
    order = torch.randperm(top, generator=generator).to(weight.device)
    moved = RowLadder((top,)).product(x[order], weight, bias)
    if not torch.equal(moved, wanted[order]):
        return set()
    return {
        rung
        for rung in rungs
        if torch.equal(RowLadder((rung,)).product(x, weight, bias), wanted)
        and _keeps_nan_in_its_row(x[:rung], weight, bias)
    }


def _keeps_nan_in_its_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a NaN spoils no row but its own.

    A kernel that reads beyond the end of a row and multiplies what it finds there by zero has the
    right bits until the next row holds a NaN; bfloat16 kernels do this at some widths.
    """
    spoilt = x.clone()
    spoilt[1::2] = float("nan")
    found = RowLadder((len(x),)).product(spoilt, weight, bias)
    return bool(torch.isfinite(found[::2]).all())
