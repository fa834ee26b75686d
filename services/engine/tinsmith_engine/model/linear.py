"""Linear layers that read the same input, fused: frozen or trained weights, and adapters of runs.

A target is one product for q, k and v (or gate and up), shared by all rows of a pass. Added are
the adapters of those rows that have one (`lora.py`). Its backward adds the parameter gradients
straight
to views of the runs' gradient rows; no gradient tensor of its own is ever made.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_engine.lora.lora import LoraTarget
from tinsmith_engine.products.split_products import KSplit

Saved = tuple[Tensor, ...]
"""What a target's backward needs of its forward, beside x: an entry for each adapter group."""


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows of a pass that use the adapters of an adapter group of runs."""

    rows: slice
    lora: LoraTarget
    accumulates: bool = True
    """Whether the runs' gradient rows hold something; if not they are overwritten."""


@dataclass(frozen=True, slots=True)
class LinearTarget:
    """One fused linear layer as the rows of a pass see it."""

    weight: Tensor
    """[out, in]."""
    split: KSplit
    bias: Tensor | None = None
    weight_grad: Tensor | None = None
    """Float32 view of the gradient row of a full-parameter run."""
    bias_grad: Tensor | None = None
    adapted: tuple[AdaptedRows, ...] = ()

    def adapt(self, adapted: tuple[AdaptedRows, ...]) -> LinearTarget:
        """Return the target with adapters on some of its rows."""
        return dataclasses.replace(self, adapted=adapted)

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        """Return y [N, out] for x [N, in], and what `backward` needs of the adapters."""
        y = self.split.product(x, self.weight.t(), self.bias)
        return y, tuple(
            one.lora.add_forward_(y[one.rows], x[one.rows], self.split) for one in self.adapted
        )

    def backward(
        self, dy: Tensor, x: Tensor, saved: Saved, *, needs_dx: bool = True
    ) -> Tensor | None:
        """Add the parameter gradients to the runs' rows; return the gradient for x if wanted."""
        dx = self.split.product(dy, self.weight) if needs_dx else None
        if self.weight_grad is not None:
            self.split.add_product_(self.weight_grad, dy.t(), x)
        if self.bias_grad is not None:
            self.bias_grad.add_(dy.sum(0, dtype=torch.float32))
        for one, projected in zip(self.adapted, saved, strict=True):
            one.lora.backward(
                dy[one.rows],
                x[one.rows],
                projected,
                None if dx is None else dx[one.rows],
                self.split,
                accumulates=one.accumulates,
            )
        return dx
