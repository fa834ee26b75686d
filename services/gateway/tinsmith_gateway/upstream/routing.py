"""Which pod owns a resource: decided on the method, field 1 of the request, and the caller's pool.

Pure: names in, owners out. Where an owner listens is `Directory`'s to find out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinsmith.names import pools_in_reach, worker_tag
from tinsmith_runtime.errors import InvalidFieldError

SCHEDULER_SERVICE = "tinsmith.v1.SchedulerService"
KEY_SERVICE = "tinsmith.v1.KeyService"
JOB_SERVICE = "tinsmith.v1.JobService"
RUN_METRICS_SERVICE = "tinsmith.v1.RunMetricsService"
TRAINER_SERVICE = "tinsmith.v1.TrainerService"
CHECKPOINT_SERVICE = "tinsmith.v1.CheckpointService"
SAMPLER_SERVICE = "tinsmith.v1.SamplerService"
ENVIRONMENT_SERVICE = "tinsmith.v1.EnvironmentService"
EPISODE_SERVICE = "tinsmith.v1.EpisodeService"
COORDINATOR_SERVICE = "tinsmith.v1.CoordinatorService"
OPERATIONS_SERVICE = "google.longrunning.Operations"

_RUN = re.compile(r"(projects/[^/]+/trainingRuns/[^/]+)(?:/.*)?")
_CHECKPOINT = re.compile(r"projects/[^/]+/trainingRuns/[^/]+/checkpoints/[^/]+")
_CREATION = re.compile(r"projects/[^/]+/trainingRuns/[^/]+/operations/create")
_ROLLOUTS = re.compile(r"projects/[^/]+/rolloutBatches/[^/]+(?:/.*)?")
_SAMPLING_SESSION = re.compile(r"projects/[^/]+/samplingSessions/[^/]+")
_INSTANCE = re.compile(r"projects/[^/]+/environments/[^/]+/instances/([0-9a-f]{8})-[^/]+")
_ALL_RUNS = "/trainingRuns/-"


@dataclass(frozen=True, slots=True)
class SchedulerOwner:
    """The scheduler."""


@dataclass(frozen=True, slots=True)
class RunOwner:
    """The trainer that holds a run.

    Attributes:
        run: Name of the run.
        checkpoint: Name of the checkpoint that the call is about, which any trainer on the ledger
            of the run can answer for; empty for the run itself.
        is_any_on_ledger: Whether they can answer for what is asked of the run, too.
    """

    run: str
    checkpoint: str = ""
    is_any_on_ledger: bool = False


@dataclass(frozen=True, slots=True)
class SamplingOwner:
    """The samplers of a sampling session.

    Attributes:
        sampling_session: Its name.
        prompt: What is sampled, by which one of them is preferred; see `replicas.prompt_bytes`.
    """

    sampling_session: str
    prompt: bytes = field(default=b"", compare=False)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Any worker of a role: `trainer`, `sampler`, `environment` or `coordinator`.

    Attributes:
        role: What it does.
        pool: Of the caller, whose workers come first.
        spread: Calls with different ones go to different workers; empty for all to one.
    """

    role: str
    pool: str = ""
    spread: str = ""


@dataclass(frozen=True, slots=True)
class InstanceOwner:
    """The environment worker that has an instance, or any if it is gone.

    Attributes:
        tag: Of the worker; see `names.worker_tag`.
        pool: Of the caller.
    """

    tag: str
    pool: str = ""


Owner = SchedulerOwner | RunOwner | SamplingOwner | InstanceOwner | AnyOf


@dataclass(frozen=True, slots=True)
class RoleWorker:
    """A worker that is alive, as far as a choice among those of its role goes."""

    name: str
    address: str
    pool: str = ""
    project: str = ""


def choose_worker(owner: AnyOf | InstanceOwner, workers: Sequence[RoleWorker]) -> str:
    """Return the address of a worker of the wanted role; empty if none will do.

    Those are of the caller's pool. Environments and coordinators are also found in the other pools
    in reach. A trainer of another's job is not asked, though it shares the ledger: the call carries
    the caller's key.
    """
    if isinstance(owner, InstanceOwner):
        for worker in workers:
            if worker_tag(worker.name) == owner.tag:
                return worker.address
        return choose_worker(AnyOf("environment", owner.pool), workers)
    is_shared = owner.role in ("environment", "coordinator")
    for pool in pools_in_reach(owner.pool) if is_shared else (owner.pool,):
        eligible = [each for each in workers if each.pool == pool and not each.project]
        if eligible:
            break
    if not eligible:
        return ""
    if not owner.spread:
        return min(eligible, key=lambda each: each.name).address
    # Rendezvous hashing: a caller that repeats a call finds the same worker for as long as it
    # lives.
    return max(eligible, key=lambda each: _weight(owner.spread, each.name)).address


def _weight(spread: str, name: str) -> bytes:
    return hashlib.sha256(f"{spread}\0{name}".encode()).digest()


def owner_of(
    service: str,
    method: str,
    resource: str,
    *,
    pool: str = "",
    spread: str = "",
    prompt: bytes = b"",
) -> Owner | None:
    """Return the pod that answers a call; None if no pod has the service.

    Args:
        service: Full name of the gRPC service.
        method: Name of the method.
        resource: Field 1 of the request.
        pool: Of the caller.
        spread: Request id of a call that workers of a role share; see `AnyOf`.
        prompt: What is sampled; see `SamplingOwner`.

    Raises:
        InvalidFieldError: If no resource can have the name.
    """
    match service:
        case (
            "tinsmith.v1.SchedulerService"
            | "tinsmith.v1.KeyService"
            | "tinsmith.v1.JobService"
            | "tinsmith.v1.RunMetricsService"
            | "tinsmith.v1.UsageService"
        ):
            return SchedulerOwner()
        case "tinsmith.v1.TrainerService" | "tinsmith.v1.CheckpointService":
            return _owner_of_run(resource, pool, is_any_on_ledger=method == "ListCheckpoints")
        case "tinsmith.v1.SamplerService":
            is_session = _SAMPLING_SESSION.fullmatch(resource) is not None
            return SamplingOwner(resource, prompt) if is_session else AnyOf("sampler", pool)
        case "tinsmith.v1.EnvironmentService":
            instance = _INSTANCE.fullmatch(resource)
            if instance is not None:
                return InstanceOwner(instance[1], pool)
            return AnyOf("environment", pool, spread)
        case "tinsmith.v1.EpisodeService" | "tinsmith.v1.CoordinatorService":
            return AnyOf("coordinator", pool)
        case "google.longrunning.Operations":
            if _CREATION.fullmatch(resource):
                return SchedulerOwner()
            if _ROLLOUTS.fullmatch(resource):
                return AnyOf("coordinator", pool)
            if not _RUN.fullmatch(resource):
                raise InvalidFieldError("name", f"is no name of an operation: {resource[:128]!r}")
            return _owner_of_run(resource, pool)
    return None


def _owner_of_run(resource: str, pool: str, *, is_any_on_ledger: bool = False) -> Owner:
    match = _RUN.fullmatch(resource)
    if match is None or match[1].endswith(_ALL_RUNS):
        # Capabilities and lists over all runs: every trainer of a deployment can answer.
        return AnyOf("trainer", pool)
    checkpoint = _CHECKPOINT.match(resource)
    return RunOwner(match[1], checkpoint[0] if checkpoint is not None else "", is_any_on_ledger)
