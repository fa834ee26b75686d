"""The values that the scheduler works with, free of any transport.

`encoded_model`, `encoded_error` and `encoded_status` are bytes that the scheduler hands on without
looking inside: what a worker says of a model, the `google.rpc.Status` of a creation that failed,
what a trainer says of a run.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinsmith.names import CheckpointName, JobName, RunName, SessionName
from tinsmith_runtime.adapters import AdapterConfig
from tinsmith_runtime.records import HISTORY_RETENTION_S, ReleaseMode
from tinsmith_runtime.rpc.permissions import KeyRole


class SessionState(enum.Enum):
    """Life of a session."""

    ACTIVE = "active"
    FINISHED = "finished"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Session:
    """A connected client."""

    name: str
    project: str
    state: SessionState
    display_name: str
    labels: Mapping[str, str]
    client_version: str
    create_time_s: float
    outcome: str = ""
    """How it went, as its client said when it ended it."""
    serial: int = 0
    """Order of creation in its project; assigned by the store."""
    pool: str = ""
    """That of the key that opened it."""


@dataclass(frozen=True, slots=True)
class SessionContents:
    """A session and the names of what was created in it and still exists, oldest first."""

    session: Session
    runs: tuple[str, ...]
    sampling_sessions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NewSession:
    """What a client asks for when it connects."""

    project: str
    display_name: str
    labels: Mapping[str, str]
    client_version: str


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """A handle to sample with; addresses are looked up whenever it is read."""

    name: str
    project: str
    session: str
    base_model: str
    checkpoint: str
    run: str
    serial: int = 0
    """Order of creation in its session; assigned by the store."""
    pool: str = ""
    """That of its session."""


@dataclass(frozen=True, slots=True)
class NewSamplingSession:
    """A wanted handle; exactly one of the three sources is set."""

    session: SessionName
    base_model: str | None = None
    checkpoint: CheckpointName | None = None
    run: RunName | None = None
    chosen_id: str = ""
    """The last part of its name; empty if it is to be drawn."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a trainer says of a checkpoint."""

    base_model: str
    adapter: AdapterConfig
    has_optimizer: bool
    is_published: bool


class RunState(enum.Enum):
    """Life of a run."""

    CREATING = "creating"
    ACTIVE = "active"
    MOVING = "moving"
    FAILED = "failed"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class Run:
    """One trainable model and where it is."""

    name: str
    project: str
    state: RunState
    session: str
    base_model: str
    adapter: AdapterConfig
    display_name: str
    labels: Mapping[str, str]
    create_time_s: float
    worker: str = ""
    """Name of the trainer that holds the run or was asked to; empty before that."""
    incarnation: str = ""
    """Which process of that trainer; empty where runs stay with their trainer."""
    ledger: str = ""
    """The ledger that holds the run; empty for one that only its trainer reads."""
    epoch: int = 0
    encoded_error: bytes = b""
    serial: int = 0
    """Order of creation; assigned by the store."""
    source_checkpoint: str = ""
    """The checkpoint that it begins from; empty for initial weights."""
    include_optimizer: bool = False
    """Whether it begins with the optimizer state of its source too."""
    pool: str = ""
    """That of its session: trainers elsewhere do not get it."""
    source_run: str = ""
    """The run that it is a fork of; empty if it is none."""
    source_step: int = 0
    """The step of that run."""
    reruns_step: bool = False
    """Whether it executes that step anew."""
    rerun_from: int = 0
    """The first operation that it executes anew; 0 until its trainer said so, and for none."""
    history_retention_s: float = 0.0
    """How long its past is kept after an operation ended; 0 on a row older than this column."""
    finish_time_s: float | None = None
    """When its training was done; None while it goes on."""
    finish_sequence_number: int = 0
    """The last operation of a training that is done."""
    reopened_in: str = ""
    """The session in which its training went on; empty for that of its creation."""

    @property
    def history_s(self) -> float:
        """How long its past is kept after an operation ended."""
        return self.history_retention_s or HISTORY_RETENTION_S


@dataclass(frozen=True, slots=True)
class RunStanding:
    """What the trainer of a run says of it.

    Attributes:
        run: Name of the run.
        num_pending: Operations that wait or run.
        waiting_for: What the next of them waits for, in words; empty if it runs.
        has_diverged: Whether a replay gave other bits than the first execution.
    """

    run: str
    num_pending: int
    waiting_for: str
    has_diverged: bool


class RunActivity(enum.Enum):
    """What goes on in a run that takes operations."""

    TRAINING = "training"
    WAITING = "waiting"
    FINISHED = "finished"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run as a list shows it.

    Attributes:
        run: What the scheduler knows.
        standing: What its trainer says; None if nothing is under way, or it did not answer.
        session_ended: Whether the session that created it is over.
        is_reopened: Whether a session lives in which its training went on.
    """

    run: Run
    standing: RunStanding | None
    session_ended: bool
    is_reopened: bool

    @property
    def activity(self) -> RunActivity | None:
        """What goes on in it; None unless it is active.

        Operations come first: they are there, whatever was said. Then comes what its client said,
        and last whether there is a client.
        """
        if self.run.state is not RunState.ACTIVE:
            return None
        if self.standing is not None and self.standing.num_pending:
            return RunActivity.WAITING if self.standing.waiting_for else RunActivity.TRAINING
        if self.run.finish_time_s is not None:
            return RunActivity.FINISHED
        has_client = not self.session_ended or self.is_reopened
        return RunActivity.TRAINING if has_client else RunActivity.IDLE


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A run of a session that goes on, and what its trainer says of it."""

    run: Run
    encoded_status: bytes


@dataclass(frozen=True, slots=True)
class Fork:
    """A moment of a run to begin from.

    Attributes:
        run: The source.
        step: How many optimizer steps it had.
        reruns_step: Whether the last of them is to be executed anew.
    """

    run: RunName
    step: int
    reruns_step: bool


@dataclass(frozen=True, slots=True)
class NewRun:
    """A wanted run."""

    session: SessionName
    base_model: str
    """Empty takes that of the source."""
    adapter: AdapterConfig
    display_name: str
    labels: Mapping[str, str]
    source: CheckpointName | None = None
    """The checkpoint to begin from."""
    fork: Fork | None = None
    """The run to begin from."""
    include_optimizer: bool = False
    preferred_worker: str = ""
    """The trainer that holds the source; others may not know it."""
    given_adapter_fields: frozenset[str] | None = None
    """What of `adapter` the client asked for in so many words; None for no adapter at all."""
    chosen_id: str = ""
    """The last part of its name; empty if it is to be drawn."""
    history_retention_s: float = HISTORY_RETENTION_S
    """How long its past is kept after an operation ended."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release that the trainer has not confirmed yet."""

    run: str
    worker: str
    epoch: int
    mode: ReleaseMode


class KeyState(enum.Enum):
    """Life of a key."""

    ACTIVE = "active"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class Key:
    """An API key without its secret."""

    key_id: str
    project: str
    state: KeyState
    role: KeyRole
    display_name: str
    create_time_s: float
    secret_sha256: bytes = field(repr=False)
    serial: int = 0
    pool: str = ""
    """The workers that it is bound to; empty for the shared ones."""
    job: str = ""
    """The job whose driver has it; empty for a user's."""
    job_uid: str = ""
    expire_time_s: float | None = None
    """When it is refused from; None for never."""


class WorkerRole(enum.Enum):
    """What a worker does."""

    TRAINER = "trainer"
    SAMPLER = "sampler"
    ENVIRONMENT = "environment"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model on a worker."""

    base_model: str
    encoded_model: bytes = b""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokenizer and their digest."""

    digest: str
    files: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Worker:
    """A pod that holds base models or environments."""

    name: str
    role: WorkerRole
    address: str
    models: tuple[ServedModel, ...] = ()
    max_runs: int = 0
    incarnation: str = ""
    """Drawn anew by each process of a sampler, and of a trainer whose runs may move."""
    ledger: str = ""
    """Names the ledger that it shares with others; empty for one of its own."""
    pool: str = ""
    """Only callers that are bound to it reach the worker; empty for a shared one."""
    project: str = ""
    """The one project that a sampler serves; empty for all."""
    checkpoint: str = ""
    """The one checkpoint that such a sampler serves; empty for the base model."""

    @property
    def base_models(self) -> frozenset[str]:
        """The names of its base models."""
        return frozenset(model.base_model for model in self.models)


@dataclass(frozen=True, slots=True)
class SamplerLoad:
    """What a sampler had to do when it told it; see the message of this name."""

    num_requests: int
    num_sequences: int
    num_tokens: int
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reach:
    """Whose workers are meant: those of a pool, and samplers dedicated to a project."""

    project: str
    pool: str

    def includes(self, worker: Worker) -> bool:
        """Whether a worker serves such a caller at all."""
        if worker.project:
            return not self.pool and worker.project == self.project
        return worker.pool == self.pool


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """A base model and what can be done with it now."""

    encoded_model: bytes
    is_trainable: bool
    is_sampleable: bool
    num_runs: int
    max_runs: int


Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A whole training. `spec` and `status` are the JSON of the cluster's resource."""

    name: str
    uid: str
    spec: Json
    status: Json
    labels: Mapping[str, str]
    create_time_s: float
    revision: str


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Which part of a pod's log is asked for."""

    role: str = "driver"
    index: int = 0
    follow: bool = False
    tail_lines: int = 0
    """0 for all."""
    position: str = ""
    """Where the part before ended."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """Whole lines of a log, and where the next part begins."""

    text: str
    position: str


@dataclass(frozen=True, slots=True)
class NewJobKey:
    """The wanted key of a job."""

    job: JobName
    uid: str
    key_id: str
    secret_sha256: bytes = field(repr=False)
    pool: str = ""
    display_name: str = ""
    role: KeyRole = KeyRole.MEMBER
    """What it may do; that of players is `agent`."""


class JobOutcome(enum.Enum):
    """How a driver ended."""

    NONE = ""
    SAVED = "saved"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class JobReport:
    """What the driver of a job reported last."""

    job: str
    uid: str
    step: int = 0
    max_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    run: str = ""
    checkpoint: str = ""
    checkpoint_step: int = 0
    state: bytes = field(default=b"", repr=False)
    message: str = ""
    outcome: JobOutcome = JobOutcome.NONE
    update_time_s: float | None = None
    """None before the first report."""
    step_time_s: float | None = None
    """When `step` became what it is."""
    replay_diverged: bool = False
    """Whether a replay of the run gave other bits than the first execution."""


@dataclass(frozen=True, slots=True)
class JobUpdate:
    """What a driver reports; None leaves what was reported before."""

    step: int | None = None
    max_steps: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Replaces all, unless empty."""
    run: str | None = None
    checkpoint: tuple[str, int] | None = None
    """Name, and steps that it contains."""
    state: bytes | None = field(default=None, repr=False)
    message: str | None = None
    outcome: JobOutcome = JobOutcome.NONE
    replay_diverged: bool = False
    """False leaves what was reported before."""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A span of time, seconds since the epoch; None where it is open."""

    start_s: float | None = None
    end_s: float | None = None
    """The first moment that is not part of it."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which part of a list is asked for."""

    size: int
    token: str
