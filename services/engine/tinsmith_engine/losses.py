"""Token-level losses: value and derivative with respect to the target's log-probability.

Each loss of one token depends on nothing but this token's log-probability and inputs. That is what
lets the head run forward and backward of a chunk of rows at once, and what makes an operation's
gradient a plain sum over its tokens, however they are split. Nothing is averaged: a caller who
wants a mean scales weights or advantages.

`lp` is the log-probability under the current weights, `q` the one that the sampler recorded, `A`
the advantage, `w` the weight and `r = exp(lp - q)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.loss_specs import LOSS_SPECS
from tinsmith_engine.values import FloatArray


class TokenLoss(NamedTuple):
    """Loss of each token and its derivative, float32 [N] each."""

    loss_N: Tensor
    dlogprobs_N: Tensor


LossFunction = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], TokenLoss]


def cross_entropy(
    logprobs_N: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> TokenLoss:
    """Return `-w lp` for each token."""
    del config
    weights_N = inputs["weights"]
    return TokenLoss(-(weights_N * logprobs_N), -weights_N)


def importance_sampling(
    logprobs_N: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> TokenLoss:
    """Return `-r A` for each token: the policy gradient, corrected for stale samples."""
    del config
    loss_N = -_ratios(logprobs_N, inputs) * inputs["advantages"]
    return TokenLoss(loss_N, loss_N)


def ppo(logprobs_N: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> TokenLoss:
    """Return `-min(r A, clip(r) A)` for each token.

    The bounds of the clip are the ratios themselves (0.8 and 1.2), not a half-width.
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    advantages_N = inputs["advantages"]
    ratios_N = _ratios(logprobs_N, inputs)
    clipped_N = ratios_N.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    objective_N = ratios_N * advantages_N
    bounded_N = clipped_N * advantages_N
    # Where the clipped branch is the smaller one it is constant in lp.
    dlogprobs_N = torch.where(objective_N <= bounded_N, -objective_N, 0.0)
    return TokenLoss(-torch.minimum(objective_N, bounded_N), dlogprobs_N)


LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
}


def _ratios(logprobs_N: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return (logprobs_N - inputs["logprobs"]).exp()


def full_config(loss: str, config: Mapping[str, float]) -> dict[str, float]:
    """Return the settings of a loss, defaults filled in."""
    return {**LOSS_SPECS[loss].config, **config}


def metrics(
    loss: str,
    config: Mapping[str, float],
    loss_N: FloatArray,
    logprobs_N: FloatArray,
    inputs: Mapping[str, FloatArray],
) -> dict[str, float]:
    """Return the metrics of one operation over all of its tokens.

    Sums run in float64 and in the order of the batch, so they do not depend on how the batch was
    split. Means are over tokens with a non-zero coefficient.

    Returns:
        `loss:sum` and `num_loss_tokens:sum`; for losses with recorded log-probabilities also
        `ratio:mean`, the estimators of KL(sampler || trainer) `kl_v1:mean` (mean of q - lp) and
        `kl_v2:mean` (mean of (q - lp)^2 / 2), and for ppo `clip_fraction:mean`.
    """
    found = {"loss:sum": float(loss_N.sum(dtype=np.float64))}
    active_N = inputs[LOSS_SPECS[loss].coefficient] != 0
    num_active = int(active_N.sum())
    found["num_loss_tokens:sum"] = float(num_active)
    if "logprobs" not in inputs:
        return found
    differences = inputs["logprobs"][active_N].astype(np.float64) - logprobs_N[active_N]
    with np.errstate(over="ignore"):
        # The loss overflows as well, which the engine reports as an error.
        ratios = np.exp(-differences)

    def mean(values: FloatArray) -> float:
        return float(values.mean()) if num_active else 0.0

    found["ratio:mean"] = mean(ratios) if num_active else 1.0
    found["kl_v1:mean"] = mean(differences)
    found["kl_v2:mean"] = mean(0.5 * differences**2)
    if "clip_low_threshold" in config:
        advantages = inputs["advantages"][active_N]
        clipped = np.where(
            advantages > 0,
            ratios > config["clip_high_threshold"],
            ratios < config["clip_low_threshold"],
        )
        found["clip_fraction:mean"] = mean(clipped)
    return found
