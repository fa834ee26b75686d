"""Episodes as rows: how they are read, and the few ways in which one changes.

Every function runs inside a transaction of the caller. There is one writer, so what a function read
is still so when it writes; revisions are drawn in the order of their commits. A watcher that
has seen one revision has missed none below it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.names import EpisodeName
from tinsmith_coordinator.store.records import (
    AttemptEnd,
    Episode,
    EpisodeOutcome,
    EpisodeState,
    EpisodeType,
    QueueKey,
    StoredCall,
)
from tinsmith_coordinator.store.tables import attempts, episodes, model_calls, projects
from tinsmith_runtime.errors import EpisodeNotFoundError
from tinsmith_runtime.sql import insert

_MAX_FAILURE = 1024

# Statements of every claim and submit are built once: SQLAlchemy takes longer to build one than
# SQLite to run it.
_MUTABLE = (
    "state",
    "num_attempts",
    "client_id",
    "lease_expire_s",
    "lease_duration_s",
    "outcome",
    "failures",
    "num_model_calls",
    "trajectory_bytes",
    "revision",
    "end_time_s",
)
_UPDATE = (
    sa.update(episodes)
    .where(episodes.c.serial == sa.bindparam("row_serial"))
    .values({name: sa.bindparam(name) for name in _MUTABLE})
)
_BY_ID = sa.select(episodes).where(episodes.c.episode_id == sa.bindparam("episode_id"))
_OLDEST = (
    sa.select(episodes)
    .where(
        episodes.c.project == sa.bindparam("project"),
        episodes.c.queue == sa.bindparam("queue"),
        episodes.c.type == sa.bindparam("type"),
        episodes.c.state == EpisodeState.QUEUED.value,
    )
    .order_by(episodes.c.serial)
    .limit(1)
)
_END_ATTEMPT = (
    sa.update(attempts)
    .where(
        attempts.c.serial == sa.bindparam("row_serial"),
        attempts.c.attempt == sa.bindparam("row_attempt"),
    )
    .values(end=sa.bindparam("how"))
)


def episode_not_found(name: EpisodeName) -> EpisodeNotFoundError:
    """Return the error of an episode that is not there, or of another project."""
    return EpisodeNotFoundError(f"episode {name} does not exist", episode=name)


def get(connection: sa.Connection, name: EpisodeName) -> Episode:
    """Return an episode.

    Raises:
        EpisodeNotFoundError: If the project has none of this name.
    """
    found = find_by_id(connection, name.episode)
    if found is None or found.project != name.project:
        raise episode_not_found(name)
    return found


def find_by_id(connection: sa.Connection, episode_id: str) -> Episode | None:
    """Return the episode of an id, in whatever project."""
    row = connection.execute(_BY_ID, {"episode_id": episode_id}).first()
    return None if row is None else _episode(row)


def find_oldest(connection: sa.Connection, key: QueueKey) -> Episode | None:
    """Return the episode that has waited longest in a queue."""
    values = {"project": key.project, "queue": key.queue, "type": key.type.value}
    row = connection.execute(_OLDEST, values).first()
    return None if row is None else _episode(row)


def select(connection: sa.Connection, query: sa.Select[Any]) -> list[Episode]:
    """Return the episodes of a query."""
    return [_episode(row) for row in connection.execute(query)]


def count(connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> int:
    """Return how many episodes there are."""
    query = sa.select(sa.func.count()).select_from(episodes).where(*conditions)
    number: int = connection.execute(query).scalar_one()
    return number


def in_queue(key: QueueKey, state: EpisodeState) -> sa.ColumnElement[bool]:
    """Return the condition of being in a queue and state."""
    return sa.and_(
        episodes.c.project == key.project,
        episodes.c.queue == key.queue,
        episodes.c.type == key.type.value,
        episodes.c.state == state.value,
    )


def change(connection: sa.Connection, episode: Episode, **values: Any) -> Episode:
    """Write some fields of an episode, and return it as it is then."""
    changed = dataclasses.replace(episode, **values)
    columns = {name: _column_value(getattr(changed, name)) for name in _MUTABLE}
    columns["outcome"] = columns["outcome"] or ""
    connection.execute(_UPDATE, {**columns, "row_serial": episode.serial})
    return changed


def end_attempt(connection: sa.Connection, episode: Episode, end: AttemptEnd) -> None:
    """Note how the current attempt ended; its token and key are good for nothing from then on."""
    connection.execute(
        _END_ATTEMPT,
        {"row_serial": episode.serial, "row_attempt": episode.num_attempts, "how": end.value},
    )


def give_up_attempt(
    connection: sa.Connection, episode: Episode, end: AttemptEnd, reason: str, *, now_s: float
) -> Episode:
    """Put an episode back into its queue, or end it as dead after its last attempt.

    What was said in the attempt is dropped with it. The place in the queue stays.
    """
    end_attempt(connection, episode, end)
    _drop_calls(connection, episode)
    failure = f"attempt {episode.num_attempts} by {episode.client_id}: {reason}"[:_MAX_FAILURE]
    values: dict[str, Any] = {
        "lease_expire_s": None,
        "failures": (*episode.failures, failure),
        "num_model_calls": 0,
        "trajectory_bytes": 0,
    }
    if episode.num_attempts < episode.max_attempts:
        return change(connection, episode, state=EpisodeState.QUEUED, client_id="", **values)
    return finish(connection, episode, EpisodeState.DEAD, now_s=now_s, **values)


def cancel(connection: sa.Connection, episode: Episode, *, now_s: float) -> Episode:
    """End an episode that is not to be played any more."""
    if episode.state is EpisodeState.CLAIMED:
        end_attempt(connection, episode, AttemptEnd.CANCELLED)
    _drop_calls(connection, episode)
    return finish(
        connection,
        episode,
        EpisodeState.CANCELLED,
        now_s=now_s,
        num_model_calls=0,
        trajectory_bytes=0,
    )


def finish(
    connection: sa.Connection, episode: Episode, state: EpisodeState, *, now_s: float, **values: Any
) -> Episode:
    """End an episode, with the next revision of its project."""
    values = {"state": state, "end_time_s": now_s, "lease_expire_s": None, **values}
    revision = _next_revision(connection, episode.project)
    return change(connection, episode, revision=revision, **values)


def last_revision(connection: sa.Connection, project: str) -> int:
    """Return the revision of the last end of a project; 0 before the first."""
    query = sa.select(projects.c.last_revision).where(projects.c.project == project)
    return connection.execute(query).scalar() or 0


def load_calls(connection: sa.Connection, serials: Sequence[int]) -> dict[int, list[StoredCall]]:
    """Return the recorded calls of episodes, in the order of their arrival."""
    calls: dict[int, list[StoredCall]] = {serial: [] for serial in serials}
    query = (
        sa.select(model_calls.c.serial, model_calls.c.first_index, model_calls.c.content)
        .where(model_calls.c.serial.in_(serials))
        .order_by(model_calls.c.serial, model_calls.c.first_index)
    )
    for row in connection.execute(query):
        calls[row.serial].append(StoredCall(row.first_index, row.content))
    return calls


def delete(connection: sa.Connection, serials: Iterable[int]) -> None:
    """Remove episodes with all that belongs to them."""
    chosen = list(serials)
    for table in (model_calls, attempts, episodes):
        connection.execute(sa.delete(table).where(table.c.serial.in_(chosen)))


def _drop_calls(connection: sa.Connection, episode: Episode) -> None:
    if episode.num_model_calls:
        connection.execute(sa.delete(model_calls).where(model_calls.c.serial == episode.serial))


def _next_revision(connection: sa.Connection, project: str) -> int:
    statement = insert(connection, projects).values(project=project, last_revision=1)
    statement = statement.on_conflict_do_update(
        index_elements=[projects.c.project],
        set_={"last_revision": projects.c.last_revision + 1},
    ).returning(projects.c.last_revision)
    revision: int = connection.execute(statement).scalar_one()
    return revision


def _column_value(value: Any) -> Any:
    if isinstance(value, EpisodeState):
        return value.value
    if isinstance(value, EpisodeOutcome):
        return json.dumps(dataclasses.asdict(value))
    return list(value) if isinstance(value, tuple) else value


def _episode(row: sa.Row[Any]) -> Episode:
    values = dict(row._mapping)
    return Episode(
        **{
            **values,
            "state": EpisodeState(row.state),
            "type": EpisodeType(row.type),
            "failures": tuple(row.failures),
            "outcome": _outcome(row.outcome),
        }
    )


def _outcome(text: str) -> EpisodeOutcome | None:
    if not text:
        return None
    values = json.loads(text)
    return EpisodeOutcome(**{**values, "step_rewards": tuple(values["step_rewards"])})
