"""AdamW over slots of an arena, each slot with its own hyper-parameters and step count.

The step is torch's fused kernel, one sweep over memory for each slot: theta, gradient and moments
of a run are one slot, so a run is one call however many matrices it has. A slot is always a call
of its own, with a shape of its own. Its bits then do not depend on the slots that step with it.
The clip
is torch.nn.utils.clip_grad_norm_'s. Tests hold both to torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.arena.slots import Slot
from tinsmith_engine.base.types import AdamParams

# Far above the square root of the smallest number that float32 holds exactly, 1e-38.
_LEAST_EPS = 1e-15
_NORM_BLOCK = 4096
_LARGEST_CHANGE = 1e18


@dataclass(frozen=True, slots=True)
class SlotStep:
    """One slot and how it steps."""

    slot: Slot
    step: int
    """The count of this step, from 1."""
    params: AdamParams
    grad_norm: float
    """L2 norm of the slot's gradient, for clipping."""


def adamw_(steps: Sequence[SlotStep]) -> None:
    """Apply one AdamW step to each slot in place.

    Gradients may be scaled on the way: the caller clears them afterwards.
    """
    for one in steps:
        slot, params = one.slot, one.params
        factor = clip_factor(one.grad_norm, params.grad_clip_norm)
        if factor != 1.0:
            slot.grad_P.mul_(factor)
        torch._fused_adamw_(
            [slot.theta_P],
            [slot.grad_P],
            [slot.m_P],
            [slot.v_P],
            [],
            [torch.tensor(float(one.step), device=slot.theta_P.device)],
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
    """Return the L2 norm of a gradient slot; infinite or NaN if the slot is, or if it overflows."""
    # By blocks of one length: a dot product of the whole slot would be shared out between the
    # threads, and summed in another order for another number of them.
    whole = len(grad_P) - len(grad_P) % _NORM_BLOCK
    parts = (grad_P[:whole].view(-1, _NORM_BLOCK), grad_P[whole:].view(1, -1))
    norms = torch.cat([torch.linalg.vector_norm(part, dim=1) for part in parts])
    return math.sqrt(float(np.square(norms.double().cpu().numpy()).sum()))


@dataclass(frozen=True, slots=True)
class SlotBound:
    """What is known of the numbers of a slot without looking at them.

    While the bound is far from what float32 holds, a step cannot overflow. It then needs neither
    a copy to go back to nor a look at the result.
    """

    largest: float
    """At least |theta| everywhere."""
    moment_ratio: float
    """At least |m| / sqrt(v) everywhere."""

    @classmethod
    def unknown(cls) -> SlotBound:
        """Return the bound of a slot of unknown content."""
        return cls(math.inf, math.inf)

    @classmethod
    def of(cls, slot: Slot) -> SlotBound:
        """Return the bound of a slot, by looking at it."""
        largest = float(torch.stack(torch.aminmax(slot.theta_P)).abs().max())
        # 0 / 0 is a moment that has not been touched.
        ratio = float(
            (slot.m_P.abs() / slot.v_P.sqrt()).nan_to_num_(nan=0.0, posinf=math.inf).max()
        )
        return cls(largest, ratio)

    def after(self, params: AdamParams) -> SlotBound:
        """Return the bound after a step, whatever its gradient is.

        m' / sqrt(v') is at most `beta1 / sqrt(beta2)` of what it was, plus
        `(1 - beta1) / sqrt(1 - beta2)`; bias correction divides m by no less than 1 - beta1, and v
        by no more than 1. Where v is too small for float32 to hold it exactly, |m| is below
        1e-18 of that ratio. There eps in the denominator stands in for what v has lost, unless
        eps is as small.
        """
        if params.beta2 <= 0.0 or params.beta2 >= 1.0 or params.beta1 >= 1.0:
            return SlotBound.unknown()
        if params.eps < _LEAST_EPS:
            return SlotBound.unknown()
        ratio = self.moment_ratio * params.beta1 / math.sqrt(params.beta2)
        ratio += (1.0 - params.beta1) / math.sqrt(1.0 - params.beta2)
        # The kernel multiplies by m before it divides by sqrt(v), which is at most 2e19.
        change = params.learning_rate * ratio / (1.0 - params.beta1)
        if change > _LARGEST_CHANGE:
            return SlotBound.unknown()
        decay = 1.0 + params.learning_rate * params.weight_decay
        return SlotBound(self.largest * decay + change, ratio)
