"""Learning rates by step; the client sends one with each optimizer step."""

from __future__ import annotations


def linear_schedule(
    step: int, *, peak: float, num_steps: int, num_warmup_steps: int = 0, floor: float = 0.0
) -> float:
    """Return a rate that rises over the warm-up and falls linearly to a share of its peak.

    Args:
        step: From 0.
        peak: The highest rate.
        num_steps: Steps in all.
        num_warmup_steps: Steps of the rise.
        floor: Share of the peak below which it does not fall, in [0, 1].
    """
    rise = min(1.0, (step + 1) / num_warmup_steps) if num_warmup_steps else 1.0
    return peak * rise * max(floor, 1.0 - step / num_steps)
