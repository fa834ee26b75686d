"""The rollout state machine: decisions without effects.

    PENDING -ContextBuilt-> GENERATING -TurnSampled-> INTERACTING -StepTaken-> GENERATING ...

and TERMINATED from everywhere. A driver (`runner`) performs what the state asks for and reports it
as an event; `Rollout.apply` is the only thing that changes a rollout. Training, validation and
inference run the same machine.

What the model read is masked, what it wrote is trained; both are kept as the exact tokens. Nothing
is appended after the last turn, so a trajectory ends with a token that the model emitted.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from tinsmith.rollouts.chat import Continuation
from tinsmith.rollouts.errors import InvalidTransitionError
from tinsmith.rollouts.trajectory import (
    MASKED_VERSION,
    PlacedImage,
    TerminationReason,
    TokenSample,
    Trajectory,
    Turn,
    to_model_input,
)
from tinsmith.types import ModelInput


class RolloutState(enum.Enum):
    """What a rollout waits for."""

    PENDING = "pending"
    """Its context."""
    GENERATING = "generating"
    """A turn of the model."""
    INTERACTING = "interacting"
    """The environment's answer."""
    TERMINATED = "terminated"
    """Nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Limits of an episode, and how turns are joined."""

    max_turns: int = 16
    max_tokens: int = 4096
    """Sampled tokens of the whole episode."""
    max_tokens_per_turn: int = 4096
    max_context_tokens: int = 32_768
    """Tokens that the model can read and write in one sample."""
    split_turns: bool = False
    """Where the chat template rewrites its history, start a new sample."""
    append_only: bool = False
    """Where the chat template rewrites its history, keep the tokens as they were."""
    parse_error_reward: float = 0.0
    """Reward of a turn whose action cannot be parsed."""
    max_observation_bytes: int = 32 << 20
    """Texts and encoded images of one observation; a larger one is a failed environment."""

    def __post_init__(self) -> None:
        for name in (
            "max_turns",
            "max_tokens",
            "max_tokens_per_turn",
            "max_context_tokens",
            "max_observation_bytes",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.split_turns and self.append_only:
            raise ValueError("split_turns and append_only exclude each other")


@dataclass(frozen=True, slots=True)
class ContextBuilt:
    """The first observation as tokens, and the images among them."""

    tokens: Sequence[int]
    images: Sequence[PlacedImage] = ()
    stop: tuple[str | int, ...] = ()
    """Where the environment says that the first turn ends."""


@dataclass(frozen=True, slots=True)
class TurnSampled:
    """A turn of the model."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    stop_reason: str


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The environment's answer to a turn."""

    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)
    continuation: Continuation | None = None
    """What follows the turn; needed unless the episode ends here."""
    stop: tuple[str | int, ...] = ()
    """Where the environment says that the next turn ends."""


@dataclass(frozen=True, slots=True)
class ParseFailed:
    """The turn holds no action."""

    problem: str


@dataclass(frozen=True, slots=True)
class EnvironmentFailed:
    """The environment is lost."""

    problem: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A call was given up, or the sampler failed."""

    problem: str = ""


Event: TypeAlias = (
    ContextBuilt | TurnSampled | StepTaken | ParseFailed | EnvironmentFailed | Cancelled
)


@dataclass(slots=True)
class _Piece:
    """A stretch of tokens of one origin."""

    tokens: tuple[int, ...]
    turn: int = -1
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    images: tuple[PlacedImage, ...] = ()


class Rollout:
    """One episode."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._samples: list[list[_Piece]] = [[]]
        self._turns: list[Turn] = []
        self._reason: TerminationReason | None = None
        self._failure = ""
        self.state = RolloutState.PENDING
        self.stop: tuple[str | int, ...] = ()
        """Where the environment says that the next turn ends, besides the model's end of turn."""

    @property
    def reason(self) -> TerminationReason | None:
        """Why the episode ended; None while it goes on."""
        return self._reason

    @property
    def num_turns(self) -> int:
        """Turns that the model took."""
        return len(self._turns)

    @property
    def context_tokens(self) -> list[int]:
        """What the model reads next, placeholders of images included."""
        return [token for piece in self._samples[-1] for token in piece.tokens]

    @property
    def context(self) -> ModelInput:
        """What the model reads next."""
        return to_model_input(self.context_tokens, _join_images(self._samples[-1]))

    @property
    def turn_budget(self) -> int:
        """Most tokens that the next turn may have; 0 or less if there is room for none."""
        num_sampled = sum(turn.num_tokens for turn in self._turns)
        return min(
            self._config.max_tokens_per_turn,
            self._config.max_tokens - num_sampled,
            self._config.max_context_tokens - self._num_context_tokens,
        )

    @property
    def is_last_turn(self) -> bool:
        """Whether the turn that was sampled is the last one by number."""
        return self.num_turns >= self._config.max_turns

    def apply(self, event: Event) -> None:
        """Take a transition.

        Raises:
            InvalidTransitionError: If the state does not know the event.
        """
        match self.state, event:
            case RolloutState.PENDING, ContextBuilt(tokens, images, stop):
                self.stop = stop
                self._samples[-1].append(_Piece(tuple(tokens), images=tuple(images)))
                self._generate()
            case RolloutState.GENERATING, TurnSampled():
                self._accept_turn(event)
            case RolloutState.INTERACTING, StepTaken():
                self._accept_step(event)
            case RolloutState.INTERACTING, ParseFailed(problem):
                self._reward_turn(self._config.parse_error_reward, {"parse_error": problem})
                self._terminate(TerminationReason.PARSE_ERROR, problem)
            case (
                (RolloutState.PENDING | RolloutState.GENERATING | RolloutState.INTERACTING),
                EnvironmentFailed(problem),
            ):
                self._terminate(TerminationReason.ENVIRONMENT_FAILED, problem)
            case (
                (RolloutState.PENDING | RolloutState.GENERATING | RolloutState.INTERACTING),
                Cancelled(problem),
            ):
                self._terminate(TerminationReason.CANCELLED, problem)
            case _:
                raise InvalidTransitionError(
                    f"{type(event).__name__} is not possible in {self.state.name}"
                )

    def to_trajectory(
        self, messages: Sequence[Mapping[str, Any]] = (), *, key: str = ""
    ) -> Trajectory:
        """Return the episode as arrays.

        Args:
            messages: The conversation as text.
            key: Tells the random draws of the episode from those of others.

        Raises:
            InvalidTransitionError: If it goes on.
        """
        if self._reason is None:
            raise InvalidTransitionError(f"a rollout in {self.state.name} has no trajectory yet")
        return Trajectory(
            samples=tuple(_join(pieces) for pieces in self._samples if pieces),
            turns=tuple(self._turns),
            reason=self._reason,
            failure=self._failure,
            messages=tuple(messages),
            key=key,
        )

    @property
    def _num_context_tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self._samples[-1])

    def _accept_turn(self, event: TurnSampled) -> None:
        lengths = {len(event.tokens), len(event.logprobs), len(event.versions)}
        if len(lengths) != 1 or not event.tokens or len(event.tokens) > self.turn_budget:
            raise InvalidTransitionError(
                f"a turn needs 1 to {self.turn_budget} tokens with a log-probability and a version "
                f"each, got {len(event.tokens)}, {len(event.logprobs)}, {len(event.versions)}"
            )
        self._samples[-1].append(
            _Piece(
                tuple(event.tokens), self.num_turns, tuple(event.logprobs), tuple(event.versions)
            )
        )
        self._turns.append(Turn(len(event.tokens), event.stop_reason, stop=self.stop))
        self.state = RolloutState.INTERACTING

    def _accept_step(self, event: StepTaken) -> None:
        self._reward_turn(event.reward, event.info)
        if event.done:
            self._terminate(TerminationReason.DONE)
        elif self.is_last_turn:
            self._terminate(TerminationReason.MAX_TURNS)
        elif event.continuation is None:
            raise InvalidTransitionError("the episode goes on, but nothing follows the turn")
        else:
            self.stop = event.stop
            self._continue(event.continuation)

    def _continue(self, continuation: Continuation) -> None:
        piece = _Piece(tuple(continuation.tokens), images=tuple(continuation.images))
        if continuation.starts_sample:
            self._samples.append([piece])
        else:
            self._samples[-1].append(piece)
        self._generate()
        if self.state is RolloutState.TERMINATED:
            # An unanswered turn is not part of the trajectory.
            self._samples[-1].pop()

    def _generate(self) -> None:
        """Go on with a turn if there is room for one."""
        if self.turn_budget > 0:
            self.state = RolloutState.GENERATING
        elif self._num_context_tokens >= self._config.max_context_tokens:
            self._terminate(TerminationReason.CONTEXT_FULL)
        else:
            self._terminate(TerminationReason.MAX_TOKENS)

    def _reward_turn(self, reward: float, info: Mapping[str, Any]) -> None:
        self._turns[-1] = replace(self._turns[-1], reward=float(reward), info=dict(info))

    def _terminate(self, reason: TerminationReason, failure: str = "") -> None:
        self.state = RolloutState.TERMINATED
        self._reason = reason
        self._failure = failure


def _join(pieces: Sequence[_Piece]) -> TokenSample:
    tokens: list[int] = []
    turns: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for piece in pieces:
        num_tokens = len(piece.tokens)
        is_masked = piece.turn < 0
        tokens += piece.tokens
        turns += [piece.turn] * num_tokens
        logprobs += [0.0] * num_tokens if is_masked else piece.logprobs
        versions += [MASKED_VERSION] * num_tokens if is_masked else piece.versions
    turn_indices = np.asarray(turns, dtype=np.int64)
    return TokenSample(
        tokens=np.asarray(tokens, dtype=np.int64),
        loss_mask=turn_indices >= 0,
        logprobs=np.asarray(logprobs, dtype=np.float32),
        versions=np.asarray(versions, dtype=np.int64),
        turn_indices=turn_indices,
        images=_join_images(pieces),
    )


def _join_images(pieces: Sequence[_Piece]) -> tuple[PlacedImage, ...]:
    """Return the images of all pieces, placed among the tokens of all pieces."""
    images: list[PlacedImage] = []
    offset = 0
    for piece in pieces:
        images += [placed.moved(offset) for placed in piece.images]
        offset += len(piece.tokens)
    return tuple(images)
