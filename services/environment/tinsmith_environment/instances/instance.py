"""What the pod knows of one instance, and what callers may see of it."""

from __future__ import annotations

import asyncio
import datetime
import enum
from collections.abc import Mapping
from dataclasses import dataclass

from tinsmith.environments.environment import TEXT_ALONE
from tinsmith.names import InstanceName
from tinsmith.tracing import spans
from tinsmith_environment.environment import Action, JsonValue, Observation, StepResult
from tinsmith_environment.instances.clients import ClientKey
from tinsmith_environment.instances.statistics import JobStatistics
from tinsmith_environment.workers.worker import Worker
from tinsmith_runtime.errors import EnvironmentFailedError


class InstanceState(enum.Enum):
    """Where an instance is in its life."""

    ACTIVE = "active"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewInstance:
    """A wish for an instance.

    Attributes:
        project: Tenant that owns the instance.
        environment: Name of the environment.
        seed: Makes the episode repeatable.
        config: Values over the environment's defaults.
        client_id: Of the client that the instance is to go with; empty for none.
        job: What its episode is counted under; empty for none.
    """

    project: str
    environment: str
    seed: int
    config: Mapping[str, JsonValue]
    client_id: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True)
class InstanceView:
    """What a caller may see of an instance."""

    name: InstanceName
    state: InstanceState
    observation: Observation
    num_steps: int
    expire_time: datetime.datetime
    action_kinds: frozenset[str] = TEXT_ALONE


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
    statistics: JobStatistics
    client: ClientKey | None = None
    action_kinds: frozenset[str] = TEXT_ALONE
    """Kinds of actions that the environment understands."""
    reward: float = 0.0
    """Sum over the steps so far."""
    state: InstanceState = InstanceState.ACTIVE
    num_steps: int = 0
    last_step: AppliedStep | None = None
    failure: EnvironmentFailedError | None = None
    span: spans.Span | None = None
    """The span that it was made in: its steps are parts of the same trace."""
    in_worker: bool = True
    """Whether its worker still holds the environment."""

    @property
    def is_busy(self) -> bool:
        """Whether a step runs."""
        return self.last_step is not None and not self.last_step.task.done()


def begin_step_span(instance: LiveInstance, index: int) -> spans.Span | None:
    """Begin the span of a step, below the call that asks for it or else the making of its instance.

    Steps of a stream have no call of their own. None if the step belongs to no trace.
    """
    above = spans.current() or instance.span
    if above is None:
        return None
    attributes: dict[str, spans.Value] = {
        "tinsmith.environment": instance.name.environment,
        "tinsmith.step": index,
    }
    return spans.begin(
        "environment step", service="environment", parent=above, attributes=attributes
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceLimits:
    """How many instances there may be, and for how long.

    Those that are being started are limited apart from those that are played: a start takes
    processor time, and steps are not to wait for a crowd of them.
    """

    max_instances: int = 1024
    max_project_instances: int = 512
    max_starting: int = 64
    max_project_starting: int = 32
    client_grace_s: float = 30.0
    ttl_s: float = 3600.0
