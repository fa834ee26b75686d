"""Registering, reading, watching and cancelling episodes."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator, Sequence

import sqlalchemy as sa

from tinsmith.names import EpisodeName
from tinsmith_coordinator import metrics
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.store import episode_store
from tinsmith_coordinator.store.database import Clock
from tinsmith_coordinator.store.records import (
    OPEN_STATES,
    Episode,
    EpisodePage,
    EpisodeState,
    NewEpisode,
    StoredCall,
)
from tinsmith_coordinator.store.tables import episodes, requests
from tinsmith_runtime.errors import QueueFullError, RequestIdReusedError
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.shielded import see_through
from tinsmith_runtime.sql import Database

MAX_QUIET_S = 20.0
"""A watch is ended after this time without an episode, so that a dead peer is found out."""

_ID_BYTES = 12
_FULL_RETRY_S = 5.0
_WATCH_BATCH = 8
_LIST_BATCH = 100
# A whole queue in one transaction would hold up the renewal of all leases for seconds.
_CANCEL_BATCH = 200
_NEWEST = sa.select(sa.func.max(episodes.c.serial))
# With one more episode, and all else of it, below the 4 MiB that gRPC's clients take by default.
_MAX_PAGE_BYTES = 2 * 2**20

WatchedEpisode = tuple[Episode, list[StoredCall]]


class Episodes:
    """The episodes of all projects.

    Args:
        bells: Rung when episodes come and end.
        clock: The time, within a transaction.
        max_open: Episodes of one project that have not ended.
    """

    def __init__(self, database: Database, bells: Bells, *, clock: Clock, max_open: int) -> None:
        self._database = database
        self._bells = bells
        self._clock = clock
        self._max_open = max_open

    async def create(self, new: Sequence[NewEpisode], request: RequestIdentity) -> list[Episode]:
        """Register episodes, all or none; a repeated request registers nothing.

        Raises:
            RequestIdReusedError: If the request id was used with another body.
            QueueFullError: If too many episodes of the project have not ended.
        """

        def create(connection: sa.Connection) -> tuple[list[Episode], bool]:
            known = self._recall(connection, request)
            if known is not None:
                return known, False
            self._require_room(connection, request.project, len(new))
            return self._insert(connection, new, request), True

        async def create_and_tell() -> list[Episode]:
            created, is_new = await self._database.write(create)
            if is_new:
                metrics.REGISTERED_EPISODES.inc(len(created))
                for episode in created:
                    self._bells.ring(episode.queue_key)
            return created

        return await see_through(create_and_tell())

    async def get(
        self, name: EpisodeName, *, include_calls: bool
    ) -> tuple[Episode, list[StoredCall]]:
        """Return an episode, and its recorded calls if asked.

        Raises:
            EpisodeNotFoundError: If the project has none of this name.
        """

        def read(connection: sa.Connection) -> tuple[Episode, list[StoredCall]]:
            episode = episode_store.get(connection, name)
            if not include_calls:
                return episode, []
            return episode, episode_store.load_calls(connection, [episode.serial])[episode.serial]

        return await self._database.read(read)

    async def list_page(
        self,
        project: str,
        *,
        page_size: int,
        before_serial: int | None,
        queue: str,
        states: Sequence[EpisodeState],
    ) -> EpisodePage:
        """Return a part of the episodes of a project, newest first.

        It is smaller than asked for where the episodes are large.
        """
        query = sa.select(episodes).where(episodes.c.project == project)
        if before_serial is not None:
            query = query.where(episodes.c.serial < before_serial)
        if queue:
            query = query.where(episodes.c.queue == queue)
        if states:
            query = query.where(episodes.c.state.in_([state.value for state in states]))
        batch_size = min(page_size + 1, _LIST_BATCH)
        query = query.order_by(episodes.c.serial.desc()).limit(batch_size)

        def read(connection: sa.Connection) -> EpisodePage:
            page: list[Episode] = []
            num_bytes, part = 0, query
            while True:
                found = episode_store.select(connection, part)
                for episode in found:
                    num_bytes += _size(episode)
                    if page and (len(page) == page_size or num_bytes > _MAX_PAGE_BYTES):
                        return EpisodePage(page, page[-1].serial)
                    page.append(episode)
                if len(found) < batch_size:
                    return EpisodePage(page, None)
                part = query.where(episodes.c.serial < page[-1].serial)

        return await self._database.read(read)

    async def cancel(
        self, project: str, names: Sequence[EpisodeName], queue: str
    ) -> tuple[int, int]:
        """End episodes that are open: those named, or all of a queue.

        Returns:
            How many there were, and the last revision of the project.

        Raises:
            EpisodeNotFoundError: If one of the names is unknown; nothing was cancelled.
        """
        last_serial = 0

        def cancel(
            connection: sa.Connection,
        ) -> tuple[list[tuple[Episode, Episode]], int, bool, int]:
            # What is registered while this goes on is not meant.
            newest = last_serial or connection.execute(_NEWEST).scalar() or 0
            chosen = [episode_store.get(connection, name) for name in dict.fromkeys(names)]
            if not names:
                query = sa.select(episodes).where(
                    episodes.c.project == project,
                    episodes.c.queue == queue,
                    episodes.c.state.in_([state.value for state in OPEN_STATES]),
                    episodes.c.serial <= newest,
                )
                query = query.order_by(episodes.c.serial).limit(_CANCEL_BATCH)
                chosen = episode_store.select(connection, query)
            now_s = self._clock(connection)
            changes = [
                (episode, episode_store.cancel(connection, episode, now_s=now_s))
                for episode in chosen
                if episode.state.is_open
            ]
            is_more = not names and len(chosen) == _CANCEL_BATCH
            return changes, episode_store.last_revision(connection, project), is_more, newest

        async def cancel_and_tell() -> tuple[int, int]:
            nonlocal last_serial
            num_cancelled, is_more = 0, True
            while is_more:
                cancelled, revision, is_more, last_serial = await self._database.write(cancel)
                for before, after in cancelled:
                    announce(self._bells, before, after)
                num_cancelled += len(cancelled)
            return num_cancelled, revision

        return await see_through(cancel_and_tell())

    async def watch(
        self, project: str, queue: str, after_revision: int
    ) -> AsyncIterator[WatchedEpisode]:
        """Yield the episodes of a queue as they end, until nothing ends for a while.

        Raises:
            DrainingError: If the pod is about to end.
        """
        key = ended_key(project, queue)
        while True:
            bell = self._bells.listen(key)
            try:
                ended = await self._read_ended(project, queue, after_revision)
                for episode, calls in ended:
                    yield episode, calls
                    after_revision = episode.revision
                if not ended and not await bell.wait(MAX_QUIET_S):
                    return
            finally:
                self._bells.forget(bell)

    async def _read_ended(
        self, project: str, queue: str, after_revision: int
    ) -> list[WatchedEpisode]:
        query = (
            sa.select(episodes)
            .where(
                episodes.c.project == project,
                episodes.c.queue == queue,
                episodes.c.revision > after_revision,
            )
            .order_by(episodes.c.revision)
            .limit(_WATCH_BATCH)
        )

        def read(connection: sa.Connection) -> list[WatchedEpisode]:
            ended = episode_store.select(connection, query)
            calls = episode_store.load_calls(connection, [episode.serial for episode in ended])
            return [(episode, calls[episode.serial]) for episode in ended]

        return await self._database.read(read)

    def _require_room(self, connection: sa.Connection, project: str, num_new: int) -> None:
        num_open = episode_store.count(
            connection,
            episodes.c.project == project,
            episodes.c.state.in_([state.value for state in OPEN_STATES]),
        )
        if num_open + num_new > self._max_open:
            raise QueueFullError(
                f"{num_open} episodes of the project have not ended, {num_new} more would be above "
                f"{self._max_open}; wait for some to end, or cancel them",
                retry_after_s=_FULL_RETRY_S if num_new <= self._max_open else None,
                num_open=num_open,
                limit=self._max_open,
            )

    def _recall(self, connection: sa.Connection, request: RequestIdentity) -> list[Episode] | None:
        known = connection.execute(
            sa.select(requests).where(
                requests.c.project == request.project, requests.c.request_id == request.request_id
            )
        ).first()
        if known is None:
            return None
        if known.digest != request.digest:
            raise request_id_reused(request.request_id)
        made = sa.select(episodes).where(
            episodes.c.project == request.project,
            episodes.c.serial.between(known.first_serial, known.last_serial),
        )
        found = episode_store.select(connection, made.order_by(episodes.c.serial))
        return [_as_registered(episode) for episode in found]

    def _insert(
        self, connection: sa.Connection, new: Sequence[NewEpisode], request: RequestIdentity
    ) -> list[Episode]:
        now_s = self._clock(connection)
        ids = [secrets.token_hex(_ID_BYTES) for _ in new]
        connection.execute(
            sa.insert(episodes),
            [
                {
                    "episode_id": episode_id,
                    "project": request.project,
                    "queue": each.queue,
                    "type": each.type.value,
                    "state": EpisodeState.QUEUED.value,
                    "task_id": each.task_id,
                    "task_json": each.task_json,
                    "sampling_session": each.sampling_session,
                    "model": each.model,
                    "num_attempts": 0,
                    "max_attempts": each.max_attempts,
                    "client_id": "",
                    "lease_duration_s": 0.0,
                    "outcome": "",
                    "failures": [],
                    "num_model_calls": 0,
                    "trajectory_bytes": 0,
                    "revision": 0,
                    "create_time_s": now_s,
                }
                for episode_id, each in zip(ids, new, strict=True)
            ],
        )
        made = sa.select(episodes).where(episodes.c.episode_id.in_(ids))
        created = episode_store.select(connection, made.order_by(episodes.c.serial))
        connection.execute(
            sa.insert(requests).values(
                project=request.project,
                request_id=request.request_id,
                digest=request.digest,
                first_serial=created[0].serial,
                last_serial=created[-1].serial,
                create_time_s=now_s,
            )
        )
        return created


def _size(episode: Episode) -> int:
    """Return what the parts of an episode take that may be large."""
    parts = [episode.task_json, *episode.failures]
    if episode.outcome is not None:
        parts.append(episode.outcome.metadata_json)
    return sum(len(part.encode()) for part in parts)


def _as_registered(episode: Episode) -> Episode:
    """Return an episode as its registration was answered, whatever became of it."""
    return dataclasses.replace(
        episode,
        state=EpisodeState.QUEUED,
        num_attempts=0,
        client_id="",
        lease_expire_s=None,
        outcome=None,
        failures=(),
        num_model_calls=0,
        revision=0,
        end_time_s=None,
    )


def request_id_reused(request_id: str) -> RequestIdReusedError:
    """Return the error of a request id that came with another body."""
    return RequestIdReusedError(
        f"request id {request_id} was used before with another body; draw a new UUID for a new "
        "request",
        request=request_id,
    )


def ended_key(project: str, queue: str) -> tuple[str, str, str]:
    """Return what is rung when an episode of a queue ends."""
    return ("ended", project, queue)


def held_key(project: str, client_id: str) -> tuple[str, str, str]:
    """Return what is rung when a client holds an episode less."""
    return ("held", project, client_id)


def announce(bells: Bells, before: Episode, after: Episode) -> None:
    """Wake the calls that wait for the state of an episode, after the commit."""
    if before.state is EpisodeState.CLAIMED:
        bells.ring(held_key(before.project, before.client_id))
    if after.state is EpisodeState.QUEUED:
        bells.ring(after.queue_key)
    if not after.state.is_open:
        bells.ring_all(ended_key(after.project, after.queue))
        metrics.ENDED_EPISODES.labels(after.type.value, after.state.value).inc()
