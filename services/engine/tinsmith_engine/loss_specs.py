"""Names, inputs and settings of the loss functions, known without torch.

`losses.py` holds the mathematics. The two are apart so that a servicer can refuse a request before
it is accepted, in a process that never imports torch. A test keeps them in step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What a loss function takes."""

    name: str
    inputs: tuple[str, ...]
    """Per-token inputs that every datum must hold, float32 [T] each."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Settings with their defaults; a request may name no others."""
    coefficient: str = "weights"
    """The input that multiplies a token's loss: where it is 0, the token has no gradient."""


LOSS_SPECS: Mapping[str, LossSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            LossSpec("cross_entropy", ("weights",)),
            LossSpec("importance_sampling", ("logprobs", "advantages"), coefficient="advantages"),
            LossSpec(
                "ppo",
                ("logprobs", "advantages"),
                {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
                coefficient="advantages",
            ),
        )
    }
)
