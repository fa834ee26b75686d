"""The chance that one of several samples of a problem is right."""

from __future__ import annotations

import math


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k samples is right.

    It is `1 - C(n - c, k) / C(n, k)` of n samples of which c are right, written as a product, since
    binomials overflow. Taking the share of right samples for a chance p and returning
    `1 - (1 - p)^k` would be biased.

    Args:
        num_samples: Samples of the problem, n.
        num_correct: Those that are right, c.
        k: How many are drawn, at most `num_samples`.

    Returns:
        A number from 0 to 1.

    Raises:
        ValueError: If `k` is not from 1 to n, or c not from 0 to n.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5

    Source: Chen et al. 2021, arXiv:2107.03374, section 2.1, equation 1.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(
            f"there is no pass@{k} of {num_samples} samples, {num_correct} of them right"
        )
    num_wrong = num_samples - num_correct
    if num_wrong < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / each for each in range(num_wrong + 1, num_samples + 1))
