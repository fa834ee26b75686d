"""Statements on runs and on the releases that trainers owe; each runs inside a transaction.

A placement is written before the trainer is asked, with a raised epoch: a scheduler that dies in
between then knows which trainer was asked. Every later change of a creation is conditional on the
state and epoch that it was decided on; a change that matches no row lost to a deletion.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tinsmith.names import RunName
from tinsmith_runtime.adapters import adapter_from_json, adapter_to_json
from tinsmith_runtime.errors import NotFoundError, RunNotFoundError
from tinsmith_runtime.records import ReleaseMode
from tinsmith_runtime.sql import insert
from tinsmith_scheduler.store.records import Release, Run, RunState, SessionState
from tinsmith_scheduler.store.tables import (
    projects,
    releases,
    runs,
    sampling_sessions,
    sessions,
)
from tinsmith_scheduler.workers.placement import TrainerCandidate, Wait, choose_trainer

_PLACED_STATES = (RunState.CREATING.value, RunState.MOVING.value)
_HOLDING_STATES = (*_PLACED_STATES, RunState.ACTIVE.value)


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
            pool=run.pool,
            source_run=run.source_run,
            source_step=run.source_step,
            reruns_step=run.reruns_step,
            history_retention_s=run.history_retention_s,
        )
    )


def get_run(connection: sa.Connection, name: str) -> Run | None:
    """Return a run in whatever state, or None."""
    row = connection.execute(sa.select(runs).where(runs.c.name == name)).first()
    return _run(row) if row is not None else None


def require_run(
    connection: sa.Connection, name: RunName, missing: NotFoundError | None = None
) -> Run:
    """Return a run that was not deleted.

    Raises:
        RunNotFoundError: If there is none of this name, or it was deleted; or `missing`, if given.
    """
    run = get_run(connection, str(name))
    if run is None or run.state is RunState.DELETED:
        raise missing or run_not_found(name)
    return run


def run_not_found(name: RunName) -> RunNotFoundError:
    """Return the error of a run that does not exist, or is not the caller's."""
    return RunNotFoundError(f"run {name} does not exist", run=name)


def set_history(connection: sa.Connection, name: str, history_retention_s: float) -> None:
    """Note how long the past of a run is kept."""
    connection.execute(
        sa.update(runs).where(runs.c.name == name).values(history_retention_s=history_retention_s)
    )


def finish_training(
    connection: sa.Connection, name: str, sequence_number: int, now_s: float
) -> None:
    """Note that the training of a run is done, up to an operation."""
    connection.execute(
        sa.update(runs)
        .where(runs.c.name == name)
        .values(finish_time_s=now_s, finish_sequence_number=sequence_number)
    )


def reopen_training(connection: sa.Connection, name: str, session: str) -> None:
    """Note that the training of a run goes on in a session."""
    connection.execute(
        sa.update(runs).where(runs.c.name == name).values(finish_time_s=None, reopened_in=session)
    )


def note_step(connection: sa.Connection, name: str, sequence_number: int) -> None:
    """Note that an optimizer step was made: a training that was done before it goes on."""
    connection.execute(
        sa.update(runs)
        .where(
            runs.c.name == name,
            runs.c.finish_time_s.is_not(None),
            runs.c.finish_sequence_number < sequence_number,
        )
        .values(finish_time_s=None)
    )


def list_by_id(connection: sa.Connection, run_id: str) -> list[Run]:
    """Return the runs of an id, one for each project that has one, those left out that are gone."""
    prefix, suffix = str(RunName("|", run_id)).split("|")
    names = sa.select(sa.literal(prefix) + projects.c.project + sa.literal(suffix))
    # By name, which has an index; there are far fewer projects than runs.
    query = sa.select(runs).where(
        runs.c.name.in_(names), sa.func.coalesce(runs.c.state, "") != RunState.DELETED.value
    )
    return [_run(row) for row in connection.execute(query)]


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


def ended_sessions(connection: sa.Connection, names: Collection[str]) -> set[str]:
    """Return which of some sessions are over; one that is not kept any more is."""
    query = sa.select(sessions.c.name).where(
        sessions.c.name.in_(names), sessions.c.state == SessionState.ACTIVE.value
    )
    return set(names) - set(connection.execute(query).scalars())


def list_creating(connection: sa.Connection) -> list[Run]:
    """Return the runs whose creation has not ended, oldest first."""
    return _list_in_state(connection, RunState.CREATING)


def list_moving(connection: sa.Connection) -> list[Run]:
    """Return the runs that lost their trainer and were not adopted by another, live ones first."""
    return _live_first(connection, _list_in_state(connection, RunState.MOVING))


def list_holders(connection: sa.Connection) -> set[tuple[str, str]]:
    """Return the trainer processes that hold runs which may move, as (worker, incarnation)."""
    query = sa.select(runs.c.worker, runs.c.incarnation).where(
        runs.c.state == RunState.ACTIVE.value, runs.c.ledger != ""
    )
    return {(row.worker, row.incarnation) for row in connection.execute(query.distinct())}


def begin_moves(connection: sa.Connection, worker: str, incarnation: str) -> list[Run]:
    """Note that a trainer process is gone; return its runs, which are placed anew in that order.

    Live ones are first: those of the past may be very many.
    """
    statement = (
        sa.update(runs)
        .where(
            runs.c.state == RunState.ACTIVE.value,
            runs.c.worker == worker,
            runs.c.incarnation == incarnation,
            runs.c.ledger != "",
        )
        .values(state=RunState.MOVING.value)
        .returning(*runs.c)
    )
    moved = sorted(map(_run, connection.execute(statement)), key=lambda run: run.serial)
    return _live_first(connection, moved)


def count_project_runs(connection: sa.Connection, project: str) -> int:
    """Count the live runs of a project."""
    # A session and its runs are of one project.
    query = _select_live(sa.func.count()).where(sessions.c.project == project)
    num_runs: int = connection.execute(query).scalar_one()
    return num_runs


def count_active_sessions(connection: sa.Connection, project: str) -> int:
    """Return how many sessions of a project go on."""
    query = (
        sa.select(sa.func.count())
        .select_from(sessions)
        .where(sessions.c.project == project, sessions.c.state == SessionState.ACTIVE.value)
    )
    return int(connection.execute(query).scalar_one())


def count_sampling_sessions(connection: sa.Connection, project: str) -> int:
    """Return how many sampling sessions a project has."""
    # By the index on their sessions: there is none on their project.
    active = sa.select(sessions.c.name).where(
        sessions.c.project == project, sessions.c.state == SessionState.ACTIVE.value
    )
    query = (
        sa.select(sa.func.count())
        .select_from(sampling_sessions)
        .where(sampling_sessions.c.session.in_(active))
    )
    return int(connection.execute(query).scalar_one())


def sessions_with_live_runs(connection: sa.Connection, project: str) -> set[str]:
    """Return the active sessions of a project whose runs take a place."""
    query = _select_live(sessions.c.name).where(sessions.c.project == project)
    return set(connection.execute(query).scalars())


def count_runs_by_worker(connection: sa.Connection) -> dict[str, int]:
    """Count the live runs on each trainer, those that are being adopted included."""
    query = (
        _select_live(runs.c.worker, sa.func.count().label("num_runs"))
        .where(runs.c.worker != "")
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
        The run with its trainer, why it waits, or None if it is not to be placed any more.
    """
    run = get_run(connection, name)
    if run is None or run.state.value not in _PLACED_STATES:
        return None
    num_runs = count_runs_by_worker(connection)
    candidates = [replace(trainer, num_runs=num_runs.get(trainer.name, 0)) for trainer in trainers]
    is_moving = run.state is RunState.MOVING
    source = get_run(connection, run.source_run) if run.source_run and not is_moving else None
    if source is not None and not source.ledger:
        # The ledger of this trainer alone has what is copied.
        candidates = [trainer for trainer in candidates if trainer.name == source.worker]
    choice = choose_trainer(
        run.base_model,
        candidates,
        current=run.worker,
        refused=refused,
        ledger=run.ledger if is_moving else source.ledger if source is not None else None,
        pool=run.pool,
    )
    if isinstance(choice, Wait):
        return choice
    if (choice.worker, choice.incarnation) == (run.worker, run.incarnation):
        return run
    if run.worker and run.worker != choice.worker:
        # A run that exists is never deleted for having been elsewhere.
        owe_release(connection, run, ReleaseMode.HAND_OVER if is_moving else ReleaseMode.DELETE)
    placed = replace(
        run,
        worker=choice.worker,
        incarnation=choice.incarnation,
        ledger=choice.ledger,
        epoch=run.epoch + 1,
    )
    _update(connection, placed)
    return placed


def unplace_run(connection: sa.Connection, run: Run, *, next_epoch: int | None = None) -> None:
    """Forget the trainer that a run was placed on, because it refused for certain.

    Args:
        connection: The transaction.
        run: As it was placed.
        next_epoch: Raises the epoch to this, where the trainer knows a higher one.
    """
    epoch = next_epoch if next_epoch is not None else run.epoch
    values = {"worker": "", "incarnation": "", "epoch": epoch}
    connection.execute(sa.update(runs).where(_is_still(run)).values(**values))


def activate_run(connection: sa.Connection, run: Run) -> bool:
    """End a creation or a move well.

    Returns:
        False if the run was deleted meanwhile; its trainer then owes its removal.
    """
    values = {"state": RunState.ACTIVE.value, "rerun_from": run.rerun_from}
    if connection.execute(sa.update(runs).where(_is_still(run)).values(**values)).rowcount == 1:
        if not _is_in_use(connection, run):
            # Its session ended while no trainer held it.
            owe_release(connection, run, ReleaseMode.PARK)
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

    An active or moving run is returned as it is: its trainer has to delete it first.
    """
    run = get_run(connection, name)
    if run is None or run.state in (RunState.ACTIVE, RunState.MOVING, RunState.DELETED):
        return run
    if run.worker:
        owe_release(connection, run, ReleaseMode.DELETE)
    deleted = replace(run, state=RunState.DELETED, worker="")
    _update(connection, deleted)
    return deleted


def delete_run(connection: sa.Connection, run: Run) -> Run:
    """Mark a run as deleted, after its trainer deleted it."""
    # What other trainers owe is still owed: they may hold what is left of an earlier try.
    connection.execute(
        sa.delete(releases).where(releases.c.run == run.name, releases.c.worker == run.worker)
    )
    current = get_run(connection, run.name)
    if current is not None and current.worker and current.worker != run.worker:
        # It moved while its trainer deleted it; the trainer that adopted it holds an empty run.
        owe_release(connection, current, ReleaseMode.DELETE)
    deleted = replace(run, state=RunState.DELETED, worker="")
    _update(connection, deleted)
    return deleted


def list_session_runs(connection: sa.Connection, session: str) -> list[Run]:
    """Return the runs of a session that did not fail and were not deleted, oldest first."""
    query = (
        sa.select(runs)
        .where(runs.c.session == session, runs.c.state.in_(_HOLDING_STATES))
        .order_by(runs.c.serial)
    )
    return [_run(row) for row in connection.execute(query)]


def list_run_names(connection: sa.Connection, session: str) -> list[str]:
    """Return the names of the runs of a session that were not deleted, oldest first."""
    query = (
        sa.select(runs.c.name)
        .where(runs.c.session == session, runs.c.state != RunState.DELETED.value)
        .order_by(runs.c.serial)
    )
    return list(connection.execute(query).scalars())


def forget_parking(connection: sa.Connection, session: str) -> None:
    """Leave the runs of a session where they are after all."""
    of_session = sa.select(runs.c.name).where(runs.c.session == session)
    connection.execute(
        sa.delete(releases).where(
            releases.c.run.in_(of_session), releases.c.mode == ReleaseMode.PARK.value
        )
    )


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


def _select_live(*columns: sa.ColumnElement[Any]) -> sa.Select[Any]:
    """Select of the runs that take up a place: held, or about to be, and their session goes on.

    Found from the sessions, which are few while they are active. The state of a run is kept from
    being looked up by index: nearly all runs that there ever were are in the same one.
    """
    return (
        sa.select(*columns)
        .select_from(sessions.join(runs, runs.c.session == sessions.c.name))
        .where(
            sessions.c.state == SessionState.ACTIVE.value,
            sa.func.coalesce(runs.c.state, "").in_(_HOLDING_STATES),
        )
    )


def _live_first(connection: sa.Connection, found: list[Run]) -> list[Run]:
    """Return runs in their order, but those whose session goes on before the others."""
    query = sa.select(sessions.c.name).where(sessions.c.state == SessionState.ACTIVE.value)
    active = set(connection.execute(query).scalars())
    return sorted(found, key=lambda run: run.session not in active)


def _list_in_state(connection: sa.Connection, state: RunState) -> list[Run]:
    query = sa.select(runs).where(runs.c.state == state.value).order_by(runs.c.serial)
    return [_run(row) for row in connection.execute(query)]


def _is_in_use(connection: sa.Connection, run: Run) -> bool:
    """Whether the session of a run goes on."""
    query = sa.select(sessions.c.state).where(sessions.c.name == run.session)
    state: str | None = connection.execute(query).scalar_one_or_none()
    return state == SessionState.ACTIVE.value


def _is_still(run: Run) -> sa.ColumnElement[bool]:
    """Whether a placement stands as it did when a decision on it was made."""
    return sa.and_(
        runs.c.name == run.name,
        runs.c.state.in_(_PLACED_STATES),
        runs.c.worker == run.worker,
        runs.c.incarnation == run.incarnation,
        runs.c.epoch == run.epoch,
    )


def _update(connection: sa.Connection, run: Run) -> None:
    connection.execute(
        sa.update(runs)
        .where(runs.c.name == run.name)
        .values(
            state=run.state.value,
            worker=run.worker,
            incarnation=run.incarnation,
            ledger=run.ledger,
            epoch=run.epoch,
            encoded_error=run.encoded_error,
        )
    )


def _run(row: sa.Row[tuple[object, ...]]) -> Run:
    values = dict(row._mapping)
    del values["end_time_s"]
    return Run(
        **{
            **values,
            "state": RunState(values["state"]),
            "adapter": adapter_from_json(values["adapter"]),
        }
    )
