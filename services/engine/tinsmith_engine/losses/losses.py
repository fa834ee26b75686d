"""Losses: value and derivative with respect to the log-probability of each target.

Most losses of a token depend on nothing but this token's log-probability and inputs. So the head
can run forward and backward of a chunk of rows at once. An operation's gradient is a plain sum
over its tokens, however they are split. GSPO alone has a ratio of the whole
sequence; the head then scores first and goes back afterwards. Nothing is averaged: for a mean
the caller scales weights or advantages.

`lp` is the log-probability under the current weights, `q` the one that the sampler recorded, `A`
the advantage, `w` the weight and `r = exp(lp - q)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.base.loss_specs import LOSS_SPECS, STABLE_REINFORCE
from tinsmith_engine.base.types import FloatArray

TAIL_RATIO = 2.0
"""A token whose ratio is beyond this factor, up or down, is in the tail."""


class TokenLoss(NamedTuple):
    """Loss of each target and its derivative, float32 [N, K] each."""

    loss_NK: Tensor
    dlogprobs_NK: Tensor


LossFunction = Callable[[Tensor, Mapping[str, Tensor]], TokenLoss]
"""Maps log-probabilities [N, K] and the inputs and settings of each token to losses."""


def cross_entropy(logprobs_NK: Tensor, inputs: Mapping[str, Tensor]) -> TokenLoss:
    """Return `-w lp` for each target; with K targets a token learns a distribution."""
    weights_NK = inputs["weights"]
    return TokenLoss(-(weights_NK * logprobs_NK), -weights_NK)


def importance_sampling(logprobs_NK: Tensor, inputs: Mapping[str, Tensor]) -> TokenLoss:
    """Return `-r A` for each token: the policy gradient, corrected for stale samples."""
    loss_NK = -_ratios(logprobs_NK, inputs) * inputs["advantages"]
    return TokenLoss(loss_NK, loss_NK)


def ppo(logprobs_NK: Tensor, inputs: Mapping[str, Tensor]) -> TokenLoss:
    """Return `-min(r A, clip(r) A)` for each token.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    advantages_NK = inputs["advantages"]
    ratios_NK = _ratios(logprobs_NK, inputs)
    objective_NK = ratios_NK * advantages_NK
    bounded_NK = _clip(ratios_NK, inputs) * advantages_NK
    # Where the clipped branch is the smaller one it is constant in lp.
    dlogprobs_NK = torch.where(objective_NK <= bounded_NK, -objective_NK, 0.0)
    return TokenLoss(-torch.minimum(objective_NK, bounded_NK), dlogprobs_NK)


def cispo(logprobs_NK: Tensor, inputs: Mapping[str, Tensor]) -> TokenLoss:
    """Return `-clip(r) lp A` for each token, no gradient through the clipped ratio.

    Source: MiniMax 2025, arXiv:2506.13585, eq. 4.
    """
    coefficients_NK = -_clip(_ratios(logprobs_NK, inputs), inputs) * inputs["advantages"]
    return TokenLoss(coefficients_NK * logprobs_NK, coefficients_NK)


def dro(logprobs_NK: Tensor, inputs: Mapping[str, Tensor]) -> TokenLoss:
    """Return `-(lp A - beta / 2 (lp - q)^2)` for each token.

    Source: Richemond et al. 2024, arXiv:2405.19107, eq. 4, by token.
    """
    beta, advantages_NK = inputs["beta"], inputs["advantages"]
    differences_NK = logprobs_NK - inputs["logprobs"]
    penalty_NK = 0.5 * beta * differences_NK * differences_NK
    return TokenLoss(
        penalty_NK - logprobs_NK * advantages_NK, beta * differences_NK - advantages_NK
    )


def stable_reinforce(logprobs_NK: Tensor, inputs: Mapping[str, Tensor]) -> TokenLoss:
    """Return `-min(r, c) lp A + m k / 2 (lp - q)^2` for each token, `min(r, c)` held fixed.

    A policy gradient whose importance weights are cut off at `max_ratio` (c), so that a few stale
    tokens cannot dominate a step; and a pull of strength `kl_coeff` (k) towards the policy that the
    tokens were sampled from, on those of `sampled_mask` (m). The hosted service of this name has
    not published its objective. This one is Tinsmith's own, as its metrics say.

    Sources: Ionides 2008, doi:10.1198/106186008X320456 (truncated importance sampling); Espeholt et
    al. 2018, arXiv:1802.01561, eq. 1 (truncated weights in a policy gradient); Schulman 2020,
    joschu.net/blog/kl-approx.html (the estimator k2 of the divergence).
    """
    differences_NK = logprobs_NK - inputs["logprobs"]
    weights_NK = torch.minimum(differences_NK.exp(), inputs["max_ratio"])
    coefficients_NK = -weights_NK * inputs["advantages"]
    pulls_NK = inputs["kl_coeff"] * inputs["sampled_mask"] * differences_NK
    return TokenLoss(
        coefficients_NK * logprobs_NK + 0.5 * pulls_NK * differences_NK,
        coefficients_NK + pulls_NK,
    )


LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    STABLE_REINFORCE: stable_reinforce,
}


def gspo(
    logprobs_T: FloatArray, inputs: Mapping[str, FloatArray]
) -> tuple[FloatArray, FloatArray, float]:
    """Return loss and derivative of each token of one sequence, and the sequence's ratio.

    GSPO-token: with `s = exp(mean of (lp - q) where the mask is set)` and
    `s_t = stop_gradient(s) exp(lp - stop_gradient(lp))`, the loss is PPO's with `s_t` for `r`. The
    mean is taken in float64.

    Args:
        logprobs_T: Natural log, float32 [T].
        inputs: `logprobs`, `advantages`, `sequence_ratio_mask` and the clip bounds, float32 [T].

    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 12.
    """
    mask_T = inputs["sequence_ratio_mask"].astype(np.float64)
    differences_T = logprobs_T.astype(np.float64) - inputs["logprobs"]
    with np.errstate(over="ignore"):
        ratio = np.exp((differences_T * mask_T).sum() / max(mask_T.sum(), 1.0))
    advantages_T = inputs["advantages"].astype(np.float64)
    clipped_T = np.clip(ratio, inputs["clip_low_threshold"], inputs["clip_high_threshold"])
    with np.errstate(invalid="ignore", over="ignore"):
        objective_T, bounded_T = ratio * advantages_T, clipped_T * advantages_T
        loss_T = -np.minimum(objective_T, bounded_T)
        dlogprobs_T = np.where(objective_T <= bounded_T, -objective_T, 0.0)
        return loss_T.astype(np.float32), dlogprobs_T.astype(np.float32), float(ratio)


def _ratios(logprobs_NK: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return (logprobs_NK - inputs["logprobs"]).exp()


def _clip(ratios_NK: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return ratios_NK.clamp(inputs["clip_low_threshold"], inputs["clip_high_threshold"])


def metrics(
    loss: str,
    config: Mapping[str, float],
    loss_N: FloatArray,
    logprobs_N: FloatArray,
    inputs: Mapping[str, FloatArray],
) -> dict[str, float]:
    """Return the metrics of one operation over the tokens that have a loss.

    Sums run in float64 and in the order of the batch, so they do not depend on how the batch was
    split. Means are over tokens whose coefficient (weight or advantage) is not zero.

    Args:
        loss: Name of the loss.
        config: Its settings, defaults filled in.
        loss_N: Loss of each token, summed over its targets.
        logprobs_N: Log-probabilities, [N], or [N, K] for several targets.
        inputs: Inputs of the loss, and settings by token where the batch has them.

    Returns:
        `loss:sum` and `num_loss_tokens:sum`; losses with recorded log-probabilities also give
        `ratio:mean` and two estimators of KL(sampler || trainer). These are `kl_v1:mean` (mean
        of q - lp) and `kl_v2:mean` (mean of (q - lp)^2 / 2). `entropy:mean` is the mean of -lp,
        an estimate from the sampled tokens. The tails of the ratio are `ratio:max` and
        `ratio_tail_fraction:mean`, the share of tokens beyond a factor of `TAIL_RATIO`.
        `mismatch:max` is the largest |q - lp|. Losses with clip bounds add `clip_fraction:mean`,
        the sum of `clip_low_fraction:mean` and `clip_high_fraction:mean`.
        `stable_reinforce` adds `truncated_fraction:mean`, and that the objective is Tinsmith's.
    """
    coefficients = inputs["weights" if "weights" in inputs else "advantages"]
    is_active = coefficients != 0
    if is_active.ndim == 2:
        is_active = is_active.any(axis=1)
    num_active = int(is_active.sum())
    found = {
        "loss:sum": float(loss_N.sum(dtype=np.float64)),
        "num_loss_tokens:sum": float(num_active),
    }
    if "logprobs" not in inputs:
        return found
    logprobs = logprobs_N[is_active].astype(np.float64)
    differences = inputs["logprobs"][is_active] - logprobs
    with np.errstate(over="ignore"):
        # The loss overflows as well, which the engine reports as an error.
        ratios = np.exp(-differences)

    def mean(values: FloatArray) -> float:
        return float(values.mean()) if num_active else 0.0

    found["ratio:mean"] = mean(ratios) if num_active else 1.0
    found["ratio:max"] = float(ratios.max()) if num_active else 1.0
    with np.errstate(invalid="ignore"):
        is_in_tail = np.abs(differences) > math.log(TAIL_RATIO)
        largest = float(np.abs(differences).max()) if num_active else 0.0
    found["ratio_tail_fraction:mean"] = mean(is_in_tail)
    found["mismatch:max"] = largest
    found["kl_v1:mean"] = mean(differences)
    found["kl_v2:mean"] = mean(0.5 * differences**2)
    found["entropy:mean"] = mean(-logprobs)
    if loss == STABLE_REINFORCE:
        found["truncated_fraction:mean"] = mean(ratios > config["max_ratio"])
        found["tinsmith_stable_reinforce:max"] = 1.0
    if "clip_low_threshold" in config and not LOSS_SPECS[loss].is_of_sequence:
        low, high = (
            inputs[name][is_active] if name in inputs else config[name]
            for name in ("clip_low_threshold", "clip_high_threshold")
        )
        advantages = inputs["advantages"][is_active]
        is_pushed_up = advantages > 0
        found["clip_high_fraction:mean"] = mean(is_pushed_up & (ratios > high))
        found["clip_low_fraction:mean"] = mean(~is_pushed_up & (ratios < low))
        found["clip_fraction:mean"] = mean(np.where(is_pushed_up, ratios > high, ratios < low))
    return found
