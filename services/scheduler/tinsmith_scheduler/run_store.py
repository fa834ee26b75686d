"""Statements on runs and on the releases that trainers owe; each runs inside a transaction.

A placement is written before the trainer is asked, with a raised epoch, so that a scheduler that
dies in between knows whom it asked. Every later change of a creation is conditional on the state
and epoch that it was decided on; a change that matches no row lost to a deletion.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import sqlalchemy as sa

from tinsmith_runtime.sql import insert
from tinsmith_scheduler.placement import TrainerCandidate, Wait, choose_trainer
from tinsmith_scheduler.records import (
    Release,
    ReleaseMode,
    Run,
    RunState,
    adapter_from_json,
    adapter_to_json,
)
from tinsmith_scheduler.tables import releases, runs

_HOLDING_STATES = (RunState.CREATING.value, RunState.ACTIVE.value)


def insert_run(connection: sa.Connection, run: Run) -> None:
    """Add a run that is to be placed."""
    connection.execute(
        sa.insert(runs).values(
            name=run.name,
            project=run.project,
            state=run.state.value,
            session=run.session,
            base_model=run.base_model,
            adapter=adapter_to_json(run.adapter),
            display_name=run.display_name,
            labels=dict(run.labels),
            create_time_s=run.create_time_s,
            worker=run.worker,
            epoch=run.epoch,
            source_checkpoint=run.source_checkpoint,
            include_optimizer=run.include_optimizer,
        )
    )


def get_run(connection: sa.Connection, name: str) -> Run | None:
    """Return a run in whatever state, or None."""
    row = connection.execute(sa.select(runs).where(runs.c.name == name)).first()
    return _run(row) if row is not None else None


def list_runs(
    connection: sa.Connection, project: str, *, before: int | None, limit: int
) -> list[Run]:
    """Return runs of a project that were not deleted, newest first."""
    query = (
        sa.select(runs)
        .where(runs.c.project == project, runs.c.state != RunState.DELETED.value)
        .order_by(runs.c.serial.desc())
        .limit(limit)
    )
    if before is not None:
        query = query.where(runs.c.serial < before)
    return [_run(row) for row in connection.execute(query)]


def list_creating(connection: sa.Connection) -> list[Run]:
    """Return the runs whose creation has not ended, oldest first."""
    query = sa.select(runs).where(runs.c.state == RunState.CREATING.value).order_by(runs.c.serial)
    return [_run(row) for row in connection.execute(query)]


def count_project_runs(connection: sa.Connection, project: str) -> int:
    """Count the runs of a project that take up a place."""
    query = sa.select(sa.func.count()).where(
        runs.c.project == project, runs.c.state.in_(_HOLDING_STATES)
    )
    return connection.execute(query).scalar_one()


def count_runs_by_worker(connection: sa.Connection) -> dict[str, int]:
    """Count the runs on each trainer, those that are being adopted included."""
    query = (
        sa.select(runs.c.worker, sa.func.count().label("num_runs"))
        .where(runs.c.state.in_(_HOLDING_STATES), runs.c.worker != "")
        .group_by(runs.c.worker)
    )
    return {row.worker: row.num_runs for row in connection.execute(query)}


def place_run(
    connection: sa.Connection,
    name: str,
    trainers: Sequence[TrainerCandidate],
    *,
    refused: Collection[str],
) -> Run | Wait | None:
    """Choose a trainer and write it down, under a raised epoch if it is another one.

    Returns:
        The run with its trainer, why it waits, or None if it is not being created any more.
    """
    run = get_run(connection, name)
    if run is None or run.state is not RunState.CREATING:
        return None
    num_runs = count_runs_by_worker(connection)
    candidates = [replace(trainer, num_runs=num_runs.get(trainer.name, 0)) for trainer in trainers]
    choice = choose_trainer(run.base_model, candidates, current=run.worker, refused=refused)
    if isinstance(choice, Wait) or choice.worker == run.worker:
        return choice if isinstance(choice, Wait) else run
    if run.worker:
        owe_release(connection, run, ReleaseMode.DELETE)
    placed = replace(run, worker=choice.worker, epoch=run.epoch + 1)
    _update(connection, placed)
    return placed


def unplace_run(connection: sa.Connection, run: Run, *, next_epoch: int | None = None) -> None:
    """Forget the trainer of a creation, because it refused for certain.

    Args:
        connection: The transaction.
        run: As it was placed.
        next_epoch: Raises the epoch to this, where the trainer knows a higher one.
    """
    values = {"worker": "", "epoch": next_epoch if next_epoch is not None else run.epoch}
    connection.execute(sa.update(runs).where(_is_still(run)).values(**values))


def activate_run(connection: sa.Connection, run: Run) -> bool:
    """End a creation well.

    Returns:
        False if the run was deleted meanwhile; its trainer then owes its removal.
    """
    values = {"state": RunState.ACTIVE.value}
    if connection.execute(sa.update(runs).where(_is_still(run)).values(**values)).rowcount == 1:
        return True
    owe_release(connection, run, ReleaseMode.DELETE)
    return False


def fail_run(connection: sa.Connection, name: str, encoded_error: bytes) -> bool:
    """End a creation badly; a trainer that may hold the run owes its removal.

    Returns:
        False if the run is not being created any more.
    """
    run = get_run(connection, name)
    if run is None or run.state is not RunState.CREATING:
        return False
    if run.worker:
        owe_release(connection, run, ReleaseMode.DELETE)
    _update(connection, replace(run, worker="", state=RunState.FAILED, encoded_error=encoded_error))
    return True


def withdraw_run(connection: sa.Connection, name: str) -> Run | None:
    """Delete a run that no trainer has confirmed; return the run as it then is.

    An active run is returned as it is: its trainer has to delete it first.
    """
    run = get_run(connection, name)
    if run is None or run.state in (RunState.ACTIVE, RunState.DELETED):
        return run
    if run.worker:
        owe_release(connection, run, ReleaseMode.DELETE)
    deleted = replace(run, state=RunState.DELETED, worker="")
    _update(connection, deleted)
    return deleted


def delete_run(connection: sa.Connection, run: Run) -> Run:
    """Mark a run as deleted, after its trainer deleted it."""
    connection.execute(sa.delete(releases).where(releases.c.run == run.name))
    deleted = replace(run, state=RunState.DELETED, worker="")
    _update(connection, deleted)
    return deleted


def owe_parking(connection: sa.Connection, session: str) -> None:
    """Note that the runs of a session are to be parked."""
    query = sa.select(runs).where(runs.c.session == session, runs.c.state == RunState.ACTIVE.value)
    for row in connection.execute(query).all():
        owe_release(connection, _run(row), ReleaseMode.PARK)


def owe_release(connection: sa.Connection, run: Run, mode: ReleaseMode) -> None:
    """Note a release that the trainer of a run has to confirm."""
    values = {"epoch": run.epoch, "mode": mode.value}
    connection.execute(
        insert(connection, releases)
        .values(run=run.name, worker=run.worker, **values)
        .on_conflict_do_update(index_elements=["run", "worker"], set_=values)
    )


def list_releases(connection: sa.Connection) -> list[Release]:
    """Return the releases that are not confirmed."""
    return [
        Release(row.run, row.worker, row.epoch, ReleaseMode(row.mode))
        for row in connection.execute(sa.select(releases))
    ]


def confirm_release(connection: sa.Connection, release: Release) -> None:
    """Drop a release, unless it was replaced by another meanwhile."""
    connection.execute(
        sa.delete(releases).where(
            releases.c.run == release.run,
            releases.c.worker == release.worker,
            releases.c.epoch == release.epoch,
            releases.c.mode == release.mode.value,
        )
    )


def _is_still(run: Run) -> sa.ColumnElement[bool]:
    """Whether a creation stands as it did when a decision on it was made."""
    return sa.and_(
        runs.c.name == run.name,
        runs.c.state == RunState.CREATING.value,
        runs.c.worker == run.worker,
        runs.c.epoch == run.epoch,
    )


def _update(connection: sa.Connection, run: Run) -> None:
    connection.execute(
        sa.update(runs)
        .where(runs.c.name == run.name)
        .values(
            state=run.state.value,
            worker=run.worker,
            epoch=run.epoch,
            encoded_error=run.encoded_error,
        )
    )


def _run(row: sa.Row[tuple[object, ...]]) -> Run:
    values = dict(row._mapping)
    return Run(
        **{
            **values,
            "state": RunState(values["state"]),
            "adapter": adapter_from_json(values["adapter"]),
        }
    )
