"""Forward and backward of the decoder's elementwise parts, written out.

The decoder keeps its own saved activations instead of an autograd graph: on CPU a graph costs more
than the arithmetic of a small batch, and it would keep temporaries that these formulas do not need.
Each backward takes what its forward returned. Reductions run in float32 whatever the dtype of the
activations.

Vector kernels treat the numbers left over at the end of a thread's share one by one, and round an
exponential differently there. So where a function has one, shares end where vectors do
(`row_blocks`): a row then has the same bits whatever the rows beside it and the threads.

There are two sets of the same operations: these, and compiled ones (`compiled_ops.py`), which sweep
over memory once for each. They round differently, so an engine takes one set at start and keeps it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor

_GRAIN_NUMBERS = 32768
"""Numbers below which torch takes one thread (`at::internal::GRAIN_SIZE`)."""
_VECTOR_STEP = 64
"""Numbers of one round of a vector kernel: two vectors, 32 lanes each in bfloat16."""


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
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    for rows in row_blocks(*out.shape, torch.get_num_threads()):
        gate, up = gate_up[rows].chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=out[rows]).mul_(up)
    return out


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient for both halves, [N, 2 I]."""
    out = torch.empty_like(gate_up)
    for rows in row_blocks(*dy.shape, torch.get_num_threads()):
        gate, up = gate_up[rows].chunk(2, dim=-1)
        dgate, dup = out[rows].chunk(2, dim=-1)
        torch.mul(dy[rows], F.silu(gate), out=dup)
        torch.ops.aten.silu_backward.grad_input(dy[rows] * up, gate, grad_input=dgate)
    return out


def exponentials_(x: Tensor) -> Tensor:
    """Return `exp(x)` for rows [N, V], which may be written to."""
    filling = -x.shape[1] % _VECTOR_STEP
    if filling:
        # So that no row ends in the middle of a vector.
        x = F.pad(x, (0, filling), value=float("-inf"))
    for rows in row_blocks(*x.shape, torch.get_num_threads()):
        x[rows].exp_()
    return x[:, : x.shape[1] - filling]


def row_sums(x: Tensor) -> Tensor:
    """Return the sums of rows [N, V], as [N, 1]."""
    # A lone row would be shared out between the threads, and summed in another order.
    rows = x.repeat(2, 1) if len(x) == 1 else x
    return rows.sum(dim=1, keepdim=True)[: len(x)]


@functools.lru_cache(maxsize=4096)
def row_blocks(num_rows: int, width: int, num_threads: int) -> tuple[slice, ...]:
    """Part rows of an elementwise operation so that no thread's share ends within a vector.

    One block, unless the number of threads is not a power of two.
    """
    blocks = []
    start = 0
    while start < num_rows:
        stop = num_rows
        while stop > start + 1 and not _ends_with_vectors(stop - start, width, num_threads):
            stop -= 1
        blocks.append(slice(start, stop))
        start = stop
    return tuple(blocks)


def _ends_with_vectors(num_rows: int, width: int, num_threads: int) -> bool:
    """Whether the shares of `at::parallel_for` end with a row or, in whole vectors, within one."""
    num_numbers = num_rows * width
    shares = min(num_threads, -(-num_numbers // _GRAIN_NUMBERS))
    share = -(-num_numbers // max(shares, 1))
    return shares <= 1 or share % width == 0 or (share % _VECTOR_STEP == width % _VECTOR_STEP == 0)


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
