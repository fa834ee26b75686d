"""Forward and backward of the decoder's elementwise parts, written out.

The decoder keeps its own tape instead of an autograd graph: on CPU a graph costs more than the
arithmetic of a small batch, and it would keep temporaries that these formulas do not need. Each
backward takes what its forward returned. Reductions run in float32 whatever the dtype of the
activations.

There are two sets of the same operations: these, and compiled ones (`compiled_ops.py`), which sweep
over memory once for each. They round differently, so an engine takes one set at start and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ops:
    """The elementwise operations of a decoder, as one of the two sets implements them."""

    name: str
    """For the fingerprint."""
    rms_norm: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]
    rms_norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    norm_rotate: Callable[[Tensor, Tensor, float, Tensor, Tensor], tuple[Tensor, Tensor]]
    norm_rotate_backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    swiglu_backward: Callable[[Tensor, Tensor], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x / rms(x) * weight` over the last axis, and 1/rms as float32 [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse_rms).to(x.dtype).mul_(weight), inverse_rms


def add_rms_norm(
    delta: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `delta + x` and what `rms_norm` returns for it; may write to `delta`."""
    total = delta.add_(x)
    return total, *rms_norm(total, weight, eps)


def rms_norm_backward(
    dy: Tensor, x: Tensor, inverse_rms: Tensor, weight: Tensor, residual: Tensor | None
) -> Tensor:
    """Return the gradient for x, in x's dtype, plus `residual`; may write to `residual`.

    With n = x / rms: dx = (dy w - n mean(dy w n)) / rms.
    """
    x32 = x.float()
    scaled = dy.float() * weight
    mean = torch.linalg.vecdot(scaled, x32).unsqueeze(-1).div_(-x.shape[-1])
    coefficient = mean.mul_(inverse_rms.pow(3))
    dx = scaled.mul_(inverse_rms).addcmul_(x32, coefficient).to(x.dtype)
    return dx if residual is None else residual.add_(dx)


def add_norm_gradient_(grad: Tensor, dy: Tensor, x: Tensor, inverse_rms: Tensor) -> None:
    """Add the gradient of a norm's weight, whose shape is that of the last axes of x."""
    product = dy.float() * x.float() * inverse_rms
    grad.add_(product.flatten(0, -1 - grad.dim()).sum(0))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotary-embedded heads.

    Args:
        heads: [N, heads, D]; the first half of D is paired with the second, as in Hugging Face.
        cos: [N, 1, D / 2].
        sin: [N, 1, D / 2]; pass `-sin` for the backward, since a rotation's gradient is its
            inverse.
    """
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    out = torch.empty_like(heads, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def norm_rotate(
    heads: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Return normed and rotated heads [N, heads, D], and 1/rms as float32 [N, heads, 1]."""
    normed, inverse_rms = rms_norm(heads, weight, eps)
    return rotate(normed, cos, sin), inverse_rms


def norm_rotate_backward(
    dy: Tensor, heads: Tensor, inverse_rms: Tensor, weight: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Return the gradient for the heads."""
    return rms_norm_backward(rotate(dy, cos, -sin), heads, inverse_rms, weight, None)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` for the halves of [N, 2 I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient for both halves, [N, 2 I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    dgate, dup = out.chunk(2, dim=-1)
    torch.mul(dy, F.silu(gate), out=dup)
    torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
    return out


EAGER = Ops(
    name="eager",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rms_norm_backward=rms_norm_backward,
    rotate=rotate,
    norm_rotate=norm_rotate,
    norm_rotate_backward=norm_rotate_backward,
    swiglu=swiglu,
    swiglu_backward=swiglu_backward,
)
