"""Names, inputs and settings of the loss functions, known without torch.

`losses.py` holds the mathematics. The two are apart so that a servicer can refuse a request before
it is accepted, in a process that never imports torch. A test keeps them in step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from tinsmith_engine.base.types import Datum, FloatArray

CLIP_BOUNDS: Mapping[str, float] = MappingProxyType(
    {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
)
"""Bounds of a probability ratio: the ratios themselves, not half-widths."""
STABLE_REINFORCE = "stable_reinforce"
"""The name of every loss that a client wrote."""


@dataclass(frozen=True, slots=True)
class LossSpec:
    """What a loss function takes."""

    name: str
    inputs: tuple[str, ...]
    """Per-token inputs that every datum must hold, float32 [T] each."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Settings with their defaults; a request may name no others."""
    optional_inputs: tuple[str, ...] = ()
    """Per-token inputs that a datum may hold: they replace the setting of the same name."""
    allows_several_targets: bool = False
    """Whether a position may have K targets, with inputs [T, K]."""
    is_of_sequence: bool = False
    """Whether a token's loss depends on other tokens of its sequence."""

    def is_active(self, datum: Datum) -> NDArray[np.bool_]:
        """Return which tokens of a datum have a loss, bool [T].

        A token has none if its weight is zero. In a policy-gradient loss it has none if neither
        an advantage nor a recorded log-probability says that the model sampled it.
        """
        if "weights" in self.inputs:
            weights = datum.loss_inputs["weights"]
            return np.asarray(np.abs(weights).reshape(len(weights), -1).max(axis=1) != 0)
        named = (name for name in self.inputs if name in datum.loss_inputs)
        return np.asarray(np.any([datum.loss_inputs[name] != 0 for name in named], axis=0))


_POLICY = ("logprobs", "advantages")

LOSS_SPECS: Mapping[str, LossSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            LossSpec("cross_entropy", ("weights",), allows_several_targets=True),
            LossSpec("importance_sampling", _POLICY),
            LossSpec("ppo", _POLICY, CLIP_BOUNDS, tuple(CLIP_BOUNDS)),
            LossSpec("cispo", _POLICY, CLIP_BOUNDS, tuple(CLIP_BOUNDS)),
            LossSpec("dro", _POLICY, {"beta": 0.05}),
            LossSpec(
                "gspo",
                (*_POLICY, "sequence_ratio_mask"),
                CLIP_BOUNDS,
                tuple(CLIP_BOUNDS),
                is_of_sequence=True,
            ),
            LossSpec(
                STABLE_REINFORCE, (*_POLICY, "sampled_mask"), {"kl_coeff": 0.0, "max_ratio": 2.0}
            ),
        )
    }
)


LOSS_NAMES = tuple(LOSS_SPECS)
"""What `Loss.name` may be."""


def full_config(loss: str, config: Mapping[str, float]) -> dict[str, float]:
    """Return the settings of a loss, defaults filled in."""
    return {**LOSS_SPECS[loss].config, **config}


def token_settings(
    datum: Datum, config: Mapping[str, float], num_tokens: int
) -> dict[str, FloatArray]:
    """Return each setting of a loss by token, float32 [T]: the datum's own, else the request's."""
    return {
        name: datum.loss_inputs.get(name, np.full(num_tokens, value, dtype=np.float32))
        for name, value in config.items()
    }
