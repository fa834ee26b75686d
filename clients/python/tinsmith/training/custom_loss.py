"""Losses that users write: evaluated here, turned into a pass that is linear in log-probabilities.

A loss C of the log-probabilities has the gradient dC/dlogprob, and `cross_entropy`, which is
`-sum(weights * logprobs)`, has the gradient `-weights`. So the same gradient reaches the weights of
the model when `weights = -dC/dlogprob`. torch is imported only for losses that are written with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.errors import InvalidArgumentError
from tinsmith.types import Datum, FloatArray

CustomLoss = Callable[[Sequence[Datum], list[Any]], tuple[Any, ...]]
"""`loss(data, logprobs)`, with log-probabilities as a list, [T] or [T, K] for each datum.

A loss written with torch gets tensors that require grad and returns `(value, metrics)`. A loss that
computes its own gradients gets numpy arrays and returns `(value, gradients, metrics)`. Which of the
two it is shows when it is called; `@tinsmith.numpy_loss` says so beforehand.
"""


@dataclass(frozen=True, slots=True)
class EvaluatedLoss:
    """Value and gradient of a custom loss."""

    value: float
    gradients: list[FloatArray]
    """By datum: dC/dlogprob, float32 [T] or [T, K]."""
    metrics: dict[str, float]


def numpy_loss(loss_fn: CustomLoss) -> CustomLoss:
    """Mark a loss that takes numpy arrays and returns `(value, gradients, metrics)`."""
    loss_fn.is_numpy_loss = True  # type: ignore[attr-defined]
    return loss_fn


def evaluate_loss(
    loss_fn: CustomLoss, data: Sequence[Datum], logprobs: Sequence[FloatArray]
) -> EvaluatedLoss:
    """Return value and gradient of a custom loss.

    Raises:
        InvalidArgumentError: If the loss does not return what it should.
    """
    torch = None if getattr(loss_fn, "is_numpy_loss", False) else _import_torch()
    if torch is not None:
        inputs = [torch.tensor(array, requires_grad=True) for array in logprobs]
        try:
            with torch.enable_grad():
                returned = loss_fn(data, inputs)
        except RuntimeError as error:
            if "numpy() on Tensor that requires grad" not in str(error):
                raise
            torch = None  # The loss is written with numpy, in a process that has torch too.
    if torch is None:
        returned = loss_fn(data, [array.copy() for array in logprobs])
    if len(returned) == 3:
        value, gradients, metrics = returned
        arrays = [_as_array(gradient) for gradient in gradients]
    elif torch is not None and len(returned) == 2:
        value, metrics = returned
        if not getattr(value, "requires_grad", False):
            raise InvalidArgumentError(
                "the value of the custom loss does not depend on the log-probabilities",
                remedy="compute it from the tensors that it is given, without detach()",
            )
        found = torch.autograd.grad(value, inputs, allow_unused=True)
        arrays = [
            np.zeros_like(array) if gradient is None else _as_array(gradient)
            for array, gradient in zip(logprobs, found, strict=True)
        ]
    else:
        raise InvalidArgumentError(
            f"the custom loss returned {len(returned)} values",
            remedy="return (value, gradients, metrics), or (value, metrics) of torch tensors",
        )
    shapes = [array.shape for array in arrays]
    if shapes != [array.shape for array in logprobs]:
        raise InvalidArgumentError(
            f"the gradients of the custom loss have shapes {shapes}, not those of the"
            " log-probabilities",
            reason="SHAPE_MISMATCH",
        )
    if not all(np.isfinite(array).all() for array in arrays):
        raise InvalidArgumentError(
            "the gradient of the custom loss is NaN or infinite", reason="NOT_FINITE"
        )
    return EvaluatedLoss(_as_float(value), arrays, _named_metrics(metrics))


def forward_data(data: Sequence[Datum]) -> list[Datum]:
    """Return the batch for the forward pass: weight 1 everywhere, so each token is scored."""
    ones = [np.ones_like(_targets(datum), dtype=np.float32) for datum in data]
    return _weighted(data, ones)


def linear_data(data: Sequence[Datum], gradients: Sequence[FloatArray]) -> list[Datum]:
    """Return the batch whose cross-entropy has the given gradient by log-probability."""
    return _weighted(data, [-gradient for gradient in gradients])


def _weighted(data: Sequence[Datum], weights: Sequence[FloatArray]) -> list[Datum]:
    return [
        Datum(datum.model_input, {"target_tokens": _targets(datum), "weights": array})
        for datum, array in zip(data, weights, strict=True)
    ]


def _targets(datum: Datum) -> Any:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise InvalidArgumentError(
            "a datum lacks target_tokens, which a custom loss needs", reason="MISSING_LOSS_INPUT"
        )
    return datum.loss_fn_inputs["target_tokens"]


def _import_torch() -> Any:
    """Return torch if there is one."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def _as_array(value: Any) -> FloatArray:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value, dtype=np.float32)


def _named_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: _as_float(value) for name, value in metrics.items()}


def _as_float(value: Any) -> float:
    return float(value.detach() if hasattr(value, "detach") else value)
