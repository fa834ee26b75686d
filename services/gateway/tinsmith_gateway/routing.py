"""Which pod owns a resource: decided on the method and field 1 of the request, and nothing else.

Pure: names in, owners out. Where an owner listens is `Directory`'s to find out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tinsmith_runtime.errors import InvalidFieldError

SCHEDULER_SERVICE = "tinsmith.v1.SchedulerService"
TRAINER_SERVICE = "tinsmith.v1.TrainerService"
SAMPLER_SERVICE = "tinsmith.v1.SamplerService"
ENVIRONMENT_SERVICE = "tinsmith.v1.EnvironmentService"
EPISODE_SERVICE = "tinsmith.v1.EpisodeService"
OPERATIONS_SERVICE = "google.longrunning.Operations"

_RUN = re.compile(r"(projects/[^/]+/trainingRuns/[^/]+)(?:/.*)?")
_CREATION = re.compile(r"projects/[^/]+/trainingRuns/[^/]+/operations/create")
_SAMPLING_SESSION = re.compile(r"projects/[^/]+/samplingSessions/[^/]+")
_ALL_RUNS = "/trainingRuns/-"


@dataclass(frozen=True, slots=True)
class SchedulerOwner:
    """The scheduler."""


@dataclass(frozen=True, slots=True)
class RunOwner:
    """The trainer that holds a run."""

    run: str


@dataclass(frozen=True, slots=True)
class SamplingOwner:
    """The sampler of a sampling session."""

    sampling_session: str


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Any worker of a role: `trainer`, `sampler`, `environment` or `coordinator`."""

    role: str


Owner = SchedulerOwner | RunOwner | SamplingOwner | AnyOf


def owner_of(service: str, resource: str) -> Owner | None:
    """Return who answers a call; None if no pod has the service.

    Args:
        service: Full name of the gRPC service.
        resource: Field 1 of the request.

    Raises:
        InvalidFieldError: If the name can not belong to anybody.
    """
    match service:
        case "tinsmith.v1.SchedulerService":
            return SchedulerOwner()
        case "tinsmith.v1.TrainerService":
            return _owner_of_run(resource)
        case "tinsmith.v1.SamplerService":
            is_session = _SAMPLING_SESSION.fullmatch(resource) is not None
            return SamplingOwner(resource) if is_session else AnyOf("sampler")
        case "tinsmith.v1.EnvironmentService":
            return AnyOf("environment")
        case "tinsmith.v1.EpisodeService":
            return AnyOf("coordinator")
        case "google.longrunning.Operations":
            if _CREATION.fullmatch(resource):
                return SchedulerOwner()
            if not _RUN.fullmatch(resource):
                raise InvalidFieldError("name", f"is no name of an operation: {resource[:128]!r}")
            return _owner_of_run(resource)
    return None


def _owner_of_run(resource: str) -> Owner:
    match = _RUN.fullmatch(resource)
    if match is None or match[1].endswith(_ALL_RUNS):
        # Capabilities and lists over all runs: every trainer of a deployment can answer.
        return AnyOf("trainer")
    return RunOwner(match[1])


def is_authentication_free(method: str) -> bool:
    """Return whether a call needs no key: health checks alone."""
    return method.startswith("/grpc.health.v1.Health/")
