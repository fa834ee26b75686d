"""What the pod knows of one instance, and what callers may see of it."""

from __future__ import annotations

import asyncio
import datetime
import enum
from dataclasses import dataclass

from tinsmith.names import InstanceName
from tinsmith_environment.environment import Action, Observation, StepResult
from tinsmith_environment.workers.worker import Worker
from tinsmith_runtime.errors import EnvironmentFailedError


class InstanceState(enum.Enum):
    """Where an instance is in its life."""

    ACTIVE = "active"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class InstanceView:
    """What a caller may see of an instance."""

    name: InstanceName
    state: InstanceState
    observation: Observation
    num_steps: int
    expire_time: datetime.datetime


@dataclass(slots=True)
class AppliedStep:
    """The last step of an instance, perhaps still running."""

    index: int
    action: Action
    task: asyncio.Task[StepResult]


@dataclass(slots=True)
class LiveInstance:
    """One play of an environment, as the registry keeps it."""

    name: InstanceName
    worker: Worker
    observation: Observation
    expires_s: float
    state: InstanceState = InstanceState.ACTIVE
    num_steps: int = 0
    last_step: AppliedStep | None = None
    failure: EnvironmentFailedError | None = None
    in_worker: bool = True
    """Whether its worker still holds the environment."""

    @property
    def is_busy(self) -> bool:
        """Whether a step runs."""
        return self.last_step is not None and not self.last_step.task.done()


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceLimits:
    """How many instances there may be, and for how long."""

    max_instances: int = 1024
    max_project_instances: int = 512
    ttl_s: float = 3600.0
