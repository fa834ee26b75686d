"""AdamW over rows of an arena, each row with its own hyper-parameters and step count.

The step is torch's fused kernel, one sweep over memory for each row: theta, gradient and moments of
a run are one row, so a run is one call however many matrices it has. A row is always a call of its
own, with a shape of its own, which keeps its bits free of the rows that step with it. The clip is
torch.nn.utils.clip_grad_norm_'s. Tests hold both to torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.arena.rows import Row
from tinsmith_engine.base.types import AdamParams

# Far above the square root of the smallest number that float32 holds exactly, 1e-38.
_LEAST_EPS = 1e-15
_NORM_BLOCK = 4096
_LARGEST_CHANGE = 1e18


@dataclass(frozen=True, slots=True)
class RowStep:
    """One row and how it steps."""

    row: Row
    step: int
    """The count of this step, from 1."""
    params: AdamParams
    grad_norm: float
    """L2 norm of the row's gradient, for clipping."""


def adamw_(steps: Sequence[RowStep]) -> None:
    """Apply one AdamW step to each row in place.

    Gradients may be scaled on the way: whoever calls clears them afterwards.
    """
    for one in steps:
        row, params = one.row, one.params
        factor = clip_factor(one.grad_norm, params.grad_clip_norm)
        if factor != 1.0:
            row.grad_P.mul_(factor)
        torch._fused_adamw_(
            [row.theta_P],
            [row.grad_P],
            [row.m_P],
            [row.v_P],
            [],
            [torch.tensor(float(one.step), device=row.theta_P.device)],
            lr=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            weight_decay=params.weight_decay,
            eps=params.eps,
            amsgrad=False,
            maximize=False,
        )


def clip_factor(grad_norm: float, max_norm: float) -> float:
    """Return what to multiply a gradient by so that its norm is at most `max_norm` (0: 1)."""
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (grad_norm + 1e-6))


def grad_norm(grad_P: Tensor) -> float:
    """Return the L2 norm of a gradient row; infinite or NaN if the row is, or if it overflows."""
    # By blocks of one length: a dot product of the whole row would be shared out between the
    # threads, and summed in another order for another number of them.
    whole = len(grad_P) - len(grad_P) % _NORM_BLOCK
    parts = (grad_P[:whole].view(-1, _NORM_BLOCK), grad_P[whole:].view(1, -1))
    norms = torch.cat([torch.linalg.vector_norm(part, dim=1) for part in parts])
    return math.sqrt(float(np.square(norms.double().cpu().numpy()).sum()))


@dataclass(frozen=True, slots=True)
class RowBound:
    """What is known of the numbers of a row without looking at them.

    As long as the bound is far from what float32 holds, a step cannot overflow, and needs neither
    a copy to go back to nor a look at the result.
    """

    largest: float
    """At least |theta| everywhere."""
    moment_ratio: float
    """At least |m| / sqrt(v) everywhere."""

    @classmethod
    def unknown(cls) -> RowBound:
        """Return the bound of a row that somebody else wrote."""
        return cls(math.inf, math.inf)

    @classmethod
    def of(cls, row: Row) -> RowBound:
        """Return the bound of a row, by looking at it."""
        largest = float(torch.stack(torch.aminmax(row.theta_P)).abs().max())
        # 0 / 0 is a moment that has not been touched.
        ratio = float((row.m_P.abs() / row.v_P.sqrt()).nan_to_num_(nan=0.0, posinf=math.inf).max())
        return cls(largest, ratio)

    def after(self, params: AdamParams) -> RowBound:
        """Return the bound after a step, whatever its gradient is.

        m' / sqrt(v') is at most `beta1 / sqrt(beta2)` of what it was, plus
        `(1 - beta1) / sqrt(1 - beta2)`; bias correction divides m by no less than 1 - beta1, and v
        by no more than 1. Where v is too small for float32 to hold it exactly, |m| is below 1e-18
        of that ratio, and eps in the denominator stands in for what v has lost, unless it is as
        small itself.
        """
        if params.beta2 <= 0.0 or params.beta2 >= 1.0 or params.beta1 >= 1.0:
            return RowBound.unknown()
        if params.eps < _LEAST_EPS:
            return RowBound.unknown()
        ratio = self.moment_ratio * params.beta1 / math.sqrt(params.beta2)
        ratio += (1.0 - params.beta1) / math.sqrt(1.0 - params.beta2)
        # The kernel multiplies by m before it divides by sqrt(v), which is at most 2e19.
        change = params.learning_rate * ratio / (1.0 - params.beta1)
        if change > _LARGEST_CHANGE:
            return RowBound.unknown()
        decay = 1.0 + params.learning_rate * params.weight_decay
        return RowBound(self.largest * decay + change, ratio)
