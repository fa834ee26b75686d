"""The environment pod: tasks that a model plays, run in worker processes.

This module exports what the author of an environment needs and nothing heavier: worker processes
import it, and each of them should start fast.
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
    "sandbox",
]
