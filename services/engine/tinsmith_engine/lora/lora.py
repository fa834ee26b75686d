"""The adapters of one linear target, for one run or for many at once.

Runs whose rows lie in the arena at one stride, whose segments have one length and whose adapters
have one shape are an *adapter group*: each of their products is a single batched product over views
of the arena, and their gradients are written to it directly. A batched product gives each run
the same bits whatever the size of the batch. Which runs share an adapter group changes nothing
but the time; but on a CPU a batch of one is another kernel where the dtype is not float32. There a
run that is alone is computed twice, as a batch of two; and long segments, which gain nothing from a
batch, are batches of one whether they are in an adapter group or not. Long sums are cut as those of
frozen products are (`split_products.py`).

Everything is scaled once, on the narrow side: `p = scale x A^T`, so that `y += p B^T`,
`dB += dy^T p`, and with `dp = scale dy B`, `dA += dp^T x`, `dx += dp A`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_engine.arena.adapter_targets import TargetSpec
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.products.split_products import KSplit

_LONGEST_GROUPED = 256
"""Rows of a segment up to which runs are stacked, where the dtype is not float32."""


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """The adapters of one target for R runs; gradients are float32 views of their rows."""

    a: Tensor
    """Stacked A matrices, [R, parts * rank, in]."""
    b: tuple[Tensor, ...]
    """For each part the B matrices, [R, out, rank]."""
    a_grad: Tensor | None
    b_grad: tuple[Tensor, ...]
    scale: float
    is_doubled: bool = False
    """Whether A and B hold a lone run twice; its gradients are there once."""

    @classmethod
    def of(
        cls,
        spec: TargetSpec,
        layout: ParameterLayout,
        theta_RP: Tensor,
        grad_RP: Tensor | None,
        scale: float,
        *,
        is_doubled: bool = False,
    ) -> LoraTarget | None:
        """Return the target's views into adapter rows [R, P], or None if they do not adapt it.

        With `is_doubled` theta_RP holds one run twice, [2, P], and grad_RP once.
        """
        if spec.a_names[0] not in layout:
            return None
        return cls(
            a=layout.fused(theta_RP, spec.a_names),
            b=tuple(layout.view(theta_RP, name) for name in spec.b_names),
            a_grad=None if grad_RP is None else layout.fused(grad_RP, spec.a_names),
            b_grad=()
            if grad_RP is None
            else tuple(layout.view(grad_RP, name) for name in spec.b_names),
            scale=scale,
            is_doubled=is_doubled,
        )

    @property
    def num_runs(self) -> int:
        """How many runs are stacked."""
        return 1 if self.is_doubled else len(self.a)

    def run(self, index: int) -> LoraTarget:
        """Return the target of one of the stacked runs."""
        one = slice(index, index + 1)
        return LoraTarget(
            a=self.a[one],
            b=tuple(b[one] for b in self.b),
            a_grad=None if self.a_grad is None else self.a_grad[one],
            b_grad=tuple(grad[one] for grad in self.b_grad),
            scale=self.scale,
        )

    def add_forward_(self, y: Tensor, x: Tensor, split: KSplit) -> Tensor:
        """Add `scale B A x` to y; return `scale x A^T` for the backward.

        Args:
            y: [R * n, out], the rows of each run after those of the one before.
            x: [R * n, in].
            split: How long sums are cut.

        Returns:
            [R, n, parts * rank].
        """
        if self._goes_alone(x):
            return torch.cat(
                [
                    self.run(index)._add_forward_(y[rows], x[rows], split)
                    for index, rows in enumerate(self._segments(x))
                ]
            )
        if self.is_doubled:
            y_twice = torch.cat([y, y])
            projected = self._add_forward_(y_twice, torch.cat([x, x]), split)
            y.copy_(y_twice[: len(y)])
            return projected
        return self._add_forward_(y, x, split)

    def _add_forward_(self, y: Tensor, x: Tensor, split: KSplit) -> Tensor:
        y_RN, x_RN = self._by_run(y), self._by_run(x)
        projected = split.batched(x_RN, self.a.transpose(1, 2)).mul_(self.scale)
        for index, columns, ranks in self._parts():
            split.add_narrow_(
                y_RN[:, :, columns], projected[:, :, ranks], self.b[index].transpose(1, 2)
            )
        return projected

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        projected: Tensor,
        dx: Tensor | None,
        split: KSplit,
        *,
        accumulates: bool = True,
    ) -> None:
        """Add the gradients of A and B to the rows, and that of x to `dx` unless it is None.

        Args:
            dy: [R * n, out].
            x: [R * n, in].
            projected: What `add_forward_` returned.
            dx: [R * n, in].
            split: How long sums are cut.
            accumulates: Whether the gradient views hold something; if not they are overwritten.
        """
        if self._goes_alone(x):
            for index, rows in enumerate(self._segments(x)):
                self.run(index)._backward(
                    dy[rows],
                    x[rows],
                    projected[index : index + 1],
                    None if dx is None else dx[rows],
                    split,
                    accumulates=accumulates,
                )
            return
        if self.is_doubled:
            dx_twice = None if dx is None else torch.cat([dx, dx])
            self._backward(
                torch.cat([dy, dy]),
                torch.cat([x, x]),
                projected,
                dx_twice,
                split,
                accumulates=accumulates,
            )
            if dx is not None and dx_twice is not None:
                dx.copy_(dx_twice[: len(dx)])
            return
        self._backward(dy, x, projected, dx, split, accumulates=accumulates)

    def _backward(
        self,
        dy: Tensor,
        x: Tensor,
        projected: Tensor,
        dx: Tensor | None,
        split: KSplit,
        *,
        accumulates: bool,
    ) -> None:
        dy_RN, x_RN = self._by_run(dy), self._by_run(x)
        parts = []
        for index, columns, ranks in self._parts():
            parts.append(split.batched(dy_RN[:, :, columns], self.b[index]))
            if self.b_grad:
                _take_product_(
                    self.b_grad[index],
                    dy_RN[:, :, columns].transpose(1, 2),
                    projected[:, :, ranks],
                    split,
                    accumulates=accumulates,
                )
        dprojected = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).mul_(self.scale)
        if self.a_grad is not None:
            _take_product_(
                self.a_grad, dprojected.transpose(1, 2), x_RN, split, accumulates=accumulates
            )
        if dx is not None:
            split.add_batched_(self._by_run(dx), dprojected, self.a)

    def _goes_alone(self, x: Tensor) -> bool:
        """Whether each run's segment is long enough to be a product of its own."""
        is_long = len(x) // self.num_runs > _LONGEST_GROUPED
        return is_long and self.a.dtype != torch.float32

    def _segments(self, x: Tensor) -> list[slice]:
        num_rows = len(x) // self.num_runs
        return [slice(start, start + num_rows) for start in range(0, len(x), num_rows)]

    def _by_run(self, rows: Tensor) -> Tensor:
        return rows.view(len(self.a), -1, rows.shape[-1])

    def _parts(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield each part's index, columns of the output and columns of `x A^T`."""
        rank = self.b[0].shape[2]
        start = 0
        for index, b in enumerate(self.b):
            stop = start + b.shape[1]
            yield index, slice(start, stop), slice(index * rank, (index + 1) * rank)
            start = stop


def _take_product_(
    grad: Tensor, left: Tensor, right: Tensor, split: KSplit, *, accumulates: bool
) -> None:
    """Add `left @ right` to float32 gradients [R, ...], or put it there."""
    if left.dtype != grad.dtype and split.tiles is None:
        # Of a lone run that is computed twice, the first is taken.
        product = _product_for(grad, left, right, split)[: len(grad)]
        if accumulates:
            grad.add_(product)
        else:
            grad.copy_(product)
    else:
        split.add_batched_(grad, left, right, adds=accumulates)


def _product_for(grad: Tensor, left: Tensor, right: Tensor, split: KSplit) -> Tensor:
    """Return `left @ right`, in the gradient's dtype where the device sums in it anyway."""
    if grad.device.type == "cuda":
        return torch.bmm(left, right, out_dtype=grad.dtype)
    return split.batched(left, right)
