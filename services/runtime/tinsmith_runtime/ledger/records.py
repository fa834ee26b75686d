"""Rows of the ledger as values."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinsmith_runtime.errors import AbortedError
from tinsmith_runtime.usage import NOTHING, UsageAmounts

StoredKind = Literal["checkpoints", "exports"]
"""What a project keeps until it is deleted or expires."""


class FencedError(AbortedError):
    """Another process holds the run under a higher epoch; this one must stop."""

    reason = "ABORTED"


class OperationState(enum.StrEnum):
    """Where an operation is in its life; what runs at the moment is known to the trainer alone."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


GIVEN_UP_KIND = "given_up"
"""Kind of the rows that stand for numbers which never arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """A run, as the trainer must know it to build it again.

    Attributes:
        name: Resource name.
        base_model: Name of the base model.
        adapter: What is trained, as JSON.
        epoch: The fence.
        version: Optimizer steps applied.
        replay_diverged: Whether a replay gave other bits than the first execution.
        history_retention_s: How long its past is kept, when the row was read; 0 is the default.
    """

    name: str
    base_model: str
    adapter: str
    epoch: int
    version: int = 0
    replay_diverged: bool = False
    history_retention_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Holder:
    """One process of a trainer on a shared ledger.

    Attributes:
        worker: Name of the trainer, the same after a restart.
        incarnation: Drawn anew by each process.
    """

    worker: str
    incarnation: str

    @property
    def name(self) -> str:
        """How the ledger names it."""
        return f"{self.worker}/{self.incarnation}"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewOperation:
    """An operation that asks to be accepted.

    Attributes:
        epoch: The fence: nothing is accepted if another epoch holds the run.
        digest: SHA-256 of the request.
        payload: The request, or None if `payload_path` says where it is stored.
        seen_through: As of `OperationRecord`.
        key_id: The key that it is sent with; empty if that is not known.
    """

    run: str
    epoch: int
    sequence_number: int
    kind: str
    request_id: str
    digest: bytes
    payload: bytes | None
    payload_path: str | None
    submit_time_s: float
    seen_through: int = 0
    key_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationRecord:
    """An operation.

    Attributes:
        result: The encoded response, once it succeeded.
        error: The encoded `google.rpc.Status`, once it failed.
        num_attempts: How often it was begun.
        revision: Position in the order in which the run's operations finished, from 1; 0 before.
        retrieve_time_s: When a client first got the result, about.
        result_digest: SHA-256 of a result that is not kept any more.
        seen_through: When it was accepted, every operation up to this number had succeeded, or its
            failure had been delivered.
        key_id: The key that it was sent with; empty if that is not known.
    """

    run: str
    sequence_number: int
    kind: str
    request_id: str | None
    digest: bytes
    state: OperationState
    num_attempts: int
    submit_time_s: float
    finish_time_s: float | None = None
    revision: int = 0
    result: bytes | None = None
    error: bytes | None = None
    plan: str | None = None
    payload: bytes | None = None
    payload_path: str | None = None
    retrieve_time_s: float | None = None
    result_digest: bytes | None = None
    seen_through: int = 0
    key_id: str = ""

    @property
    def is_expired(self) -> bool:
        """Whether it finished so long ago that what became of it is not kept."""
        is_finished = self.state is not OperationState.PENDING
        return is_finished and self.result is None and self.error is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cutoffs:
    """What is old enough to be dropped, in seconds since the epoch.

    Attributes:
        now_s: The time, from which a run counts back what it keeps of its past: requests, and the
            rows of those whose result is dropped as well. A repeated request finds its operation
            there.
        retrieved_s: Results that were retrieved before, unless the run keeps its past for longer.
        unretrieved_s: Results that were never retrieved, of operations that ended before; likewise.
        boundary_kinds: Kinds of operations that make a version. The row of the last of them whose
            request is dropped stays: what a run at rest was after it can then be named.
    """

    now_s: float
    retrieved_s: float
    unretrieved_s: float
    boundary_kinds: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Expired:
    """What one write dropped of a run.

    Attributes:
        snapshots: Their files are the caller's to remove.
    """

    num_results: int = 0
    num_payloads: int = 0
    num_rows: int = 0
    snapshots: tuple[SnapshotRecord, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was due."""
        return not (self.num_results or self.num_payloads or self.num_rows or self.snapshots)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Where a run goes on after a restart.

    Attributes:
        next_sequence_number: The lowest number without a result.
        pending: Accepted operations without a result, in order, payloads included.
        finished_ahead: Refused operations above `next_sequence_number`.
        latest_revision: Revision of the operation that finished last.
    """

    next_sequence_number: int
    pending: list[OperationRecord]
    finished_ahead: list[OperationRecord]
    latest_revision: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationOutcome:
    """What became of an operation: exactly one of `result` and `error` is set.

    Attributes:
        version: Optimizer steps of the run after it.
        plan: How it was computed, as far as that changes bits: numerics fingerprint and split.
        used: What it is charged with.
    """

    sequence_number: int
    result: bytes | None
    error: bytes | None
    version: int
    plan: str
    finish_time_s: float
    used: UsageAmounts = NOTHING


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """Which attempts of a run's operations begin.

    Attributes:
        run: Its name.
        epoch: Under which the run is held.
        numbers: The attempt, from 1, of each sequence number.
    """

    run: str
    epoch: int
    numbers: Mapping[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The results of consecutive operations of one run, which become durable all or none.

    Attributes:
        epoch: The fence: nothing is written if another epoch holds the run.
    """

    run: str
    epoch: int
    outcomes: Sequence[OperationOutcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotRecord:
    """An automatic save of a run: its state after the operation `sequence_number`.

    Attributes:
        folder: Where its files are, relative to the store.
        sha256: Hash of its manifest.
    """

    run: str
    sequence_number: int
    version: int
    folder: str
    sha256: str
    create_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """One file of a checkpoint or export; `sha256` in hex."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A save that the user named.

    Attributes:
        kind: `training` or `sampler`.
        adapter: What was trained, as JSON.
        folder: Where its files are, relative to the store.
        sha256: Hash of its manifest.
        expire_time_s: When it expires; None keeps it until it is deleted.
        is_published: Whether every project may read it by its name.
        files: What its manifest lists.
        source_checkpoint: The checkpoint that it is a copy of; empty if it is none.
    """

    name: str
    run: str
    kind: str
    base_model: str
    adapter: str
    version: int
    sequence_number: int
    size_bytes: int
    folder: str
    sha256: str
    create_time_s: float
    labels: Mapping[str, str]
    expire_time_s: float | None = None
    is_published: bool = False
    files: tuple[StoredFile, ...] = ()
    source_checkpoint: str = ""

    @property
    def project(self) -> str:
        """Id of the project that owns it."""
        return self.name.split("/")[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointChanges:
    """What of a checkpoint is to change; None leaves it, but for `expire_time_s`.

    Attributes:
        sets_expiry: Whether `expire_time_s` is to be taken; None then means never.
    """

    labels: Mapping[str, str] | None = None
    is_published: bool | None = None
    sets_expiry: bool = False
    expire_time_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRecord:
    """A checkpoint in the layout of other tools.

    Attributes:
        format: `peft` or `merged`.
        folder: Where its files are, relative to the store.
        sha256: Hash of its manifest.
    """

    name: str
    checkpoint: str
    run: str
    format: str
    folder: str
    sha256: str
    size_bytes: int
    files: tuple[StoredFile, ...]
    create_time_s: float
    expire_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """A copy, export or import: work on files, which is in no run's order.

    Attributes:
        name: Name of the operation.
        kind: `copy`, `export` or `import`.
        checkpoint: What is copied, exported or imported to.
        digest: SHA-256 of the request.
        payload: The request.
        result: The encoded response, once it succeeded.
        error: The encoded `google.rpc.Status`, once it failed.
        key_id: The key that asked for it; empty if that is not known.
    """

    name: str
    run: str
    kind: str
    checkpoint: str
    digest: bytes
    payload: bytes
    submit_time_s: float
    state: OperationState = OperationState.PENDING
    finish_time_s: float | None = None
    result: bytes | None = None
    error: bytes | None = None
    key_id: str = ""
