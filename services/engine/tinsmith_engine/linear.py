"""Linear layers that read the same input, fused: frozen or trained weights, with or without LoRA.

A unit is one GEMM for q, k and v (or gate and up) plus, for an adapted unit, one GEMM for all A
matrices and one in-place product for each B. Its backward adds the parameter gradients straight to
views of the run's gradient row; no gradient tensor of its own is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor

from tinsmith_engine.ops import add_product_
from tinsmith_engine.rows import RowLayout
from tinsmith_engine.values import LoraConfig


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """Which linear modules form a unit, and their sizes."""

    names: tuple[str, ...]
    """Module paths, such as `model.layers.0.self_attn.q_proj`, in the order of their rows."""
    num_inputs: int
    num_outputs: tuple[int, ...]
    kind: str
    """`attention`, `mlp` or `unembedding`."""

    def is_adapted_by(self, config: LoraConfig) -> bool:
        """Return whether an adapter of this configuration has matrices for the unit."""
        return {
            "attention": config.train_attention,
            "mlp": config.train_mlp,
            "unembedding": config.train_unembedding,
        }[self.kind]


def lora_layout(specs: Sequence[UnitSpec], config: LoraConfig) -> RowLayout:
    """Return the row layout of an adapter: for each unit all A [rank, in], then all B [out, rank].

    Names are those of the modules plus `.lora_A.weight` and `.lora_B.weight`.
    """
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for spec in specs:
        if not spec.is_adapted_by(config):
            continue
        tensors += [(f"{n}.lora_A.weight", (config.rank, spec.num_inputs)) for n in spec.names]
        tensors += [
            (f"{name}.lora_B.weight", (size, config.rank))
            for name, size in zip(spec.names, spec.num_outputs, strict=True)
        ]
    return RowLayout(tensors)


def initialise_lora_(theta_P: Tensor, layout: RowLayout, seed: int) -> None:
    """Fill an adapter as PEFT does: A kaiming-uniform with a = sqrt(5), B zero.

    That bound is 1 / sqrt(in). Numbers come from a CPU generator of the run's own, in layout
    order, so they depend on the seed and the layout alone.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, entry in layout.entries.items():
        if ".lora_A." in name:
            bound = 1.0 / math.sqrt(entry.shape[1])
            values = torch.empty(entry.shape).uniform_(-bound, bound, generator=generator)
            layout.view(theta_P, name).copy_(values)


@dataclass(frozen=True, slots=True)
class LoraUnit:
    """The adapter of one unit; gradients are float32 views, absent where nothing is trained."""

    a: Tensor
    """Stacked A matrices, [parts * rank, in]."""
    b: tuple[Tensor, ...]
    """One B matrix [out, rank] for each part."""
    a_grad: Tensor | None
    b_grad: tuple[Tensor, ...]
    scale: float

    @classmethod
    def of(
        cls,
        spec: UnitSpec,
        layout: RowLayout,
        theta_P: Tensor,
        grad_P: Tensor | None,
        scale: float,
    ) -> LoraUnit | None:
        """Return the unit's views into an adapter row, or None if the row does not adapt it."""
        a_names = [f"{name}.lora_A.weight" for name in spec.names]
        b_names = [f"{name}.lora_B.weight" for name in spec.names]
        if a_names[0] not in layout:
            return None
        return cls(
            a=layout.fused(theta_P, a_names),
            b=tuple(layout.view(theta_P, name) for name in b_names),
            a_grad=None if grad_P is None else layout.fused(grad_P, a_names),
            b_grad=() if grad_P is None else tuple(layout.view(grad_P, n) for n in b_names),
            scale=scale,
        )

    def parts(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield each part's index, columns of the output and columns of `x A^T`."""
        rank = self.b[0].shape[1]
        start = 0
        for index, b in enumerate(self.b):
            stop = start + b.shape[0]
            yield index, slice(start, stop), slice(index * rank, (index + 1) * rank)
            start = stop

    def add_forward_(self, y: Tensor, x: Tensor) -> Tensor:
        """Add `scale B A x` to y [N, out]; return `x A^T` [N, parts * rank] for the backward."""
        projected = F.linear(x, self.a)
        for index, columns, ranks in self.parts():
            y[:, columns].addmm_(projected[:, ranks], self.b[index].t(), alpha=self.scale)
        return projected

    def backward(self, dy: Tensor, x: Tensor, projected: Tensor, dx: Tensor | None) -> None:
        """Add the gradients of A and B to the row, and that of x to `dx` unless it is None."""
        dprojected = torch.empty_like(projected)
        for index, columns, ranks in self.parts():
            torch.mm(dy[:, columns], self.b[index], out=dprojected[:, ranks])
            if self.a_grad is not None:
                add_product_(
                    self.b_grad[index],
                    dy[:, columns].t(),
                    projected[:, ranks],
                    scale=self.scale,
                )
        if self.a_grad is not None:
            add_product_(self.a_grad, dprojected.t(), x, scale=self.scale)
        if dx is not None:
            dx.addmm_(dprojected, self.a, alpha=self.scale)


@dataclass(frozen=True, slots=True)
class LinearUnit:
    """One fused linear layer of a model as a run sees it."""

    weight: Tensor
    """[out, in]."""
    bias: Tensor | None = None
    weight_grad: Tensor | None = None
    """Float32 view of the gradient row of a full-parameter run."""
    bias_grad: Tensor | None = None
    lora: LoraUnit | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return y [N, out] for x [N, in], and what `backward` needs of the adapter."""
        y = F.linear(x, self.weight, self.bias)
        if self.lora is None:
            return y, None
        return y, self.lora.add_forward_(y, x)

    def backward(
        self, dy: Tensor, x: Tensor, projected: Tensor | None, *, needs_dx: bool = True
    ) -> Tensor | None:
        """Add the parameter gradients to the run's row; return the gradient for x if wanted."""
        dx = dy @ self.weight if needs_dx else None
        if self.weight_grad is not None:
            add_product_(self.weight_grad, dy.t(), x)
        if self.bias_grad is not None:
            self.bias_grad.add_(dy.sum(0, dtype=torch.float32))
        if self.lora is not None:
            if projected is None:
                raise ValueError("the forward pass ran without this adapter")
            self.lora.backward(dy, x, projected, dx)
        return dx
