"""The part of the ledger that is about checkpoints, as transactions on a SQL database."""

from __future__ import annotations

import sqlalchemy as sa

from tinsmith_runtime.errors import CheckpointNotFoundError, RunNotFoundError
from tinsmith_runtime.ledger import audit_statements, checkpoint_statements, statements
from tinsmith_runtime.ledger.records import (
    CheckpointChanges,
    CheckpointRecord,
    ExportRecord,
    FencedError,
    StoredKind,
    TaskRecord,
)
from tinsmith_runtime.ledger.sql_usage import SqlUsage
from tinsmith_runtime.records import AuditEvent


class SqlCheckpoints(SqlUsage):
    """Checkpoints, exports, and the tasks that make them."""

    async def get_checkpoint(self, name: str) -> CheckpointRecord | None:
        """Return a checkpoint; it may have expired."""
        return await self._database.read(
            lambda connection: checkpoint_statements.get_checkpoint(connection, name)
        )

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
        return await self._database.read(
            lambda connection: checkpoint_statements.list_checkpoints(
                connection, project, run, limit=limit, after=after, now_s=now_s
            )
        )

    async def count_stored(self, project: str, what: StoredKind, *, now_s: float) -> int:
        """Return how many checkpoints or exports a project has that have not expired."""
        count = checkpoint_statements.COUNTS[what]
        return await self._database.read(lambda connection: count(connection, project, now_s))

    async def update_checkpoint(
        self, name: str, changes: CheckpointChanges, *, key_id: str, now_s: float
    ) -> CheckpointRecord | None:
        """Change a checkpoint that has not expired, and return it; None if there is none.

        What differs from before is recorded as an event of the key; nothing is if nothing does.
        """
        return await self._database.write(
            lambda connection: checkpoint_statements.update_checkpoint(
                connection, name, changes, key_id=key_id, now_s=now_s
            )
        )

    async def delete_checkpoint(
        self, name: str, *, key_id: str, now_s: float, not_before_s: float = 0.0
    ) -> CheckpointRecord | None:
        """Forget a checkpoint and its exports, record it as an event of the key, and return it.

        Its files are the caller's to remove: `list_folder_deletions` names their folders, from
        `not_before_s` on, until `forget_folder_deletion`.
        """
        return await self._database.write(
            lambda connection: checkpoint_statements.delete_checkpoint(
                connection, name, key_id=key_id, now_s=now_s, not_before_s=not_before_s
            )
        )

    async def expire_checkpoints(self, *, now_s: float, not_before_s: float) -> int:
        """Forget the checkpoints and exports that expired, and return how many there were.

        Their files are as in `delete_checkpoint`; `get_expiry` remembers the checkpoints.
        """
        return await self._database.write(
            lambda connection: checkpoint_statements.expire(
                connection, now_s=now_s, not_before_s=not_before_s
            )
        )

    async def get_expiry(self, name: str) -> float | None:
        """Return when a checkpoint expired that is gone; None if none did lately."""
        return await self._database.read(
            lambda connection: checkpoint_statements.tombstone(connection, name)
        )

    async def forget_expired(self, *, before_s: float) -> None:
        """Forget checkpoints that expired before, and tasks that ended before."""
        await self._database.write(
            lambda connection: checkpoint_statements.forget_before(connection, before_s)
        )

    async def get_export(self, name: str) -> ExportRecord | None:
        """Return an export."""
        return await self._database.read(
            lambda connection: checkpoint_statements.get_export(connection, name)
        )

    async def submit_task(self, task: TaskRecord, *, max_pending: int) -> TaskRecord:
        """Accept a task, or return the one that the same request made before.

        Raises:
            RunNotFoundError: If the run was deleted.
            RequestIdReusedError: If the request id has another digest.
            QueueFullError: If `max_pending` tasks of the project wait.
        """

        def accept(connection: sa.Connection) -> TaskRecord:
            if statements.epoch_of(connection, task.run) is None:
                raise RunNotFoundError(f"run {task.run} was deleted", run=task.run)
            return checkpoint_statements.submit_task(connection, task, max_pending=max_pending)

        return await self._database.write(accept)

    async def get_task(self, name: str) -> TaskRecord | None:
        """Return a task."""
        return await self._database.read(
            lambda connection: checkpoint_statements.get_task(connection, name)
        )

    async def list_pending_tasks(self) -> list[TaskRecord]:
        """Return the tasks without a result, oldest first."""
        return await self._database.read(checkpoint_statements.list_pending_tasks)

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

        def finish(connection: sa.Connection) -> TaskRecord:
            statements.check_fence(connection, task.run, epoch)
            is_first = checkpoint_statements.finish_task(
                connection, task.name, result=result, error=error, finish_time_s=finish_time_s
            )
            found = checkpoint_statements.get_task(connection, task.name)
            if not is_first or found is None:
                raise FencedError(f"operation {task.name} has a result already", run=task.run)
            subject = checkpoint
            if checkpoint is not None:
                checkpoint_statements.insert_checkpoint(connection, checkpoint)
            if export is not None:
                subject = checkpoint_statements.get_checkpoint(connection, export.checkpoint)
                if subject is None:
                    raise CheckpointNotFoundError(
                        f"checkpoint {export.checkpoint} was deleted while it was exported",
                        checkpoint=export.checkpoint,
                    )
                checkpoint_statements.put_export(connection, export, not_before_s=finish_time_s)
            if subject is not None:
                checkpoint_statements.record_action(
                    connection,
                    f"{found.kind}_checkpoint",
                    subject,
                    key_id=found.key_id,
                    time_s=finish_time_s,
                )
            return found

        return await self._database.write(finish)

    async def record_event(self, event: AuditEvent) -> None:
        """Add an event that goes with no change of a row."""
        await self._database.write(
            lambda connection: audit_statements.insert_event(connection, event)
        )

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
        return await self._database.read(
            lambda connection: audit_statements.list_events(
                connection, project, limit=limit, after=after, start_s=start_s, end_s=end_s
            )
        )

    async def forget_events(self, *, before_s: float) -> int:
        """Forget events that are older, and return how many there were."""
        return await self._database.write(
            lambda connection: audit_statements.forget_before(connection, before_s)
        )
