"""What an environment implements; it lies in the SDK, since the same class runs in the client."""

from __future__ import annotations

from tinsmith.environments.environment import (
    TEXT,
    TOKENS,
    TOOL_CALLS,
    Action,
    Content,
    Environment,
    Image,
    InvalidActionError,
    InvalidSettingError,
    JsonValue,
    Message,
    Observation,
    StepResult,
    Tool,
    read_float,
    read_int,
    read_str,
)
from tinsmith.text.tool_notations import ToolCall

__all__ = [
    "TEXT",
    "TOKENS",
    "TOOL_CALLS",
    "Action",
    "Content",
    "Environment",
    "Image",
    "InvalidActionError",
    "InvalidSettingError",
    "JsonValue",
    "Message",
    "Observation",
    "StepResult",
    "Tool",
    "ToolCall",
    "read_float",
    "read_int",
    "read_str",
]
