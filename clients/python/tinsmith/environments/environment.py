"""The API that an environment implements: a plain class with `reset` and `step`.

One object is one episode. The same class runs in a worker process of an environment pod, or in a
thread of the client (`tinsmith.environments.local`). Its methods are called one at a time, and it
may block. Whatever it raises ends its own episode as a typed failure; it is never a zero reward.
What the agent did wrong (an answer that cannot be read) is no failure: give it a reward and say so
in `info`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from tinsmith.images import ImageChunk
from tinsmith.text.tool_notations import ToolCall

Image = ImageChunk
"""An encoded image: its bytes, and `png` or `jpeg`."""

JsonValue: TypeAlias = (
    "bool | int | float | str | list[JsonValue] | tuple[JsonValue, ...] | "
    "Mapping[str, JsonValue] | None"
)

TEXT = "text"
TOKENS = "tokens"
TOOL_CALLS = "tool_calls"
ACTION_KINDS = (TEXT, TOKENS, TOOL_CALLS)
TEXT_ALONE = frozenset({TEXT})
TOKENS_ALONE = frozenset({TOKENS})

Content: TypeAlias = "str | Sequence[Mapping[str, str]]"
"""A text; or texts and places of images, in the form of chat templates.

`[{"type": "image"}, {"type": "text", "text": "How many sides has it?"}]`
"""


class InvalidSettingError(ValueError):
    """A setting of an instance is wrong; raised by `reset` before the episode begins."""

    def __init__(self, setting: str, problem: str) -> None:
        super().__init__(f"{setting} {problem}")
        self.setting = setting
        self.problem = problem


class InvalidActionError(ValueError):
    """The action is of a kind that the environment lacks; the episode stays as it is."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the agent may call, as its model is told of it."""

    name: str
    """Letters, digits, `_`, `.` and `-`."""
    description: str = ""
    parameters: Mapping[str, JsonValue] = field(default_factory=dict)
    """JSON schema of the arguments."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: Content
    tool_calls: tuple[ToolCall, ...] = ()
    """What an assistant's message calls, in an example that the environment shows."""
    tool_call_id: str = ""
    """The `id` of the call that a tool's message answers."""
    name: str = ""
    """The tool that a tool's message comes from."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent is shown next."""

    messages: tuple[Message, ...] = ()
    """To append to the conversation; empty after the last step."""
    images: tuple[Image, ...] = ()
    """Images of the messages, in the order of their places.

    If no message has a place for an image, they stand before the text of the first message.
    """
    tools: tuple[Tool, ...] = ()
    """Tools of the episode; only of what `reset` returns."""
    stop: tuple[str | int, ...] = ()
    """Where the next action ends, as at the model's end of turn: strings, or token ids.

    The text of the action holds the string that ended it.
    """
    tokens: tuple[int, ...] = ()
    """Token ids that follow the prompt so far as they are, without a chat template.

    In place of messages, images and tools, in each observation of the episode. It then steps on
    tokens alone.
    """

    @classmethod
    def of_user(cls, content: Content, images: Sequence[Image] = ()) -> Observation:
        """Return the observation that is one message of the user."""
        return cls((Message("user", content),), tuple(images))

    @classmethod
    def of_tool(cls, content: Content, call: ToolCall) -> Observation:
        """Return the observation that is the answer to one call of a tool."""
        return cls((Message("tool", content, tool_call_id=call.id, name=call.name),))


@dataclass(frozen=True, slots=True)
class Action:
    """What the agent does: text, with or without calls of tools, or the exact tokens of its turn.

    A turn that calls tools has its other words as `text`, which may be empty.
    """

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def kind(self) -> str:
        """`text`, `tokens` or `tool_calls`."""
        if self.tool_calls:
            return TOOL_CALLS
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
    action_kinds: ClassVar[frozenset[str]] = TEXT_ALONE
    """Kinds of actions that `step` understands: `text`, `tokens`, `tool_calls`.

    An environment that gives tools understands `tool_calls`, and `text` for turns without a call.
    One that understands `tokens` alone gets each turn exactly as it was sampled, its end included.
    Beside `text` it gets text.
    """

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
