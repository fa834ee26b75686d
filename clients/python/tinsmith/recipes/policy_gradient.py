"""A step of policy gradients, as every recipe of reinforcement learning takes it.

What was played is sent with its tokens, log-probabilities and advantages as they are. The trainer's
own log-probabilities come back, and their largest difference from the sampled ones is a metric.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tinsmith.recipes.experience import Experience
from tinsmith.recipes.experiment.settings import RewardedConfig
from tinsmith.recipes.gradient_step import SubmittedStep, submit_data
from tinsmith.training.run_forms import TrainingRun
from tinsmith.types import FloatArray

KL = "optim/kl_sample_train_v1"
"""How far the weights that sampled are from those that are trained."""

_Z_95 = 1.96


def submit_step(
    config: RewardedConfig, run: TrainingRun, experience: Experience, learning_rate: float
) -> SubmittedStep | None:
    """Send a step, unless there is nothing to learn from."""
    if not experience.sequences:
        return None
    # The service sums over tokens; the mean over plays is the recipe's choice.
    data = [
        dataclasses.replace(
            arrays, advantages=arrays.advantages / np.float32(experience.num_plays)
        ).to_datum()
        for arrays in experience.sequences
    ]
    return submit_data(config, run, data, config.loss, learning_rate)


def wait_for_step(experience: Experience, submitted: SubmittedStep | None) -> dict[str, float]:
    """Wait for a step, and return what it says."""
    metrics = {
        "reward": experience.mean_reward,
        "trained": float(len(experience.sequences)),
        **experience.metrics,
    }
    if submitted is None:
        return metrics
    result = submitted.gradient.result()
    grad_norm = submitted.update.result().metrics["grad_norm"]
    return {
        **metrics,
        "grad_norm": grad_norm,
        **compare_logprobs(
            [arrays.logprobs for arrays in experience.sequences],
            [output.logprobs for output in result.outputs],
            [arrays.mask > 0 for arrays in experience.sequences],
        ),
    }


def wait_for_imitation(submitted: SubmittedStep) -> dict[str, float]:
    """Wait for a supervised step, and return what it says."""
    return {
        "imitation_loss": submitted.gradient.result().loss,
        "grad_norm": submitted.update.result().metrics["grad_norm"],
    }


def paired_lower_95(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the lower end of the 95 % interval of the mean gain, paired by task.

    A normal approximation of the mean of the differences.
    """
    if not len(after):
        return math.nan
    gains = np.asarray(after) - np.asarray(before)
    deviation = float(gains.std(ddof=1)) if len(gains) > 1 else math.inf
    return float(gains.mean()) - _Z_95 * deviation / math.sqrt(len(gains))


def mean_of(rewards: Sequence[float]) -> float:
    """Return the mean; NaN if there is nothing."""
    return float(np.mean(rewards)) if len(rewards) else math.nan


def compare_logprobs(
    sampled: Sequence[FloatArray], trained: Sequence[FloatArray], masks: Sequence[NDArray[np.bool_]]
) -> dict[str, float]:
    """Return how sampled and trained log-probabilities of the sampled tokens differ.

    The KL of sampler and trainer is estimated in two ways: by the mean difference, and by half the
    mean square. The names are those of tinker-cookbook. Above 0.01 training is unstable.

    Args:
        sampled: Log-probabilities of each sequence when it was sampled, [T].
        trained: Those of the trainer, [T].
        masks: Where a token was sampled, [T].
    """
    before, after = (
        np.concatenate([values[mask] for values, mask in zip(each, masks, strict=True)])
        for each in (sampled, trained)
    )
    gaps = before - after
    return {
        "mismatch": float(np.abs(gaps).max(initial=0.0)),
        KL: float(gaps.mean()),
        "optim/kl_sample_train_v2": float(0.5 * np.square(gaps).mean()),
        "optim/entropy": float(-before.mean()),
    }
