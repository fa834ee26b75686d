"""The decoder's elementwise operations, compiled: one sweep over memory for each.

torch.compile makes C++ of them on a CPU (it needs a compiler there) and Triton kernels on a GPU.
The number of rows is dynamic, so there is one kernel whatever a pass holds. A row is computed by
the same instructions wherever it lies; the start-up probe of `exactness.py` checks that. Every
operation is compiled at start, with the shapes of the model: a kernel that is compiled in the
middle of a training would hold up all runs for seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor

from tinsmith_engine.model.decoder_config import DecoderConfig
from tinsmith_engine.products.ops import Ops
from tinsmith_runtime.errors import ConfigError

# Neither 0 nor 1, which are compiled for themselves, nor a size of a model.
_WARM_UP_ROWS = (48, 80)


def compile_ops(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Ops:
    """Compile the operations for a model; takes half a minute once, seconds from torch's cache.

    Raises:
        ConfigError: There is no compiler, or it fails.
    """
    ops = Ops(
        name="compiled",
        rms_norm=_compiled(_rms_norm),
        add_rms_norm=_compiled(_add_rms_norm),
        rms_norm_backward=_compiled(_rms_norm_backward),
        rotate=_compiled(_rotate),
        norm_rotate=_compiled(_norm_rotate),
        norm_rotate_backward=_compiled(_norm_rotate_backward),
        swiglu=_compiled(_swiglu),
        swiglu_backward=_compiled(_swiglu_backward),
    )
    try:
        with torch.no_grad():
            for num_rows in _WARM_UP_ROWS:
                _warm_up(ops, config, dtype, device, num_rows)
    except Exception as error:
        # Whatever the compiler raises, the remedy is the same.
        raise ConfigError(
            f"the kernels of this model cannot be compiled ({type(error).__name__}: {error}); "
            "install a C++ compiler, or start with compile=false"
        ) from error
    return ops


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled


def _warm_up(
    ops: Ops, config: DecoderConfig, dtype: torch.dtype, device: torch.device, num_rows: int
) -> None:
    """Call each operation as the decoder does."""

    def rows(*shape: int, like: torch.dtype = dtype) -> Tensor:
        tensor = torch.ones(num_rows, *shape, dtype=like, device=device)
        torch._dynamo.mark_dynamic(tensor, 0)
        return tensor

    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_qk_heads
    weight = torch.ones(hidden, dtype=dtype, device=device)
    x, inverse_rms = rows(hidden), rows(1, like=torch.float32)
    ops.rms_norm(x, weight, config.rms_eps)
    ops.add_rms_norm(rows(hidden), x, weight, config.rms_eps)
    ops.rms_norm_backward(rows(hidden), x, inverse_rms, weight, None)
    ops.rms_norm_backward(rows(hidden), x, inverse_rms, weight, rows(hidden))
    # As the decoder has them: a view of the fused q, k and v, and one tensor.
    fused = rows(config.num_qk_heads + config.num_kv_heads, config.head_dim)
    view, whole = fused[:, :heads], rows(heads, config.head_dim)
    torch._dynamo.mark_dynamic(view, 0)
    cos, sin = rows(1, config.head_dim // 2), rows(1, config.head_dim // 2)
    for rotated in (view, whole):
        ops.rotate(rotated, cos, sin)
    if config.has_qk_norm:
        qk_weight = torch.ones(heads, config.head_dim, dtype=dtype, device=device)
        ops.norm_rotate(view, qk_weight, config.rms_eps, cos, sin)
        norms = rows(heads, 1, like=torch.float32)
        ops.norm_rotate_backward(whole, view, norms, qk_weight, cos, sin)
    ops.swiglu(rows(2 * inner))
    ops.swiglu_backward(rows(inner), rows(2 * inner))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x32 = x.float()
    inverse_rms = torch.rsqrt((x32 * x32).mean(-1, keepdim=True) + eps)
    return (x32 * inverse_rms).to(x.dtype) * weight, inverse_rms


def _add_rms_norm(
    delta: Tensor, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = delta + x
    return total, *_rms_norm(total, weight, eps)


def _rms_norm_backward(
    dy: Tensor, x: Tensor, inverse_rms: Tensor, weight: Tensor, residual: Tensor | None
) -> Tensor:
    x32 = x.float()
    scaled = dy.float() * weight.float()
    mean = (scaled * x32).mean(-1, keepdim=True)
    dx = (scaled * inverse_rms - x32 * mean * inverse_rms.pow(3)).to(x.dtype)
    return dx if residual is None else residual + dx


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _norm_rotate(
    heads: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    normed, inverse_rms = _rms_norm(heads, weight, eps)
    return _rotate(normed, cos, sin), inverse_rms


def _norm_rotate_backward(
    dy: Tensor, heads: Tensor, inverse_rms: Tensor, weight: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    return _rms_norm_backward(_rotate(dy, cos, -sin), heads, inverse_rms, weight, None)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    dy32 = dy.float()
    sigmoid = torch.sigmoid(gate)
    dgate = dy32 * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat([dgate, dy32 * gate * sigmoid], dim=-1).to(dy.dtype)
