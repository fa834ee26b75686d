"""The environment pod: tasks that a model plays, run in worker processes.

This module exports what the author of an environment needs and nothing of the pod: worker processes
import it.
"""

from tinsmith_environment import sandbox
from tinsmith_environment.environment import (
    Action,
    Environment,
    Image,
    InvalidActionError,
    InvalidSettingError,
    JsonValue,
    Message,
    Observation,
    StepResult,
    Tool,
    ToolCall,
)
from tinsmith_environment.sandbox import SandboxLimits, SandboxResult, SandboxUnavailableError

__all__ = [
    "Action",
    "Environment",
    "Image",
    "InvalidActionError",
    "InvalidSettingError",
    "JsonValue",
    "Message",
    "Observation",
    "SandboxLimits",
    "SandboxResult",
    "SandboxUnavailableError",
    "StepResult",
    "Tool",
    "ToolCall",
    "sandbox",
]
