"""What remains of an episode: exact tokens, mask, log-probabilities, versions, rewards.

A trajectory holds one or more samples: sequences of tokens that the model really read and wrote.
Most have one; a template that rewrites its history has one for each turn. Images stand among the
tokens as that many placeholders as they take, so that every array has one place for each.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.types import EncodedTextChunk, ImageChunk, ModelInput

MASKED_VERSION = -1
"""Version of a token that no model emitted."""


class TerminationReason(enum.Enum):
    """Why an episode ended."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    PARSE_ERROR = "parse_error"
    ENVIRONMENT_FAILED = "environment_failed"
    CANCELLED = "cancelled"

    @property
    def is_infrastructure(self) -> bool:
        """Whether the episode says nothing about the policy, and must not be trained on."""
        return self in (TerminationReason.ENVIRONMENT_FAILED, TerminationReason.CANCELLED)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image, and where its placeholders stand among tokens."""

    position: int
    """Index of its first placeholder."""
    num_tokens: int
    image: ImageChunk

    @property
    def end(self) -> int:
        """Index behind its last placeholder."""
        return self.position + self.num_tokens

    def moved(self, offset: int) -> PlacedImage:
        """Return the image that many tokens later."""
        return PlacedImage(self.position + offset, self.num_tokens, self.image)


def to_model_input(tokens: Sequence[int], images: Sequence[PlacedImage]) -> ModelInput:
    """Return tokens as a prompt, its images in place of their placeholders."""
    chunks: list[EncodedTextChunk | ImageChunk] = []
    begin = 0
    for placed in images:
        if placed.position > begin:
            chunks.append(EncodedTextChunk(tokens[begin : placed.position]))
        chunks.append(dataclasses.replace(placed.image, expected_tokens=placed.num_tokens))
        begin = placed.end
    if begin < len(tokens):
        chunks.append(EncodedTextChunk(tokens[begin:]))
    return ModelInput(tuple(chunks))


@dataclass(frozen=True, slots=True, eq=False)
class TokenSample:
    """One sequence; all arrays have the shape [T]."""

    tokens: NDArray[np.int64]
    """Placeholders of images included."""
    loss_mask: NDArray[np.bool_]
    """True on sampled tokens."""
    logprobs: NDArray[np.float32]
    """As the sampler scored them; 0 where masked."""
    versions: NDArray[np.int64]
    """Weights that produced each token; `MASKED_VERSION` where masked."""
    turn_indices: NDArray[np.int64]
    """Turn that each token was sampled in; -1 where masked."""
    images: tuple[PlacedImage, ...] = ()
    """In reading order."""

    @property
    def model_input(self) -> ModelInput:
        """The sequence as the model read and wrote it."""
        return to_model_input(self.tokens.tolist(), self.images)

    @property
    def num_trained_tokens(self) -> int:
        """Number of sampled tokens."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model and what it led to."""

    num_tokens: int
    stop_reason: str
    reward: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str | int, ...] = ()
    """Where the environment said that it ends: strings, then token ids."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """An episode that is over."""

    samples: tuple[TokenSample, ...]
    turns: tuple[Turn, ...]
    reason: TerminationReason
    failure: str = ""
    """What failed; empty unless something did."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation as text, to look at; training uses the tokens."""
    key: str = ""
    """Tells the random draws of the episode from those of others."""

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the model emitted."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_truncated_turns(self) -> int:
        """Number of turns that were cut off by a limit."""
        return sum(turn.stop_reason == "length" for turn in self.turns)

    @property
    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest weights that took part; None if nothing was sampled."""
        versions = [v for s in self.samples for v in s.versions[s.loss_mask].tolist()]
        return (min(versions), max(versions)) if versions else None
