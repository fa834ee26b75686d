"""What `Ledger` says to the database about checkpoints, exports and the tasks that make them.

Each function runs inside a transaction. A row goes before its files: the folder of what is deleted
or expired is noted in `folder_deletions` by the same transaction, until it was removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa

from tinsmith_runtime.errors import (
    CheckpointAlreadyExistsError,
    QueueFullError,
    RequestIdReusedError,
)
from tinsmith_runtime.ledger import audit_statements, deletion_statements
from tinsmith_runtime.ledger.records import (
    CheckpointChanges,
    CheckpointRecord,
    ExportRecord,
    OperationState,
    StoredFile,
    StoredKind,
    TaskRecord,
)
from tinsmith_runtime.ledger.tables import (
    checkpoint_exports,
    checkpoint_tasks,
    checkpoints,
    expired_checkpoints,
)
from tinsmith_runtime.records import AuditEvent
from tinsmith_runtime.sql import insert

_CHECKPOINT_COLUMNS = [column for column in checkpoints.c if column.name != "project"]
_TASK_COLUMNS = [column for column in checkpoint_tasks.c if column.name != "project"]
_QUEUE_RETRY_S = 10.0


def insert_checkpoint(connection: sa.Connection, checkpoint: CheckpointRecord) -> None:
    """Insert a checkpoint; an expired one of this name is forgotten.

    Raises:
        CheckpointAlreadyExistsError: If there is one of this name.
    """
    inserted = connection.execute(
        insert(connection, checkpoints)
        .values(project=checkpoint.project, **_values(checkpoint))
        .on_conflict_do_nothing()
    )
    if inserted.rowcount == 0:
        raise CheckpointAlreadyExistsError(
            f"checkpoint {checkpoint.name} exists; choose another name or delete it first",
            checkpoint=checkpoint.name,
        )
    connection.execute(
        sa.delete(expired_checkpoints).where(expired_checkpoints.c.name == checkpoint.name)
    )


def get_checkpoint(connection: sa.Connection, name: str) -> CheckpointRecord | None:
    """Return a checkpoint."""
    query = sa.select(*_CHECKPOINT_COLUMNS).where(checkpoints.c.name == name)
    row = connection.execute(query).mappings().first()
    return _checkpoint_of(row) if row is not None else None


def list_checkpoints(
    connection: sa.Connection,
    project: str,
    run: str | None,
    *,
    limit: int,
    after: tuple[float, str] | None,
    now_s: float,
) -> list[CheckpointRecord]:
    """Return checkpoints that have not expired, newest first."""
    query = sa.select(*_CHECKPOINT_COLUMNS).where(checkpoints.c.project == project, _lives(now_s))
    if run is not None:
        query = query.where(checkpoints.c.run == run)
    if after is not None:
        position = sa.tuple_(checkpoints.c.create_time_s, checkpoints.c.name)
        query = query.where(position < sa.tuple_(*after))
    query = query.order_by(checkpoints.c.create_time_s.desc(), checkpoints.c.name.desc())
    return [_checkpoint_of(row) for row in connection.execute(query.limit(limit)).mappings()]


def _count_checkpoints(connection: sa.Connection, project: str, now_s: float) -> int:
    query = (
        sa.select(sa.func.count())
        .select_from(checkpoints)
        .where(checkpoints.c.project == project, _lives(now_s))
    )
    return int(connection.execute(query).scalar_one())


def _count_exports(connection: sa.Connection, project: str, now_s: float) -> int:
    of_project = sa.select(checkpoints.c.name).where(checkpoints.c.project == project)
    query = (
        sa.select(sa.func.count())
        .select_from(checkpoint_exports)
        .where(
            checkpoint_exports.c.checkpoint.in_(of_project),
            checkpoint_exports.c.expire_time_s > now_s,
        )
    )
    return int(connection.execute(query).scalar_one())


COUNTS: Mapping[StoredKind, Callable[[sa.Connection, str, float], int]] = {
    "checkpoints": _count_checkpoints,
    "exports": _count_exports,
}
"""Count what a project has that has not expired."""


def update_checkpoint(
    connection: sa.Connection,
    name: str,
    changes: CheckpointChanges,
    *,
    key_id: str,
    now_s: float,
) -> CheckpointRecord | None:
    """Change a checkpoint that has not expired, and return it; record what really changed."""
    before = _locked_checkpoint(connection, name)
    if before is None or not (before.expire_time_s is None or before.expire_time_s > now_s):
        return None
    described = replace(
        before,
        labels=before.labels if changes.labels is None else dict(changes.labels),
        expire_time_s=changes.expire_time_s if changes.sets_expiry else before.expire_time_s,
    )
    is_published = before.is_published if changes.is_published is None else changes.is_published
    after = replace(described, is_published=is_published)
    if after == before:
        return before
    connection.execute(
        sa.update(checkpoints)
        .where(checkpoints.c.name == name)
        .values(
            labels=after.labels,
            expire_time_s=after.expire_time_s,
            is_published=after.is_published,
        )
    )
    if described != before:
        record_action(connection, "update_checkpoint", after, key_id=key_id, time_s=now_s)
    if after.is_published != before.is_published:
        action = "publish_checkpoint" if after.is_published else "unpublish_checkpoint"
        record_action(connection, action, after, key_id=key_id, time_s=now_s)
    return after


def delete_checkpoint(
    connection: sa.Connection, name: str, *, key_id: str, now_s: float, not_before_s: float
) -> CheckpointRecord | None:
    """Forget a checkpoint and its exports, and return it; its folders are to be removed."""
    record = _locked_checkpoint(connection, name)
    if record is None:
        return None
    connection.execute(sa.delete(checkpoints).where(checkpoints.c.name == name))
    exports = _delete_exports(connection, checkpoint_exports.c.checkpoint == name)
    _note(connection, [(record.run, record.folder), *exports], not_before_s)
    record_action(connection, "delete_checkpoint", record, key_id=key_id, time_s=now_s)
    return record


def record_action(
    connection: sa.Connection, action: str, record: CheckpointRecord, *, key_id: str, time_s: float
) -> None:
    """Add an action on a checkpoint to the audit trail."""
    event = AuditEvent(
        time_s=time_s,
        key_id=key_id,
        action=action,
        resource=record.name,
        checkpoint_kind=record.kind,
    )
    audit_statements.insert_event(connection, event)


def expire(connection: sa.Connection, *, now_s: float, not_before_s: float) -> int:
    """Forget what expired, leaving a tombstone for each checkpoint; return how much it was."""
    is_over = checkpoints.c.expire_time_s <= now_s
    # Portable: rows are read first and then deleted by name, inside one transaction.
    expired = connection.execute(
        sa.select(
            checkpoints.c.name,
            checkpoints.c.run,
            checkpoints.c.expire_time_s,
            checkpoints.c.folder,
        ).where(is_over)
    ).all()
    folders: list[tuple[str, str]] = []
    for row in expired:
        deleted = connection.execute(
            sa.delete(checkpoints).where(checkpoints.c.name == row.name, is_over)
        )
        if deleted.rowcount == 0:
            continue
        values = {"run": row.run, "expire_time_s": row.expire_time_s}
        connection.execute(
            insert(connection, expired_checkpoints)
            .values(name=row.name, **values)
            .on_conflict_do_update(index_elements=["name"], set_=values)
        )
        folders.append((row.run, row.folder))
        folders += _delete_exports(connection, checkpoint_exports.c.checkpoint == row.name)
    folders += _delete_exports(connection, checkpoint_exports.c.expire_time_s <= now_s)
    _note(connection, folders, not_before_s)
    return len(folders)


def tombstone(connection: sa.Connection, name: str) -> float | None:
    """Return when a checkpoint expired that is gone; None if none did lately."""
    query = sa.select(expired_checkpoints.c.expire_time_s).where(expired_checkpoints.c.name == name)
    return connection.execute(query).scalar_one_or_none()


def forget_before(connection: sa.Connection, time_s: float) -> None:
    """Forget tombstones and finished tasks that are older."""
    connection.execute(
        sa.delete(expired_checkpoints).where(expired_checkpoints.c.expire_time_s < time_s)
    )
    connection.execute(sa.delete(checkpoint_tasks).where(checkpoint_tasks.c.finish_time_s < time_s))


def put_export(connection: sa.Connection, export: ExportRecord, *, not_before_s: float) -> None:
    """Record an export, replacing one of its name, whose folder is then to be removed."""
    replaced = _delete_exports(connection, checkpoint_exports.c.name == export.name)
    _note(connection, set(replaced) - {(export.run, export.folder)}, not_before_s)
    connection.execute(sa.insert(checkpoint_exports).values(**_values(export)))


def get_export(connection: sa.Connection, name: str) -> ExportRecord | None:
    """Return an export."""
    query = sa.select(checkpoint_exports).where(checkpoint_exports.c.name == name)
    row = connection.execute(query).mappings().first()
    return ExportRecord(**{**row, "files": _files_of(row)}) if row is not None else None


def submit_task(connection: sa.Connection, task: TaskRecord, *, max_pending: int) -> TaskRecord:
    """Accept a task, or return the one that the same request made before.

    Raises:
        RequestIdReusedError: If the request id has another digest.
        QueueFullError: If as many tasks of the project wait as may.
    """
    known = get_task(connection, task.name)
    if known is not None:
        if known.digest == task.digest:
            return known
        raise RequestIdReusedError(
            f"operation {task.name} belongs to a request with another body; draw a new UUID for a "
            "new request",
            operation=task.name,
        )
    project = task.name.split("/")[1]
    num_pending = connection.execute(
        sa.select(sa.func.count()).where(
            checkpoint_tasks.c.state == OperationState.PENDING,
            checkpoint_tasks.c.project == project,
        )
    ).scalar_one()
    if num_pending >= max_pending:
        raise QueueFullError(
            f"{num_pending} copies, exports and imports of project {project} wait, which is the "
            "limit; retry when one has ended",
            retry_after_s=_QUEUE_RETRY_S,
            project=project,
        )
    connection.execute(sa.insert(checkpoint_tasks).values(project=project, **_values(task)))
    return task


def get_task(connection: sa.Connection, name: str) -> TaskRecord | None:
    """Return a task."""
    query = sa.select(*_TASK_COLUMNS).where(checkpoint_tasks.c.name == name)
    row = connection.execute(query).mappings().first()
    return _task_of(row) if row is not None else None


def list_pending_tasks(connection: sa.Connection) -> list[TaskRecord]:
    """Return the tasks without a result, oldest first."""
    query = (
        sa.select(*_TASK_COLUMNS)
        .where(checkpoint_tasks.c.state == OperationState.PENDING)
        .order_by(checkpoint_tasks.c.submit_time_s, checkpoint_tasks.c.name)
    )
    return [_task_of(row) for row in connection.execute(query).mappings()]


def finish_task(
    connection: sa.Connection,
    name: str,
    *,
    result: bytes | None,
    error: bytes | None,
    finish_time_s: float,
) -> bool:
    """Write the result of a task that has none; return whether it had none."""
    statement = (
        sa.update(checkpoint_tasks)
        .where(
            checkpoint_tasks.c.name == name,
            checkpoint_tasks.c.state == OperationState.PENDING,
        )
        .values(
            state=OperationState.SUCCEEDED if error is None else OperationState.FAILED,
            result=result,
            error=error,
            finish_time_s=finish_time_s,
        )
    )
    return connection.execute(statement).rowcount == 1


def _lives(now_s: float) -> sa.ColumnElement[bool]:
    return sa.or_(checkpoints.c.expire_time_s.is_(None), checkpoints.c.expire_time_s > now_s)


def _locked_checkpoint(connection: sa.Connection, name: str) -> CheckpointRecord | None:
    """Return a checkpoint that no other transaction changes before this one ends."""
    query = sa.select(*_CHECKPOINT_COLUMNS).where(checkpoints.c.name == name).with_for_update()
    row = connection.execute(query).mappings().first()
    return _checkpoint_of(row) if row is not None else None


def _delete_exports(
    connection: sa.Connection, which: sa.ColumnElement[bool]
) -> list[tuple[str, str]]:
    """Forget exports, and return their runs and folders."""
    query = sa.select(checkpoint_exports.c.run, checkpoint_exports.c.folder).where(which)
    folders = [(row.run, row.folder) for row in connection.execute(query)]
    connection.execute(sa.delete(checkpoint_exports).where(which))
    return folders


def _note(
    connection: sa.Connection, folders: Iterable[tuple[str, str]], not_before_s: float
) -> None:
    """Note folders, each with its run, whose files are to be removed."""
    for run, folder in folders:
        deletion_statements.note_folders(connection, run, [folder], not_before_s)


def _values(record: CheckpointRecord | ExportRecord | TaskRecord) -> dict[str, Any]:
    values = {field: getattr(record, field) for field in record.__dataclass_fields__}
    if "files" in values:
        values["files"] = [asdict(file) for file in values["files"]]
    return values


def _checkpoint_of(row: sa.RowMapping) -> CheckpointRecord:
    return CheckpointRecord(**{**row, "files": _files_of(row)})


def _task_of(row: sa.RowMapping) -> TaskRecord:
    return TaskRecord(**{**row, "state": OperationState(row["state"])})


def _files_of(row: sa.RowMapping) -> tuple[StoredFile, ...]:
    return tuple(StoredFile(**file) for file in row["files"] or ())
