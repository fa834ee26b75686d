"""Advantages of groups: a reward compared with the others of its prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def center_rewards(rewards_PG: FloatArray, *, min_group_size: int = 2) -> FloatArray:
    """Return each reward minus the mean of its group.

    Args:
        rewards_PG: Rewards, [P, G]; NaN where an episode is missing.
        min_group_size: Groups with fewer rewards get 0: there is nothing to compare with.

    Returns:
        Float64 [P, G]; NaN stays NaN.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2, without the division by the standard
    deviation, which weighs prompts by how settled they are (Liu et al. 2025, arXiv:2503.20783).
    """
    rewards = np.asarray(rewards_PG, dtype=np.float64)
    is_present = ~np.isnan(rewards)
    num_present = is_present.sum(axis=1, keepdims=True)
    totals = np.where(is_present, rewards, 0.0).sum(axis=1, keepdims=True)
    centered: FloatArray = rewards - totals / np.maximum(num_present, 1)
    too_small = is_present & (num_present < min_group_size)
    centered[too_small] = 0.0
    return centered
