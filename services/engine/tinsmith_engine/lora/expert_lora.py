"""The adapters of the experts of one layer, for one run or for an adapter group of runs.

As in `lora.py`, everything is scaled once on the narrow side. Which rows an adapter gets differs
by run and expert. Its products are batched over groups (`moe_routing.GroupBatch`) of equal
padded length, with matrices picked out of the arena.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_engine.arena.adapter_targets import ExpertSpecs
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.packing.moe_routing import GroupBatch
from tinsmith_engine.products.few_rows import fewest_adapter_rows
from tinsmith_engine.products.split_products import KSplit


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """The adapters of one target of all E experts for R runs; gradients are float32 views."""

    a: Tensor
    """[R, E, parts * rank, in]."""
    b: tuple[Tensor, ...]
    """For each part [R, E, out, rank]."""
    a_grad: Tensor | None
    b_grad: tuple[Tensor, ...]
    scale: float

    @classmethod
    def of(
        cls,
        specs: ExpertSpecs,
        layout: ParameterLayout,
        theta_RP: Tensor,
        grad_RP: Tensor | None,
        scale: float,
    ) -> ExpertLora | None:
        """Return the views into adapter rows [R, P], or None if they adapt no expert."""
        names = specs.first
        if names.a_names[0] not in layout:
            return None
        num_experts = len(specs.experts)
        stride = 0
        if num_experts > 1:
            second = layout.entries[specs.experts[1].a_names[0]]
            stride = second.offset - layout.entries[names.a_names[0]].offset

        def views(rows: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            a = layout.fused(rows, names.a_names)
            bs = (layout.view(rows, name) for name in names.b_names)
            return _by_expert(a, num_experts, stride), tuple(
                _by_expert(b, num_experts, stride) for b in bs
            )

        a, b = views(theta_RP)
        a_grad, b_grad = (None, ()) if grad_RP is None else views(grad_RP)
        return cls(a=a, b=b, a_grad=a_grad, b_grad=b_grad, scale=scale)

    @property
    def num_runs(self) -> int:
        """How many runs are stacked."""
        return len(self.a)

    def fewest_rows(self, split: KSplit) -> int:
        """Return the fewest rows of a group that have the bits of rows in any longer one."""
        return fewest_adapter_rows(split, self.a, self.b)

    def add_forward_(
        self, y: Tensor, x: Tensor, batches: Sequence[GroupBatch], split: KSplit
    ) -> tuple[Tensor, ...]:
        """Add `scale B A x` to y; return `scale x A^T` of each batch for the backward.

        Args:
            y: Rows of pairs [M, out].
            x: Rows of pairs [M, in].
            batches: The groups of the runs.
            split: How long sums are cut.
        """
        saved = []
        for batch in batches:
            a = self.a[batch.runs, batch.experts]
            projected = split.batched(batch.spread(x), a.transpose(1, 2)).mul_(self.scale)
            parts = [
                split.narrow(
                    projected[:, :, ranks],
                    self.b[index][batch.runs, batch.experts].transpose(1, 2),
                )
                for index, _, ranks in self._parts()
            ]
            batch.add_to_(y, parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
            saved.append(projected)
        return tuple(saved)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        saved: Sequence[Tensor],
        dx: Tensor,
        batches: Sequence[GroupBatch],
        split: KSplit,
        *,
        accumulates: bool,
    ) -> None:
        """Add the gradients of A and B to the rows, and that of x to `dx`.

        Args:
            dy: Rows of pairs [M, out].
            x: Rows of pairs [M, in].
            saved: What `add_forward_` returned.
            dx: Rows of pairs [M, in].
            batches: The groups of the runs.
            split: How long sums are cut.
            accumulates: Whether the gradient views hold something; if not they are overwritten,
                with zeros for experts that no token went to.
        """
        if not accumulates and self.a_grad is not None:
            for grad in (self.a_grad, *self.b_grad):
                grad.zero_()
        for batch, projected in zip(batches, saved, strict=True):
            dy_groups = batch.spread_gradient(dy)
            parts = []
            for index, columns, ranks in self._parts():
                dy_part = dy_groups[:, :, columns]
                parts.append(split.batched(dy_part, self.b[index][batch.runs, batch.experts]))
                if self.b_grad:
                    db = split.batched(dy_part.transpose(1, 2), projected[:, :, ranks])
                    _add_at(self.b_grad[index], batch, db)
            dprojected = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).mul_(self.scale)
            if self.a_grad is not None:
                da = split.batched(dprojected.transpose(1, 2), batch.spread(x))
                _add_at(self.a_grad, batch, da)
            batch.add_to_(dx, split.batched(dprojected, self.a[batch.runs, batch.experts]))

    def _parts(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield each part's index, columns of the output and columns of `x A^T`."""
        rank = self.b[0].shape[3]
        start = 0
        for index, b in enumerate(self.b):
            stop = start + b.shape[2]
            yield index, slice(start, stop), slice(index * rank, (index + 1) * rank)
            start = stop


def _by_expert(first: Tensor, num_experts: int, stride: int) -> Tensor:
    """Return [R, E, ...] for the matrices of expert 0 of each row, [R, ...]."""
    shape = (first.shape[0], num_experts, *first.shape[1:])
    strides = (first.stride(0), stride, *first.stride()[1:])
    return first.as_strided(shape, strides)


def _add_at(grad: Tensor, batch: GroupBatch, values: Tensor) -> None:
    """Add gradients of groups [G, ...] to [R, E, ...]; each group is another run or expert."""
    index = (batch.runs, batch.experts)
    grad.index_put_(index, grad[index].add_(values))
