"""Trajectories to training sequences: shifted so that position i predicts token i + 1.

A sample of T tokens becomes an input of its first T - 1 tokens. Each has the token that follows as
its target, with that target's mask, log-probability and advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tinsmith.rollouts.trajectory import PlacedImage, TokenSample, Trajectory, to_model_input
from tinsmith.types import Datum, ModelInput


@dataclass(frozen=True, slots=True, eq=False)
class DatumArrays:
    """One training sequence of T tokens; all arrays have the shape [T]."""

    tokens: list[int]
    """What the model reads, placeholders of images included."""
    target_tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    """Of the targets, as they were sampled; 0 where masked."""
    advantages: NDArray[np.float32]
    """0 where masked."""
    mask: NDArray[np.float32]
    """1 where the target was sampled by the model, else 0."""
    versions: NDArray[np.int64]
    """Weights that produced each target; -1 where masked."""
    images: tuple[PlacedImage, ...] = ()
    """What the model reads in place of their placeholders among `tokens`."""

    @property
    def model_input(self) -> ModelInput:
        """What the model reads."""
        return to_model_input(self.tokens, self.images)

    @property
    def loss_fn_inputs(self) -> dict[str, NDArray[np.generic]]:
        """What policy-gradient losses take."""
        return {
            "target_tokens": self.target_tokens,
            "logprobs": self.logprobs,
            "advantages": self.advantages,
        }

    def to_datum(self) -> Datum:
        """Return the value that `forward_backward` takes, for a policy-gradient loss."""
        return Datum(self.model_input, dict(self.loss_fn_inputs))

    def to_supervised_datum(self) -> Datum:
        """Return the datum of the same tokens for `cross_entropy`."""
        return Datum(
            self.model_input,
            {"target_tokens": self.target_tokens, "weights": self.mask},
        )


def build_arrays(sample: TokenSample, advantage: float | Sequence[float]) -> DatumArrays:
    """Return the training sequence of one sample.

    Args:
        sample: At least two tokens, the first of them context.
        advantage: Of the whole episode, or of each turn of it.

    Raises:
        ValueError: If the sample is too short, begins with a sampled token, or ends with an image.
    """
    if len(sample.tokens) < 2 or sample.loss_mask[0]:
        raise ValueError("a training sequence needs a context token and one that follows it")
    if sample.images and sample.images[-1].end >= len(sample.tokens):
        raise ValueError("a training sequence ends with a token that follows its last image")
    mask = sample.loss_mask[1:]
    turns = sample.turn_indices[1:]
    advantages = np.zeros(len(mask), dtype=np.float32)
    if isinstance(advantage, int | float):
        advantages[mask] = advantage
    else:
        advantages[mask] = np.asarray(advantage, dtype=np.float32)[turns[mask]]
    return DatumArrays(
        tokens=[int(token) for token in sample.tokens[:-1]],
        target_tokens=sample.tokens[1:].copy(),
        logprobs=sample.logprobs[1:].copy(),
        advantages=advantages,
        mask=mask.astype(np.float32),
        versions=sample.versions[1:].copy(),
        images=sample.images,
    )


def trajectory_arrays(
    trajectory: Trajectory, advantage: float | Sequence[float]
) -> list[DatumArrays]:
    """Return the training sequences of an episode: one for each sample that has sampled tokens.

    Args:
        trajectory: The episode.
        advantage: Of the whole episode, or of each of its turns.

    Raises:
        ValueError: If the episode failed for infrastructure, or the advantages do not match.
    """
    if trajectory.reason.is_infrastructure:
        raise ValueError(
            f"an episode that ended as {trajectory.reason.value} must not be trained on"
        )
    if not isinstance(advantage, int | float) and len(advantage) != len(trajectory.turns):
        raise ValueError(f"{len(advantage)} advantages for {len(trajectory.turns)} turns")
    return [
        build_arrays(sample, advantage)
        for sample in trajectory.samples
        if sample.num_trained_tokens
    ]


def trajectory_datums(trajectory: Trajectory, advantage: float | Sequence[float]) -> list[Datum]:
    """Return the datums of an episode; see `trajectory_arrays`."""
    return [arrays.to_datum() for arrays in trajectory_arrays(trajectory, advantage)]
