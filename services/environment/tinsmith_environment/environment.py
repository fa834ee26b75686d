"""The API that an environment implements: a plain class with `reset` and `step`.

One object is one episode. The object lives in one worker process, its methods are called one at a
time, and it may block: nothing else of the pod waits for it but the episodes of the same worker.
Whatever it raises ends its own episode as a typed failure; it is never a zero reward. What the
agent did wrong (an answer that cannot be read) is no failure: give it a reward and say so in
`info`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

JsonValue: TypeAlias = (
    "bool | int | float | str | list[JsonValue] | tuple[JsonValue, ...] | "
    "Mapping[str, JsonValue] | None"
)

TEXT = "text"
TOKENS = "tokens"


class InvalidSettingError(ValueError):
    """A setting of an instance is wrong; raised by `reset` before the episode begins."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting} {problem}")
        self.setting = setting
        self.problem = problem


class InvalidActionError(ValueError):
    """The action is of a kind that the environment lacks; the episode stays as it is."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image."""

    data: bytes
    format: str
    """`png` or `jpeg`."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent is shown next."""

    messages: tuple[Message, ...] = ()
    """To append to the conversation; empty after the last step."""
    images: tuple[Image, ...] = ()
    """Images of the messages, in the order of their mention."""

    @classmethod
    def of_user(cls, content: str) -> Observation:
        """Return the observation that is one message of the user."""
        return cls((Message("user", content),))


@dataclass(frozen=True, slots=True)
class Action:
    """What the agent does: text, or the exact tokens of its turn."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None

    @property
    def kind(self) -> str:
        """`text` or `tokens`."""
        return TEXT if self.text is not None else TOKENS


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action led to."""

    observation: Observation
    reward: float
    done: bool
    info: Mapping[str, JsonValue] = field(default_factory=dict)
    """Further facts about the step, as JSON."""


class Environment(abc.ABC):
    """One episode of a task. A subclass is built without arguments, or with server settings."""

    description: ClassVar[str] = ""
    """Says in a sentence what the task is."""
    default_config: ClassVar[Mapping[str, JsonValue]] = {}
    """Settings that `reset` understands, with their defaults; a request may name no others."""
    action_kinds: ClassVar[frozenset[str]] = frozenset({TEXT})
    """Kinds of actions that `step` understands."""

    @abc.abstractmethod
    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        """Begin the episode; called once.

        Args:
            seed: The same seed and config give the same episode.
            config: `default_config` with the request's values.

        Raises:
            InvalidSettingError: If a value of the config is wrong.
        """

    @abc.abstractmethod
    def step(self, action: Action) -> StepResult:
        """Apply one action; not called after `done`."""

    def close(self) -> None:  # noqa: B027 - most environments hold nothing.
        """Release what the episode holds; called when it is over or removed."""


def read_int(
    config: Mapping[str, JsonValue], setting: str, *, minimum: int, maximum: int = 2**53
) -> int:
    """Return a whole number of a config.

    Raises:
        InvalidSettingError: If it is not one, or out of range.
    """
    value = config.get(setting)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise InvalidSettingError(setting, f"must be a whole number, got {value!r}")
    if not minimum <= value <= maximum:
        raise InvalidSettingError(setting, f"must be from {minimum} to {maximum}, got {value}")
    return int(value)


def read_float(
    config: Mapping[str, JsonValue], setting: str, *, minimum: float, maximum: float
) -> float:
    """Return a number of a config.

    Raises:
        InvalidSettingError: If it is not one, or out of range.
    """
    value = config.get(setting)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidSettingError(setting, f"must be a number, got {value!r}")
    if not minimum <= value <= maximum:
        raise InvalidSettingError(setting, f"must be from {minimum} to {maximum}, got {value}")
    return float(value)


def read_str(config: Mapping[str, JsonValue], setting: str) -> str:
    """Return a text of a config.

    Raises:
        InvalidSettingError: If it is not one.
    """
    value = config.get(setting)
    if not isinstance(value, str):
        raise InvalidSettingError(setting, f"must be a string, got {type(value).__name__}")
    return value
