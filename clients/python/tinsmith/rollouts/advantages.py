"""Advantages: a reward compared with others, of its prompt or of its role in a game."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


class RoleBaselines:
    """Advantages of games with roles: a reward compared with what its role earns on average.

    The seat that begins may win more often, whatever the policy. A baseline for each role takes
    that off, so that a role's luck is not taken for skill. Baselines are moving averages.

    Args:
        decay: Weight of what a baseline was, at each episode.

    Source: role-conditioned advantage estimation of SPIRAL, with its decay; Liu et al. 2025,
    arXiv:2506.24119.
    """

    def __init__(self, *, decay: float = 0.95) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay is {decay}; take 0 up to, and without, 1")
        self._decay = decay
        self._baselines: dict[str, float] = {}

    @property
    def state(self) -> dict[str, float]:
        """The baseline of each role so far; `restore` takes it."""
        return dict(self._baselines)

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a `state`."""
        self._baselines = {role: float(value) for role, value in state.items()}

    def advantages(self, roles: Sequence[str], rewards: Sequence[float]) -> list[float]:
        """Return each reward minus the baseline of its role, and move the baselines.

        Baselines move episode by episode, in the order given, and each is moved before it is
        compared. A role begins at 0.

        Args:
            roles: The role of each episode.
            rewards: The reward of each episode.
        """
        values = []
        for role, reward in zip(roles, rewards, strict=True):
            baseline = self._baselines.get(role, 0.0)
            baseline = self._decay * baseline + (1.0 - self._decay) * reward
            self._baselines[role] = baseline
            values.append(reward - baseline)
        return values
