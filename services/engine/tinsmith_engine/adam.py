"""AdamW over rows of an arena, each row with its own hyper-parameters and step count.

The formula is torch.optim.AdamW's (decoupled decay, bias correction), the clip is
torch.nn.utils.clip_grad_norm_'s; tests hold both to it. The rows are walked in blocks that fit a
core's cache: eager PyTorch would otherwise stream each row through memory once per operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_engine.values import AdamParams

_BLOCK_NUMBERS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Columns:
    """Hyper-parameters of R rows as columns [R, 1], float32."""

    gradient_scale: Tensor
    one_minus_beta1: Tensor
    beta2: Tensor
    one_minus_beta2: Tensor
    decay: Tensor
    inverse_sqrt_correction2: Tensor
    eps: Tensor
    negative_step_size: Tensor


def adamw_(
    theta_RP: Tensor,
    grad_RP: Tensor,
    m_RP: Tensor,
    v_RP: Tensor,
    steps: Sequence[int],
    params: Sequence[AdamParams],
    grad_norms: Sequence[float],
) -> None:
    """Apply one AdamW step to R rows in place; gradients are read, not changed.

    Args:
        theta_RP: Weights, float32 [R, P].
        grad_RP: Accumulated gradients, float32 [R, P].
        m_RP: First moments, float32 [R, P].
        v_RP: Second moments, float32 [R, P].
        steps: For each row, the count of this step, from 1.
        params: For each row, its hyper-parameters.
        grad_norms: For each row, the L2 norm of its gradient, for clipping.
    """
    columns = _columns(steps, params, grad_norms, theta_RP.device)
    for start in range(0, theta_RP.shape[1], _BLOCK_NUMBERS):
        block = slice(start, start + _BLOCK_NUMBERS)
        theta, m, v = theta_RP[:, block], m_RP[:, block], v_RP[:, block]
        grad = grad_RP[:, block] * columns.gradient_scale
        m.lerp_(grad, columns.one_minus_beta1)
        v.mul_(columns.beta2).addcmul_(grad.mul(columns.one_minus_beta2), grad)
        denominator = v.sqrt().mul_(columns.inverse_sqrt_correction2).add_(columns.eps)
        theta.mul_(columns.decay)
        theta.addcdiv_(m * columns.negative_step_size, denominator)


def clip_factor(grad_norm: float, max_norm: float) -> float:
    """Return what to multiply a gradient by so that its norm is at most `max_norm` (0: 1)."""
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (grad_norm + 1e-6))


def _columns(
    steps: Sequence[int],
    params: Sequence[AdamParams],
    grad_norms: Sequence[float],
    device: torch.device,
) -> _Columns:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    corrections1 = [1.0 - p.beta1**step for p, step in zip(params, steps, strict=True)]
    corrections2 = [1.0 - p.beta2**step for p, step in zip(params, steps, strict=True)]
    return _Columns(
        gradient_scale=column(
            [clip_factor(n, p.grad_clip_norm) for p, n in zip(params, grad_norms, strict=True)]
        ),
        one_minus_beta1=column([1.0 - p.beta1 for p in params]),
        beta2=column([p.beta2 for p in params]),
        one_minus_beta2=column([1.0 - p.beta2 for p in params]),
        decay=column([1.0 - p.learning_rate * p.weight_decay for p in params]),
        inverse_sqrt_correction2=column([correction**-0.5 for correction in corrections2]),
        eps=column([p.eps for p in params]),
        negative_step_size=column(
            [-p.learning_rate / c for p, c in zip(params, corrections1, strict=True)]
        ),
    )
