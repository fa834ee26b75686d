"""The ledger: the table of operations and results, and the only commit point of a trainer.

An operation is acknowledged when its row is on disk, and done when its result is. Everything that a
crash may take, weights and moments included, can be computed again from these rows.

The interface is asynchronous and speaks in whole decisions ("submit this, unless the number is
taken"), so that each is atomic whatever the database. `SqliteLedger` implements it for one process
on one machine, `PostgresLedger` for several that share a database.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from tinsmith_runtime.ledger.deletion_statements import store_id
from tinsmith_runtime.ledger.history import EndedOperation, HistoryLedger, RunCopy, RunHistory
from tinsmith_runtime.ledger.postgres import PostgresLedger
from tinsmith_runtime.ledger.records import (
    Attempts,
    CheckpointChanges,
    CheckpointRecord,
    Commit,
    Cutoffs,
    Expired,
    ExportRecord,
    Holder,
    NewOperation,
    OperationRecord,
    OperationState,
    Outcome,
    ResumePoint,
    RunRecord,
    SnapshotRecord,
    StoredFile,
    StoredKind,
    TaskRecord,
)
from tinsmith_runtime.ledger.sqlite import SqliteLedger
from tinsmith_runtime.records import AuditEvent
from tinsmith_runtime.usage import UsageAmounts, UsageKey

__all__ = [
    "Attempts",
    "CheckpointChanges",
    "CheckpointRecord",
    "Commit",
    "Cutoffs",
    "EndedOperation",
    "Expired",
    "ExportRecord",
    "Holder",
    "Ledger",
    "NewOperation",
    "OperationRecord",
    "OperationState",
    "Outcome",
    "PostgresLedger",
    "ResumePoint",
    "RunCopy",
    "RunHistory",
    "RunRecord",
    "SnapshotRecord",
    "SqliteLedger",
    "StoredFile",
    "StoredKind",
    "TaskRecord",
    "store_id",
]


class Ledger(HistoryLedger, Protocol):
    """Operations, snapshots and checkpoints of runs."""

    async def open(self) -> None:
        """Make ready; call once, before anything else.

        Raises:
            ConfigError: If the database cannot be used.
        """
        ...

    @property
    def identity(self) -> str:
        """Names the database among those of a deployment; empty for one of this process alone."""
        ...

    @property
    def incarnation(self) -> str:
        """Tells this process from others on the same ledger; empty where there are none."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether other processes write to the same database, and runs move between them."""
        ...

    def hurry(self, within_s: float) -> None:
        """Let no statement wait longer for a database that is away, because the process stops.

        What was sent and not answered then raises `OutcomeUnknownError`. The rows tell the next
        process what became of it.
        """
        ...

    async def adopt_run(self, run: RunRecord) -> RunRecord:
        """Create a run or raise its epoch; return the run as it stands.

        Returns once no other process can write under an epoch before.

        Raises:
            AbortedError: If a higher epoch holds the run, or another process this one.
            RunHeldError: If the process that holds the run is alive by the database's clock.
        """
        ...

    async def release_run(self, run: str, epoch: int) -> None:
        """Let another process adopt a run at once.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        ...

    async def renew(self, ttl_s: float, among: Collection[str] | None = None) -> dict[str, int]:
        """Extend the lease of this process by the database's clock.

        Args:
            ttl_s: Until when, from now.
            among: Looks at these runs alone: of those that sleep there may be very many.

        Returns:
            The epochs of the runs that it holds, by name.
        """
        ...

    async def watch_lease(self, changed: Callable[[], None]) -> None:
        """Call back when a run of this process was taken, until the task is cancelled.

        A hint that may be lost or wrong: its hearer renews the leases, and learns what is true.
        """
        ...

    async def leave(self) -> None:
        """Give up the lease of this process, so that others need not wait for its end."""
        ...

    async def held_epoch(self, run: str) -> int | None:
        """Return the epoch under which a run was last adopted; None if there is no such run."""
        ...

    async def is_known(self, run: str) -> bool:
        """Return whether the ledger has a run, in whatever hands."""
        ...

    async def list_runs(self) -> list[RunRecord]:
        """Return all runs."""
        ...

    async def get_held_run(self, run: str) -> RunRecord | None:
        """Return a run that this process holds; None if it holds none of this name."""
        ...

    async def list_held_runs(self) -> list[RunRecord]:
        """Return all runs that this process holds."""
        ...

    async def unsettled_runs(self, among: Collection[str] | None = None) -> list[RunRecord]:
        """Return the runs of this process that have operations without a result, or diverged.

        Args:
            among: Looks at these alone.
        """
        ...

    async def delete_run(self, run: str, epoch: int) -> None:
        """Remove a run with its operations, snapshots and checkpoints.

        Its files are the caller's to remove: `list_deletions` names it until `forget_deletion`.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        ...

    async def list_deletions(self) -> list[str]:
        """Return the deleted runs whose files may still be in the store of this process."""
        ...

    async def owes_deletion(self, run: str) -> bool:
        """Return whether `list_deletions` names a run."""
        ...

    async def forget_deletion(self, run: str) -> None:
        """Note that the files of a deleted run are gone from the store of this process."""
        ...

    async def submit(self, operation: NewOperation) -> OperationRecord:
        """Accept an operation, or return the one that the same request made before.

        Raises:
            RunNotFoundError: If the run was deleted.
            FencedError: If the epoch no longer holds.
            RequestIdReusedError: If the request id has another digest.
            SequenceNumberReusedError: If another request holds the number.
            SequenceGapError: If the number was given up.
        """
        ...

    async def refuse(self, operation: NewOperation, error: bytes) -> OperationRecord | None:
        """Consume a number with a failed operation; None if the number or the run is gone.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        ...

    async def start_all(self, attempts: Sequence[Attempts]) -> None:
        """Note that operations are about to be computed.

        A number is never lowered, so that repeating the call changes nothing. A run that another
        process holds is left out: the commit of its results is refused in any case.
        """
        ...

    async def finish(
        self,
        run: str,
        epoch: int,
        outcomes: Sequence[Outcome],
        *,
        checkpoints: Sequence[CheckpointRecord] = (),
        snapshots: Sequence[SnapshotRecord] = (),
    ) -> list[OperationRecord]:
        """Commit results, all or none, and return their operations.

        Raises:
            FencedError: If the epoch no longer holds, or an operation has a result already.
        """
        ...

    async def finish_all(
        self, commits: Sequence[Commit]
    ) -> list[list[OperationRecord] | BaseException]:
        """Commit results of several runs in one group commit.

        Returns:
            For each run its operations, or why nothing of it was written; see `finish`. One run
            does not depend on another.
        """
        ...

    async def give_up(
        self, run: str, epoch: int, missing: Sequence[int], error: bytes
    ) -> list[int]:
        """Consume numbers that never arrived, so that a late arrival is told so.

        Returns:
            The numbers that were consumed; one that arrived at the last moment is not.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        ...

    async def resume_point(self, run: str) -> ResumePoint:
        """Return where a run goes on after a restart."""
        ...

    async def mark_diverged(self, run: str, epoch: int) -> None:
        """Record that a replay gave other bits than the first execution.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        ...

    async def get_operation(self, run: str, sequence_number: int) -> OperationRecord | None:
        """Return an operation."""
        ...

    async def operations_from(
        self, run: str, sequence_number: int, *, limit: int = 100
    ) -> list[OperationRecord]:
        """Return operations with at least this number, in order, payloads included."""
        ...

    async def finished_after(
        self, run: str, revision: int, *, limit: int, limit_bytes: int
    ) -> list[OperationRecord]:
        """Return finished operations in the order in which they finished."""
        ...

    async def note_retrieved(self, run: str, epoch: int, times_s: Mapping[int, float]) -> None:
        """Note when clients first got results, by number; an earlier note stays.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        ...

    async def has_expirable(self, run: str, cutoffs: Cutoffs) -> bool:
        """Return whether `expire` would drop something."""
        ...

    async def expire(self, run: str, epoch: int, cutoffs: Cutoffs) -> Expired:
        """Drop a bounded part of what is old enough; call it again until it drops nothing.

        Results go by age, requests and snapshots before the past that is kept, rows once all are
        gone: see `tinsmith_runtime.ledger.retention`. Not to be called while the run is replayed.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        ...

    async def set_history(self, run: str, epoch: int, history_retention_s: float) -> None:
        """Set how long the past of a run is kept; what is gone stays gone.

        Raises:
            FencedError: If the epoch is not that under which the run is held.
        """
        ...

    async def expired_through(self, run: str) -> int:
        """Return the highest number whose row was deleted with all below it; 0 if none was."""
        ...

    async def named_payloads(self, run: str, epoch: int, paths: Sequence[str]) -> set[str]:
        """Return those of some `payload_path` that an operation of the run still names.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        ...

    async def add_snapshot(self, snapshot: SnapshotRecord, epoch: int) -> None:
        """Record a snapshot that is in the store.

        Raises:
            FencedError: If the epoch no longer holds.
        """
        ...

    async def list_snapshots(self, run: str) -> list[SnapshotRecord]:
        """Return the snapshots of a run, newest first."""
        ...

    async def thin_snapshots(
        self, run: str, *, now_s: float, num_history: int
    ) -> list[SnapshotRecord]:
        """Forget the snapshots that neither a restart nor the past needs, and return them.

        Args:
            run: Its name.
            now_s: The time.
            num_history: Into how many parts the last 25 h are divided, one snapshot each; older
                parts are wider.
        """
        ...

    # Checkpoints, exports, and the tasks that make them.

    async def get_checkpoint(self, name: str) -> CheckpointRecord | None:
        """Return a checkpoint; it may have expired."""
        ...

    async def list_checkpoints(
        self,
        project: str,
        run: str | None,
        *,
        limit: int,
        after: tuple[float, str] | None,
        now_s: float = 0.0,
    ) -> list[CheckpointRecord]:
        """Return checkpoints, newest first, after a position; those expired at `now_s` are not."""
        ...

    async def count_stored(self, project: str, what: StoredKind, *, now_s: float) -> int:
        """Return how many checkpoints or exports a project has that have not expired."""
        ...

    async def update_checkpoint(
        self, name: str, changes: CheckpointChanges, *, key_id: str, now_s: float
    ) -> CheckpointRecord | None:
        """Change a checkpoint that has not expired, and return it; None if there is none.

        What differs from before is recorded as an event of the key; nothing is if nothing does.
        """
        ...

    async def delete_checkpoint(
        self, name: str, *, key_id: str, now_s: float, not_before_s: float = 0.0
    ) -> CheckpointRecord | None:
        """Forget a checkpoint and its exports, record it as an event of the key, and return it.

        Its files are the caller's to remove: `list_folder_deletions` names their folders, from
        `not_before_s` on, until `forget_folder_deletion`.
        """
        ...

    async def expire_checkpoints(self, *, now_s: float, not_before_s: float) -> int:
        """Forget the checkpoints and exports that expired, and return how many there were.

        Their files are as in `delete_checkpoint`; `get_expiry` remembers the checkpoints.
        """
        ...

    async def get_expiry(self, name: str) -> float | None:
        """Return when a checkpoint expired that is gone; None if none did lately."""
        ...

    async def forget_expired(self, *, before_s: float) -> None:
        """Forget checkpoints that expired before, and tasks that ended before."""
        ...

    async def note_folder_deletions(
        self, run: str, folders: Collection[str], *, not_before_s: float
    ) -> None:
        """Note that folders of a run are to be removed from its store, from a time on."""
        ...

    async def list_folder_deletions(self, *, now_s: float) -> list[str]:
        """Return the folders whose files are to be removed now from the store of this process."""
        ...

    async def forget_folder_deletion(self, folder: str) -> None:
        """Note that the files of a folder are gone from the store of this process."""
        ...

    async def get_export(self, name: str) -> ExportRecord | None:
        """Return an export."""
        ...

    async def submit_task(self, task: TaskRecord, *, max_pending: int) -> TaskRecord:
        """Accept a task, or return the one that the same request made before.

        Raises:
            RunNotFoundError: If the run was deleted.
            RequestIdReusedError: If the request id has another digest.
            QueueFullError: If `max_pending` tasks of the project wait.
        """
        ...

    async def get_task(self, name: str) -> TaskRecord | None:
        """Return a task."""
        ...

    async def list_pending_tasks(self) -> list[TaskRecord]:
        """Return the tasks without a result, oldest first."""
        ...

    async def finish_task(
        self,
        task: TaskRecord,
        epoch: int,
        *,
        finish_time_s: float,
        result: bytes | None = None,
        error: bytes | None = None,
        checkpoint: CheckpointRecord | None = None,
        export: ExportRecord | None = None,
    ) -> TaskRecord:
        """Commit the end of a task with the row that it made and its event, all or none.

        A task that failed leaves no event.

        Raises:
            FencedError: If the epoch no longer holds, or the task has a result already.
            CheckpointAlreadyExistsError: If there is a checkpoint of this name.
            CheckpointNotFoundError: If the checkpoint of the export is gone.
        """
        ...

    # What operations used; it outlives their runs.

    async def unreported_usage(self, limit: int) -> dict[UsageKey, UsageAmounts]:
        """Return totals that were not reported since they last grew.

        Those of runs that another process holds are left out.
        """
        ...

    async def note_usage_reported(
        self, totals: Mapping[UsageKey, UsageAmounts], *, forget_before: int
    ) -> None:
        """Note that the scheduler has totals, and forget those that it has of days before one."""
        ...

    async def stored_bytes(self) -> dict[tuple[str, str], int]:
        """Return what checkpoints and exports take, by project and run."""
        ...

    # The audit trail of checkpoints; it outlives them and their runs.

    async def record_event(self, event: AuditEvent) -> None:
        """Add an event that goes with no change of a row."""
        ...

    async def list_events(
        self,
        project: str,
        *,
        limit: int,
        after: tuple[float, int] | None = None,
        start_s: float | None = None,
        end_s: float | None = None,
    ) -> list[AuditEvent]:
        """Return events, oldest first.

        Args:
            project: Whose resources they are about.
            limit: How many at most.
            after: Time and serial of the event after which the list goes on.
            start_s: Leaves out what happened before.
            end_s: Leaves out what happened then or later.
        """
        ...

    async def forget_events(self, *, before_s: float) -> int:
        """Forget events that are older, and return how many there were."""
        ...

    async def close(self) -> None:
        """Finish what waits and release the database."""
        ...
