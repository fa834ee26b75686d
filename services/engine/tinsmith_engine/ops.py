"""Forward and backward of the decoder's elementwise parts, written out.

The decoder keeps its own tape instead of an autograd graph: on CPU a graph costs more than the
arithmetic of a small batch, and it would keep temporaries that these formulas do not need. Each
backward takes what its forward returned. Reductions run in float32 whatever the dtype of the
activations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `x / rms(x) * weight` over the last axis, and 1/rms as float32 [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse_rms = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse_rms).to(x.dtype).mul_(weight), inverse_rms


def rms_norm_backward(
    dy: Tensor, x: Tensor, inverse_rms: Tensor, weight: Tensor, weight_grad: Tensor | None
) -> Tensor:
    """Return the gradient for x, in x's dtype; add the weight's own to `weight_grad` if given.

    With n = x / rms: dx = (dy w - n mean(dy w n)) / rms. `weight_grad` has the shape of `weight`,
    float32, and broadcasts over the leading axes.
    """
    x32, dy32 = x.float(), dy.float()
    if weight_grad is not None:
        product = dy32 * x32 * inverse_rms
        weight_grad.add_(product.flatten(0, -1 - weight_grad.dim()).sum(0))
    scaled = dy32 * weight
    mean = torch.linalg.vecdot(scaled, x32).unsqueeze(-1).div_(-x.shape[-1])
    coefficient = mean.mul_(inverse_rms.pow(3))
    return scaled.mul_(inverse_rms).addcmul_(x32, coefficient).to(x.dtype)


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
