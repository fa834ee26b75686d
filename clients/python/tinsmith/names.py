"""Resource names: the one place where they are built and parsed.

A name is a path of collection and id, `projects/{project}/trainingRuns/{run}`, as aip.dev/122 has
it. `ResourceName.parse` refuses anything else with `InvalidNameError`, which servers turn into
`INVALID_ARGUMENT` and clients raise as it is.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, Self

_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_ID_PATTERN = re.compile(_ID)

DEFAULT_PROJECT = "default"
LATEST = "@latest"
"""Ends the name of a run where its live weights are meant."""


class InvalidNameError(ValueError):
    """A string is not a resource name of the expected kind."""

    def __init__(self, value: str, pattern: str) -> None:
        super().__init__(f"{value!r} is not a resource name of the form {pattern}")
        self.value = value
        self.pattern = pattern


def is_valid_id(value: str) -> bool:
    """Return whether a string may be the last part of a name: 1 to 63 of letters, digits, `._-`."""
    return _ID_PATTERN.fullmatch(value) is not None


class Named(Protocol):
    """A value with a resource name, such as a run or a checkpoint."""

    @property
    def name(self) -> str:
        """Resource name."""
        ...


def name_of(value: str | Named) -> str:
    """Return the resource name of a value that may be given as such or by its name."""
    return value if isinstance(value, str) else value.name


def shorten(name: str) -> str:
    """Return a name as people read it, without project: `run-1` of a run, `run-1/final` of a save.

    Anything but a resource name stays as it is.
    """
    parts = name.split("/")
    return "/".join(parts[3::2]) if parts[0] == "projects" and len(parts) > 3 else name


def whole_checkpoint(value: str, project: str) -> str:
    """Return the resource name of a checkpoint that may be given as `run-1/final`.

    Args:
        value: What `shorten` returns, or a resource name; anything else stays as it is.
        project: Id of the project that a short name is of.
    """
    parts = value.split("/")
    if len(parts) == 3 and parts[1] == "checkpoints":
        parts = [parts[0], parts[2]]
    if len(parts) != 2 or not all(map(is_valid_id, parts)) or parts[0] == "projects":
        return value
    return f"projects/{project}/trainingRuns/{parts[0]}/checkpoints/{parts[1]}"


def worker_tag(worker: str) -> str:
    """Return what the ids of a worker's environment instances begin with, before a `-`.

    An instance lives in the memory of one worker, and is routed to it by name.
    """
    return hashlib.sha256(worker.encode()).hexdigest()[:8]


def agent_pool(pool: str, agent: str) -> str:
    """Return the pool of an agent's trainers and samplers within the pool of its job."""
    return f"{pool}.{agent}"


def pools_in_reach(pool: str) -> tuple[str, ...]:
    """Return the pools whose environments and coordinators a caller may use, the nearest first.

    An agent of a job comes to those of the job, which no agent has of its own. All callers come to
    the shared ones, whose pool is empty. Trainers and samplers are of the caller's pool alone.
    """
    job, _, agent = pool.rpartition(".")
    # The pool of a job is its name, without dots, and a hash.
    of_job = (job,) if agent and "." in job else ()
    return (pool, *of_job, "") if pool else ("",)


def serving_pool(project: str) -> str:
    """Return the pool of the samplers that serve one project alone.

    A key of a pod is of one pool. So a sampler whose model a user chose can register for that
    user's project alone, and not as one that serves all.
    """
    # Hashed, because the name of a pool has no capitals. The hash of a job's pool is shorter.
    return f"serving.{hashlib.sha256(project.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class ResourceName:
    """Base of the name classes; a subclass is one pattern, its fields are the ids in order."""

    pattern: ClassVar[str] = ""
    max_id_length: ClassVar[int] = 63

    @classmethod
    def parse(cls, value: str) -> Self:
        """Split a name into its ids.

        Raises:
            InvalidNameError: If the string does not match the pattern of this class.
        """
        identifier = rf"([A-Za-z0-9][A-Za-z0-9._-]{{0,{cls.max_id_length - 1}}})"
        expression = re.sub(r"\{\w+\}", lambda _: identifier, cls.pattern)
        match = re.fullmatch(expression, value)
        if match is None:
            raise InvalidNameError(value, cls.pattern)
        return cls(*match.groups())

    def __str__(self) -> str:
        ids = [getattr(self, field.name) for field in fields(self)]
        return re.sub(r"\{\w+\}", "{}", self.pattern).format(*ids)


@dataclass(frozen=True, slots=True)
class ProjectName(ResourceName):
    """A tenant."""

    pattern = "projects/{project}"
    project: str


@dataclass(frozen=True, slots=True)
class KeyName(ResourceName):
    """An API key."""

    pattern = "projects/{project}/keys/{key}"
    project: str
    key: str


@dataclass(frozen=True, slots=True)
class BudgetName(ResourceName):
    """What a project may use of one thing."""

    pattern = "projects/{project}/budgets/{budget}"
    project: str
    budget: str


@dataclass(frozen=True, slots=True)
class SessionName(ResourceName):
    """A connected client."""

    pattern = "projects/{project}/sessions/{session}"
    project: str
    session: str


@dataclass(frozen=True, slots=True)
class SamplingSessionName(ResourceName):
    """A handle to sample with."""

    pattern = "projects/{project}/samplingSessions/{sampling_session}"
    project: str
    sampling_session: str


@dataclass(frozen=True, slots=True)
class RunName(ResourceName):
    """One trainable model."""

    pattern = "projects/{project}/trainingRuns/{run}"
    project: str
    run: str


@dataclass(frozen=True, slots=True)
class OperationName(ResourceName):
    """One operation of a run; its id is its sequence number, or `create`."""

    pattern = "projects/{project}/trainingRuns/{run}/operations/{operation}"
    project: str
    run: str
    operation: str

    @property
    def run_name(self) -> RunName:
        """The run that the operation belongs to."""
        return RunName(self.project, self.run)


@dataclass(frozen=True, slots=True)
class CheckpointName(ResourceName):
    """A saved state of a run."""

    pattern = "projects/{project}/trainingRuns/{run}/checkpoints/{checkpoint}"
    project: str
    run: str
    checkpoint: str

    @property
    def run_name(self) -> RunName:
        """The run that saved the checkpoint."""
        return RunName(self.project, self.run)


@dataclass(frozen=True, slots=True)
class CheckpointExportName(ResourceName):
    """A checkpoint in the layout of other tools; its id is `peft` or `merged`."""

    pattern = "projects/{project}/trainingRuns/{run}/checkpoints/{checkpoint}/exports/{export}"
    project: str
    run: str
    checkpoint: str
    export: str

    @property
    def checkpoint_name(self) -> CheckpointName:
        """The checkpoint that was exported."""
        return CheckpointName(self.project, self.run, self.checkpoint)


@dataclass(frozen=True, slots=True)
class CheckpointUploadName(ResourceName):
    """Files on their way to a run."""

    pattern = "projects/{project}/trainingRuns/{run}/checkpointUploads/{upload}"
    project: str
    run: str
    upload: str

    @property
    def run_name(self) -> RunName:
        """The run that is to have the checkpoint."""
        return RunName(self.project, self.run)


@dataclass(frozen=True, slots=True)
class EnvironmentName(ResourceName):
    """A task that can be played."""

    pattern = "projects/{project}/environments/{environment}"
    project: str
    environment: str


@dataclass(frozen=True, slots=True)
class InstanceName(ResourceName):
    """One play of an environment."""

    pattern = "projects/{project}/environments/{environment}/instances/{instance}"
    project: str
    environment: str
    instance: str


@dataclass(frozen=True, slots=True)
class MatchName(ResourceName):
    """Several agents that play side by side."""

    pattern = "projects/{project}/matches/{match}"
    project: str
    match: str


@dataclass(frozen=True, slots=True)
class RolloutBatchName(ResourceName):
    """Groups of episodes that the server plays."""

    pattern = "projects/{project}/rolloutBatches/{rollout_batch}"
    project: str
    rollout_batch: str


@dataclass(frozen=True, slots=True)
class RolloutOperationName(ResourceName):
    """The playing of a batch; its id is `generate`."""

    pattern = "projects/{project}/rolloutBatches/{rollout_batch}/operations/{operation}"
    project: str
    rollout_batch: str
    operation: str

    @property
    def batch_name(self) -> RolloutBatchName:
        """The batch that is played."""
        return RolloutBatchName(self.project, self.rollout_batch)


@dataclass(frozen=True, slots=True)
class EpisodeName(ResourceName):
    """One play of a task by a remote agent."""

    pattern = "projects/{project}/episodes/{episode}"
    project: str
    episode: str


@dataclass(frozen=True, slots=True)
class JobName(ResourceName):
    """A whole training that the cluster runs."""

    pattern = "projects/{project}/trainingJobs/{job}"
    project: str
    job: str


@dataclass(frozen=True, slots=True)
class WorkerName(ResourceName):
    """A pod that holds base models, environments or episodes.

    That of a job has namespace, job, role and index in its name.
    """

    pattern = "workers/{worker}"
    max_id_length = 200
    worker: str
