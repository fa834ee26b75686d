"""A mixture of experts in place of a block's MLP, with its backward.

The router's softmax and choice are row-wise. Pairs of token and expert are rows of their own
(`moe_routing.py`): each expert's frozen weight multiplies a block of them (`split_products.py`),
and adapters are added by group (`expert_lora.py`). A token's routing weight is multiplied into the
activation before the down projection, which is narrower than what comes out of it; the projection
has no bias, so the result is the same.

The router uses no adapter and is trained in full-parameter runs only, but the gradient of the
hidden states always flows through it. Filling rows are not routed: they get zeros and give none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.base.types import IntArray
from tinsmith_engine.lora.expert_lora import ExpertLora
from tinsmith_engine.model.linear import LinearTarget, Saved
from tinsmith_engine.model.mlp import given
from tinsmith_engine.packing.moe_routing import Dispatch, GroupBatch, Routes
from tinsmith_engine.products.ops import swiglu, swiglu_backward
from tinsmith_engine.products.split_products import KSplit

Groups = tuple[tuple[GroupBatch, ...], ...]
"""For each adapter group its expert groups, by padded length."""
GroupsSaved = tuple[tuple[Tensor, ...], ...]


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """Rows of a pass that use the expert adapters of an adapter group of runs."""

    rows: slice
    lora: ExpertLora
    accumulates: bool = True
    """Whether the runs' gradient rows hold something; if not they are overwritten."""


@dataclass(frozen=True, slots=True)
class ExpertTarget:
    """One linear layer of every expert, on rows of pairs."""

    weight: Tensor
    """[E, out, in]."""
    split: KSplit
    weight_grad: Tensor | None = None
    """Float32 view of the gradient row of a full-parameter run."""
    adapted: tuple[AdaptedExperts, ...] = ()

    def adapt(self, adapted: tuple[AdaptedExperts, ...]) -> ExpertTarget:
        """Return the target with adapters on some rows."""
        return dataclasses.replace(self, adapted=adapted)

    def forward(self, x: Tensor, dispatch: Dispatch, groups: Groups) -> tuple[Tensor, GroupsSaved]:
        """Return y [M, out] for x [M, in], and what `backward` needs of the adapters."""
        y = x.new_empty(len(x), self.weight.shape[1])
        for expert, rows in dispatch.blocks:
            self.split.product(x[rows], self.weight[expert].t(), out=y[rows])
        return y, tuple(
            one.lora.add_forward_(y, x, batches, self.split)
            for one, batches in zip(self.adapted, groups, strict=True)
        )

    def backward(
        self, dy: Tensor, x: Tensor, saved: GroupsSaved, dispatch: Dispatch, groups: Groups
    ) -> Tensor:
        """Add the parameter gradients to the runs' rows; return the gradient for x.

        `dy` is zero where x is filling.
        """
        dx = torch.empty_like(x)
        for expert, rows in dispatch.blocks:
            self.split.product(dy[rows], self.weight[expert], out=dx[rows])
            if self.weight_grad is not None:
                self.split.add_product_(self.weight_grad[expert], dy[rows].t(), x[rows])
        for one, kept, batches in zip(self.adapted, saved, groups, strict=True):
            one.lora.backward(dy, x, kept, dx, batches, self.split, accumulates=one.accumulates)
        return dx


class MoeSaved(NamedTuple):
    """What the backward of a mixture of experts needs."""

    router_saved: Saved
    probabilities: Tensor
    """Of all experts, float32 [N, E]."""
    experts_NK: Tensor
    weights_NK: Tensor
    """Float32."""
    dispatch: Dispatch
    groups: Groups
    gate_up: Tensor
    """[M, 2 I]."""
    gate_up_saved: GroupsSaved
    activated: Tensor
    """Before the routing weight, [M, I]."""
    down_saved: GroupsSaved


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """`sum over the K chosen experts of weight * down(silu(gate(x)) * up(x))`."""

    router: LinearTarget
    gate_up: ExpertTarget
    down: ExpertTarget
    num_chosen: int
    normalises: bool
    """Whether the weights of a token's experts are made to sum to 1."""
    tokens: IntArray | None = None
    """The rows of the pass that are tokens, ascending; None if all are."""
    has_tiles: bool = False
    """Whether adapters multiply tiles of few rows and not whole groups."""
    layer: int = 0
    routes: dict[int, Routes] | None = None
    """Where to leave, by layer, which experts the tokens went to."""

    def forward(self, x: Tensor) -> tuple[Tensor, MoeSaved]:
        """Return y [N, H] for x [N, H], and what `backward` needs."""
        logits, router_saved = self.router.forward(x)
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.num_chosen, dim=-1)
        if self.normalises:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        num_experts = len(self.gate_up.weight)
        tokens = np.arange(len(x)) if self.tokens is None else self.tokens
        dispatch = Dispatch.of(experts, tokens, num_experts, self.gate_up.split.row_tile)
        if self.routes is not None:
            self.routes[self.layer] = Routes(num_experts, dispatch.experts_TK)
        split = self.gate_up.split
        groups = tuple(
            dispatch.groups(
                one.rows,
                one.lora.num_runs,
                num_experts,
                shortest=max(one.lora.fewest_rows(split), down.lora.fewest_rows(split)),
                are_tiled=self.has_tiles,
            )
            for one, down in zip(self.gate_up.adapted, self.down.adapted, strict=True)
        )
        gate_up, gate_up_saved = self.gate_up.forward(dispatch.spread(x), dispatch, groups)
        activated = swiglu(gate_up)
        weighted = activated * dispatch.of_pairs(weights)[:, None].to(x.dtype)
        y, down_saved = self.down.forward(weighted, dispatch, groups)
        return dispatch.gathered(y, len(x)), MoeSaved(
            router_saved=router_saved,
            probabilities=probabilities,
            experts_NK=experts,
            weights_NK=weights,
            dispatch=dispatch,
            groups=groups,
            gate_up=gate_up,
            gate_up_saved=gate_up_saved,
            activated=activated,
            down_saved=down_saved,
        )

    def backward(self, dy: Tensor, x: Tensor, saved: MoeSaved) -> Tensor:
        """Add the parameter gradients to the runs' rows; return the gradient for x."""
        dispatch, groups = saved.dispatch, saved.groups
        weights_M1 = dispatch.of_pairs(saved.weights_NK)[:, None].to(x.dtype)
        dy_M = dispatch.spread_gradient(dy)
        dweighted = self.down.backward(
            dy_M, saved.activated * weights_M1, saved.down_saved, dispatch, groups
        )
        dweights_M = torch.linalg.vecdot(dweighted.float(), saved.activated.float())
        dgate_up = swiglu_backward(dweighted.mul_(weights_M1), saved.gate_up)
        dx_M = self.gate_up.backward(
            dgate_up, dispatch.spread(x), saved.gate_up_saved, dispatch, groups
        )
        dx = dispatch.gathered(dx_M, len(x))
        dlogits = self._router_backward(dispatch.by_token(dweights_M, len(x)), saved)
        return dx.add_(given(self.router.backward(dlogits.to(x.dtype), x, saved.router_saved)))

    def _router_backward(self, dweights_NK: Tensor, saved: MoeSaved) -> Tensor:
        """Return the gradient of the router's logits, float32 [N, E]."""
        probabilities, weights = saved.probabilities, saved.weights_NK
        chosen = probabilities.gather(1, saved.experts_NK)
        dchosen = dweights_NK
        if self.normalises:
            mean = (dweights_NK * weights).sum(dim=-1, keepdim=True)
            dchosen = (dweights_NK - mean) / chosen.sum(dim=-1, keepdim=True)
        # Through the softmax: p_i (dp_i - sum_j p_j dp_j), where dp is zero but for the chosen.
        total = (dchosen * chosen).sum(dim=-1, keepdim=True)
        dlogits = probabilities * -total
        return dlogits.scatter_add_(1, saved.experts_NK, chosen * dchosen)
