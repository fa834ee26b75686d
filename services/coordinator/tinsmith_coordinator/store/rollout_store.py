"""Batches of rollouts as rows: how they are read and written.

Every function runs inside a transaction of the caller; there is one writer. The end of each play
has the next revision of its batch, and so has the end of the batch. A watcher that has seen a
revision has missed nothing below it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.errors import CLASSES
from tinsmith.names import RolloutBatchName
from tinsmith.rollouts import GroupConfig, GroupReport, Play
from tinsmith_coordinator.store.rollout_records import Batch, BatchState, EndedPlay, NewBatch
from tinsmith_coordinator.store.tables import rollout_batches, rollout_episodes
from tinsmith_runtime.errors import ErrorCode, RolloutBatchNotFoundError, TinsmithError
from tinsmith_runtime.records import RequestIdentity

_MAX_PROBLEM = 1024

# The request is read once, by what plays it.
_COLUMNS = [column for column in rollout_batches.c if column.name != "content"]
_BATCHES = sa.select(*_COLUMNS)
_BY_ID = _BATCHES.where(rollout_batches.c.batch_id == sa.bindparam("batch_id"))


def batch_not_found(name: RolloutBatchName) -> RolloutBatchNotFoundError:
    """Return the error of a batch that is not there, or of another project."""
    return RolloutBatchNotFoundError(
        f"rollouts {name} do not exist, or were kept for as long as promised",
        rollout_batch=name,
    )


def get(connection: sa.Connection, name: RolloutBatchName) -> Batch:
    """Return a batch.

    Raises:
        RolloutBatchNotFoundError: If the project has none of this name.
    """
    row = connection.execute(_BY_ID, {"batch_id": name.rollout_batch}).first()
    if row is None or row.project != name.project:
        raise batch_not_found(name)
    return _batch(row)


def select(connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> list[Batch]:
    """Return batches, oldest first."""
    query = _BATCHES.where(*conditions).order_by(rollout_batches.c.serial)
    return [_batch(row) for row in connection.execute(query)]


def list_page(
    connection: sa.Connection, project: str, *, before_serial: int | None, limit: int
) -> list[Batch]:
    """Return batches of a project, newest first."""
    query = _BATCHES.where(rollout_batches.c.project == project)
    if before_serial is not None:
        query = query.where(rollout_batches.c.serial < before_serial)
    query = query.order_by(rollout_batches.c.serial.desc()).limit(limit)
    return [_batch(row) for row in connection.execute(query)]


def find_by_request(
    connection: sa.Connection, identity: RequestIdentity
) -> tuple[Batch, bytes] | None:
    """Return the batch that a request made, and the digest of the request."""
    query = _BATCHES.where(
        rollout_batches.c.project == identity.project,
        rollout_batches.c.request_id == identity.request_id,
    )
    row = connection.execute(query).first()
    return None if row is None else (_batch(row), row.request_digest)


def read_content(connection: sa.Connection, batch: Batch) -> bytes:
    """Return the request of a batch; nothing if it was removed."""
    query = sa.select(rollout_batches.c.content).where(rollout_batches.c.serial == batch.serial)
    content: bytes | None = connection.execute(query).scalar_one_or_none()
    return content or b""


def open_totals(connection: sa.Connection, project: str) -> tuple[int, int, int]:
    """Return how many batches of a project are played, with how many episodes and tokens."""
    query = sa.select(
        sa.func.count(),
        sa.func.coalesce(sa.func.sum(rollout_batches.c.num_episodes), 0),
        sa.func.coalesce(sa.func.sum(rollout_batches.c.num_tokens), 0),
    ).where(
        rollout_batches.c.project == project,
        rollout_batches.c.state == BatchState.PLAYING.value,
    )
    count, episodes, tokens = connection.execute(query).one()
    return int(count), int(episodes), int(tokens)


def insert(
    connection: sa.Connection,
    batch_id: str,
    new: NewBatch,
    identity: RequestIdentity,
    *,
    key_id: str,
    now_s: float,
) -> Batch:
    """Write a new batch."""
    num_wanted = (new.groups.num_groups or new.num_tasks) * new.groups.group_size
    connection.execute(
        sa.insert(rollout_batches),
        {
            "batch_id": batch_id,
            "project": identity.project,
            "request_id": identity.request_id,
            "request_digest": identity.digest,
            "key_id": key_id,
            "content": new.content,
            "num_tasks": new.num_tasks,
            "groups": dataclasses.asdict(new.groups),
            "num_episodes": new.num_episodes,
            "num_tokens": new.num_tokens,
            "state": BatchState.PLAYING.value,
            "report": _plain_report(GroupReport(num_requested=num_wanted)),
            "taken": [],
            "failure": None,
            "num_bytes": 0,
            "revision": 0,
            "deadline_s": now_s + new.timeout_s,
            "create_time_s": now_s,
        },
    )
    return get(connection, RolloutBatchName(identity.project, batch_id))


def record(
    connection: sa.Connection, batch: Batch, ended: Sequence[EndedPlay], report: GroupReport
) -> Batch:
    """Write plays that ended; return the batch as it is then."""
    rows = [
        {
            "serial": batch.serial,
            "revision": batch.revision + index,
            "task": each.play.task,
            "member": each.play.member,
            "attempt": each.play.attempt,
            "reason": each.reason,
            "problem": each.problem[:_MAX_PROBLEM].replace("\0", ""),
            "may_repeat": each.may_repeat,
            "content": each.content,
        }
        for index, each in enumerate(ended, start=1)
    ]
    if rows:
        connection.execute(sa.insert(rollout_episodes), rows)
    num_bytes = batch.num_bytes + sum(len(each.content) for each in ended if each.has_finished)
    after = dataclasses.replace(
        batch, revision=batch.revision + len(ended), num_bytes=num_bytes, report=report
    )
    _write(connection, after)
    return after


def end(
    connection: sa.Connection,
    batch: Batch,
    *,
    taken: Mapping[int, tuple[int, ...]],
    report: GroupReport,
    failure: TinsmithError | None,
    now_s: float,
) -> Batch:
    """Write the end of a batch; return it as it is then."""
    after = dataclasses.replace(
        batch,
        state=BatchState.COMPLETED if failure is None else BatchState.FAILED,
        taken=taken,
        report=report,
        failure=failure,
        revision=batch.revision + 1,
        end_time_s=now_s,
    )
    _write(connection, after)
    return after


def select_ended(
    connection: sa.Connection, batch: Batch, after_revision: int, *, limit: int | None = None
) -> list[EndedPlay]:
    """Return plays of a batch that ended after a revision, in the order of their ends."""
    query = (
        sa.select(rollout_episodes)
        .where(
            rollout_episodes.c.serial == batch.serial,
            rollout_episodes.c.revision > after_revision,
        )
        .order_by(rollout_episodes.c.revision)
        .limit(limit)
    )
    return [_ended(row, row.content) for row in connection.execute(query)]


def select_ends(connection: sa.Connection, batch: Batch) -> list[EndedPlay]:
    """Return all plays of a batch that ended, in order, without what was played."""
    columns = [column for column in rollout_episodes.c if column.name != "content"]
    query = (
        sa.select(*columns)
        .where(rollout_episodes.c.serial == batch.serial)
        .order_by(rollout_episodes.c.revision)
    )
    return [_ended(row, b"") for row in connection.execute(query)]


def delete(connection: sa.Connection, serials: Iterable[int]) -> None:
    """Remove batches with their episodes."""
    chosen = list(serials)
    for table in (rollout_episodes, rollout_batches):
        connection.execute(sa.delete(table).where(table.c.serial.in_(chosen)))


def _write(connection: sa.Connection, batch: Batch) -> None:
    failure = batch.failure
    connection.execute(
        sa.update(rollout_batches)
        .where(rollout_batches.c.serial == batch.serial)
        .values(
            state=batch.state.value,
            report=_plain_report(batch.report),
            taken=[[task, list(members)] for task, members in batch.taken.items()],
            failure=None if failure is None else _plain_failure(failure),
            num_bytes=batch.num_bytes,
            revision=batch.revision,
            end_time_s=batch.end_time_s,
        )
    )


def _batch(row: sa.Row[Any]) -> Batch:
    return Batch(
        serial=row.serial,
        project=row.project,
        batch_id=row.batch_id,
        key_id=row.key_id,
        num_tasks=row.num_tasks,
        groups=GroupConfig(**row.groups),
        state=BatchState(row.state),
        report=_report(row.report),
        taken={task: tuple(members) for task, members in row.taken},
        failure=None if row.failure is None else _failure(row.failure),
        num_bytes=row.num_bytes,
        revision=row.revision,
        deadline_s=row.deadline_s,
        create_time_s=row.create_time_s,
        end_time_s=row.end_time_s,
    )


def _ended(row: sa.Row[Any], content: bytes) -> EndedPlay:
    return EndedPlay(
        play=Play(row.task, row.member, row.attempt),
        reason=row.reason,
        problem=row.problem,
        may_repeat=row.may_repeat,
        content=content,
        revision=row.revision,
    )


def _plain_report(report: GroupReport) -> dict[str, Any]:
    # Not `asdict`, which counts the entries of a Counter.
    fields = {each.name: getattr(report, each.name) for each in dataclasses.fields(report)}
    return fields | {name: dict(fields[name]) for name in ("failures", "reasons")}


def _report(plain: Mapping[str, Any]) -> GroupReport:
    counted = {name: Counter(plain[name]) for name in ("failures", "reasons")}
    fields: dict[str, Any] = {**plain, **counted}
    return GroupReport(**fields)


def _plain_failure(error: TinsmithError) -> dict[str, Any]:
    return {
        "code": error.code.value,
        "reason": error.reason,
        "message": error.message[:_MAX_PROBLEM],
        "metadata": dict(error.metadata),
    }


def _failure(plain: Mapping[str, Any]) -> TinsmithError:
    error = CLASSES[ErrorCode(plain["code"])](plain["message"], reason=plain["reason"])
    error.metadata = dict(plain["metadata"])
    return error
