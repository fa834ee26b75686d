"""What a custom loss may call: the whole list, by the names that `torch.fx` gives.

Nothing of a client's text is ever looked up outside of these tables. Left out on purpose:
whatever draws random numbers, writes in place, turns tensors into Python objects, or calls code.
Operations that read memory by a layout of their own (`as_strided`, a view as another dtype) are
left out as well. Known without torch, so that a graph can be refused before it is accepted.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Growth(enum.Enum):
    """How many elements a result can have, seen from the arguments."""

    BOUNDED = "bounded"
    """No more than the tensors among the arguments have together."""
    BROADCAST = "broadcast"
    """As many as their shapes give when they are broadcast."""
    PRODUCT = "product"
    """No more than the product of their sizes: products of matrices and look-ups."""
    FREE = "free"
    """Numbers among the arguments decide."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on the list."""

    growth: Growth
    max_args: int | None = None
    """Most positional arguments, where an `inplace` or a deprecated switch comes behind them."""


_UNARY = (
    *("abs", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "square"),
    *("sigmoid", "tanh", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "relu"),
    *("neg", "negative", "reciprocal", "sign", "sgn", "floor", "ceil", "trunc", "round", "frac"),
    *("erf", "erfc", "lgamma", "digamma", "nan_to_num", "logit"),
    *("isnan", "isinf", "isfinite", "logical_not"),
)
_REDUCTIONS = (
    *("sum", "mean", "prod", "std", "var", "amax", "amin", "argmax", "argmin", "median"),
    *("logsumexp", "all", "any", "count_nonzero", "norm", "nansum", "nanmean"),
)
_SCANS = (
    *("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "topk"),
    *("diff", "tril", "triu"),
)
_SHAPES = (
    *("reshape", "flatten", "squeeze", "unsqueeze", "transpose", "t", "permute", "movedim"),
    *("flip", "roll", "narrow", "select", "clone", "detach", "masked_select", "numel"),
)
_BROADCASTING = (
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"),
    *("floor_divide", "remainder", "fmod", "pow", "maximum", "minimum", "fmax", "fmin"),
    *("max", "min", "logaddexp", "logaddexp2", "xlogy", "hypot", "atan2", "lerp"),
    *("clamp", "clip", "clamp_min", "clamp_max", "where", "masked_fill"),
    *("eq", "ne", "lt", "le", "gt", "ge", "isclose"),
    *("logical_and", "logical_or", "logical_xor", "addcmul", "addcdiv"),
)
_PRODUCTS = ("outer", "dot", "matmul", "mm", "mv", "bmm", "gather", "index_select")
_OF_TENSOR_ALONE = (
    *("size", "dim", "ndimension", "float", "double", "long", "int", "bool", "to", "type_as"),
    *("contiguous", "view", "view_as", "reshape_as"),
)
_OF_TORCH_ALONE = ("stack", "cat", "concat", "hstack", "vstack", "zeros_like", "ones_like")
_FREE = ("repeat_interleave", "broadcast_to", "tile")
_NN = {
    # How many positional arguments there are before the switches.
    "relu": 1,
    "silu": 1,
    "elu": 2,
    "leaky_relu": 2,
    "softmax": 2,
    "log_softmax": 2,
    "sigmoid": 1,
    "tanh": 1,
    "softplus": 3,
    "logsigmoid": 1,
    "gelu": 1,
    "l1_loss": 2,
    "mse_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "kl_div": 2,
    "binary_cross_entropy_with_logits": 2,
}
_NN_BINARY = frozenset(
    {
        *("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
        "binary_cross_entropy_with_logits",
    }
)

_BOUNDED, _BROADCAST, _PRODUCT, _FREELY = (Operation(growth) for growth in Growth)
_SHARED = {
    **dict.fromkeys((*_UNARY, *_REDUCTIONS, *_SCANS, *_SHAPES), _BOUNDED),
    **dict.fromkeys(_BROADCASTING, _BROADCAST),
    **dict.fromkeys(_PRODUCTS, _PRODUCT),
    **dict.fromkeys(_FREE, _FREELY),
}

METHODS: Mapping[str, Operation] = MappingProxyType(
    {
        **_SHARED,
        **dict.fromkeys(_OF_TENSOR_ALONE, _BOUNDED),
        **dict.fromkeys(("expand", "expand_as", "repeat"), _FREELY),
    }
)
"""Methods of tensors."""

FUNCTIONS: Mapping[str, Operation] = MappingProxyType(
    {
        **{f"torch.{name}": operation for name, operation in _SHARED.items()},
        **{f"torch.{name}": _BOUNDED for name in _OF_TORCH_ALONE},
        **{f"torch.{name}": _FREELY for name in ("zeros", "ones", "full", "full_like", "arange")},
        **{f"torch.{name}": _FREELY for name in ("linspace", "eye")},
        **{
            f"torch.nn.functional.{name}": Operation(
                Growth.BROADCAST if name in _NN_BINARY else Growth.BOUNDED, max_args
            )
            for name, max_args in _NN.items()
        },
        "torch.nn.functional.pad": Operation(Growth.FREE, 2),
        **{f"torch.special.{name}": _BOUNDED for name in ("expm1", "log1p", "entr", "logit")},
        "torch.special.xlogy": _BROADCAST,
        "operator.matmul": _PRODUCT,
        **{
            f"operator.{name}": _BROADCAST
            for name in (
                *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
                *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor"),
            )
        },
        **{f"operator.{name}": _BOUNDED for name in ("neg", "pos", "abs", "invert")},
        "operator.getitem": _FREELY,
        **{
            f"math.{name}": _BOUNDED
            for name in (
                *("sqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "pow", "fabs"),
                *("floor", "ceil", "sin", "cos", "tan", "tanh"),
            )
        },
        "getattr": _BOUNDED,
    }
)
"""Functions, by their canonical names."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        # Where `torch.fx` finds functions that are written in C++.
        "torch._C._nn.softplus": "torch.nn.functional.softplus",
        "torch._C._nn.log_sigmoid": "torch.nn.functional.logsigmoid",
        "torch._C._nn.gelu": "torch.nn.functional.gelu",
        "torch._C._special.special_expm1": "torch.special.expm1",
        "torch._C._special.special_log1p": "torch.special.log1p",
        "torch._C._special.special_entr": "torch.special.entr",
        "torch._C._special.special_logit": "torch.special.logit",
        "torch._C._special.special_xlogy": "torch.special.xlogy",
        "torch.functional.norm": "torch.norm",
    }
)
"""Other names of functions that are on the list."""

ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim", "T", "values", "indices"})
"""What may be read of a value; the last two of the pairs that `max`, `sort` and the like return."""

DTYPES = frozenset({"float32", "float64", "float", "double", "int64", "long", "int32", "bool"})
"""Types of numbers that a custom loss computes with."""

KEYWORDS = frozenset(
    {
        *("dim", "dims", "axis", "keepdim", "keepdims", "dtype", "device", "input", "other"),
        *("min", "max", "exponent", "alpha", "value", "weight", "end", "index", "mask", "self"),
        *("correction", "unbiased", "p", "nan", "posinf", "neginf", "decimals", "diagonal"),
        *("descending", "stable", "k", "largest", "sorted", "n", "shifts", "eps", "rtol", "atol"),
        *("equal_nan", "beta", "delta", "threshold", "negative_slope", "log_target", "pos_weight"),
        *("start", "step", "steps", "fill_value", "size", "repeats", "shape", "length", "tensors"),
        *("source", "destination", "start_dim", "end_dim", "dim0", "dim1", "reduction", "mode"),
        *("rounding_mode", "approximate", "vec2", "mat2", "tensor1", "tensor2", "pad", "target"),
    }
)
"""Names of arguments."""
TEXTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "reduction": frozenset({"none", "sum", "mean", "batchmean"}),
        "rounding_mode": frozenset({"floor", "trunc"}),
        "approximate": frozenset({"none", "tanh"}),
        "mode": frozenset({"constant"}),
    }
)
"""Arguments that are texts, and which."""
SWITCHES: Mapping[str, object] = MappingProxyType(
    {
        "inplace": False,
        "out": None,
        "_stacklevel": 3,
        "size_average": None,
        "reduce": None,
        "requires_grad": False,
        "non_blocking": False,
        "copy": False,
    }
)
"""Arguments that `torch.fx` records with their defaults; they have no other value here."""
