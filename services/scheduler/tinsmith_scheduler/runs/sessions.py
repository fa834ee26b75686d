"""Sessions: alive for as long as their client says so.

A heartbeat is noted in memory only. So a scheduler that restarts gives every active session one
whole timeout: a live client needs it, and a dead one costs no more. Resources are created in a
session. Its sampling sessions end with it; its runs are only parked, and another session of the
project may use them. A session that lost its heartbeat can be resumed after a crash of its client.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

import sqlalchemy as sa

from tinsmith.names import SessionName
from tinsmith_runtime.errors import (
    ResourceExhaustedError,
    SessionFinishedError,
    SessionNotFoundError,
)
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.rpc.requests import decode_page_token, encode_page_token
from tinsmith_runtime.sql import Database
from tinsmith_scheduler.metrics import ACTIVE_SESSIONS, ENDED_SESSIONS
from tinsmith_scheduler.runs.run_store import (
    count_active_sessions,
    forget_parking,
    list_run_names,
    owe_parking,
    sessions_with_live_runs,
)
from tinsmith_scheduler.store.database import answer_once, next_serial, record_action
from tinsmith_scheduler.store.records import (
    NewSession,
    PageRequest,
    Session,
    SessionContents,
    SessionState,
)
from tinsmith_scheduler.store.tables import sampling_sessions, sessions


@dataclass(slots=True)
class _Live:
    session: Session
    heartbeat_s: float


class Sessions:
    """The sessions of all projects.

    Args:
        database: Where they are kept.
        timeout_s: Life of a session without a heartbeat.
        silent_s: Time without a heartbeat after which a session gives way to others.
        max_per_project: Limits the active sessions of a project.
        clock: Monotonic seconds.
        wall_clock: Seconds since the epoch.
    """

    def __init__(
        self,
        database: Database,
        *,
        timeout_s: float,
        silent_s: float,
        max_per_project: int,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._silent_s = silent_s
        self._max_per_project = max_per_project
        self._timeout_s = timeout_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._live: dict[str, _Live] = {}

    async def load(self) -> None:
        """Give every active session one timeout from now; call once, before serving."""
        query = sa.select(sessions).where(sessions.c.state == SessionState.ACTIVE.value)
        active = await self._database.read(
            lambda connection: [_session(row) for row in connection.execute(query)]
        )
        self._live = {session.name: _Live(session, self._clock()) for session in active}
        ACTIVE_SESSIONS.set(len(self._live))

    async def create(
        self,
        new: NewSession,
        request: RequestIdentity,
        encode: Callable[[Session], bytes],
        caller: Caller,
    ) -> bytes:
        """Open a session and return it encoded.

        Raises:
            RequestIdReusedError: If the request id was used with another body.
            ResourceExhaustedError: If the project has as many sessions as it may have.
        """
        session = Session(
            name=str(SessionName(new.project, f"ses-{secrets.token_hex(6)}")),
            project=new.project,
            state=SessionState.ACTIVE,
            display_name=new.display_name,
            labels=new.labels,
            client_version=new.client_version,
            create_time_s=self._wall_clock(),
            pool=caller.pool,
        )
        response = encode(session)

        def insert(connection: sa.Connection) -> bytes:
            if count_active_sessions(connection, new.project) >= self._max_per_project:
                raise ResourceExhaustedError(
                    f"project {new.project} has {self._max_per_project} sessions that go on, which "
                    f"is its limit; finish one, or wait {self._timeout_s:g} s after its last "
                    "heartbeat",
                    project=new.project,
                    limit=self._max_per_project,
                )
            connection.execute(
                sa.insert(sessions).values(
                    name=session.name,
                    project=session.project,
                    state=session.state.value,
                    display_name=session.display_name,
                    labels=dict(session.labels),
                    client_version=session.client_version,
                    create_time_s=session.create_time_s,
                    serial=next_serial(sessions, sessions.c.project == session.project),
                    pool=session.pool,
                )
            )
            record_action(
                connection,
                caller,
                "create_session",
                session.name,
                project=session.project,
                now_s=session.create_time_s,
            )
            return response

        # Watched from before the commit: a caller that gives up does not undo it. Should the
        # request turn out to be a repeat, the session that was not made is dropped below.
        self._live[session.name] = _Live(session, self._clock())
        try:
            answer = await answer_once(self._database, request, insert, now_s=session.create_time_s)
        except Exception:
            del self._live[session.name]
            raise
        if answer != response:
            del self._live[session.name]
        ACTIVE_SESSIONS.set(len(self._live))
        return answer

    async def get(self, name: SessionName) -> SessionContents:
        """Return a session in whatever state, with what was created in it.

        Raises:
            SessionNotFoundError: If there is no such session.
        """

        def read(connection: sa.Connection) -> SessionContents:
            handles = (
                sa.select(sampling_sessions.c.name)
                .where(sampling_sessions.c.session == str(name))
                .order_by(sampling_sessions.c.serial)
            )
            return SessionContents(
                session=_get_session(connection, name),
                runs=tuple(list_run_names(connection, str(name))),
                sampling_sessions=tuple(connection.execute(handles).scalars()),
            )

        return await self._database.read(read)

    async def list(self, project: str, page: PageRequest) -> tuple[list[Session], str]:
        """Return sessions of a project, newest first, and the token that goes on.

        Raises:
            InvalidFieldError: If the page token is not one of this list.
        """
        list_name = f"projects/{project}/sessions"
        before = decode_page_token(list_name, page.token)
        query = (
            sa.select(sessions)
            .where(sessions.c.project == project)
            .order_by(sessions.c.serial.desc())
            .limit(page.size + 1)
        )
        if before is not None:
            query = query.where(sessions.c.serial < before)
        found = await self._database.read(
            lambda connection: [_session(row) for row in connection.execute(query)]
        )
        shown = found[: page.size]
        more = len(found) > len(shown)
        return shown, encode_page_token(list_name, shown[-1].serial) if more else ""

    async def heartbeat(self, name: SessionName) -> Session:
        """Keep a session alive.

        Raises:
            SessionNotFoundError: If there is no such session.
            SessionFinishedError: If it was finished, or lost its heartbeat.
        """
        live = self._live.get(str(name))
        if live is None:
            session = await self._read(name)
            raise _finished(session.name, session.state)
        live.heartbeat_s = self._clock()
        return live.session

    async def resume(self, name: SessionName) -> Session:
        """Make a session active again, with a fresh heartbeat; repeating it succeeds.

        Raises:
            SessionNotFoundError: If there is no such session.
            SessionFinishedError: If it was finished.
        """

        def write(connection: sa.Connection) -> Session:
            session = _get_session(connection, name)
            if session.state is SessionState.FINISHED:
                raise _finished(session.name, session.state)
            connection.execute(
                sa.update(sessions)
                .where(sessions.c.name == session.name)
                .values(state=SessionState.ACTIVE.value, end_time_s=None)
            )
            forget_parking(connection, session.name)
            return replace(session, state=SessionState.ACTIVE)

        live = self._live.get(str(name))
        if live is not None:
            # Before the write: it must not expire meanwhile.
            live.heartbeat_s = self._clock()
        session = await self._database.write(write)
        self._live[session.name] = _Live(session, self._clock())
        ACTIVE_SESSIONS.set(len(self._live))
        return session

    async def finish(self, name: SessionName, outcome: str, caller: Caller) -> Session:
        """End a session; repeating it succeeds.

        Raises:
            SessionNotFoundError: If there is no such session.
        """
        now_s = self._wall_clock()

        def record(connection: sa.Connection) -> None:
            record_action(
                connection, caller, "finish_session", str(name), project=name.project, now_s=now_s
            )

        await self._end(str(name), SessionState.FINISHED, outcome, record)
        return await self._read(name)

    async def expire_overdue(self) -> int:
        """End the sessions whose heartbeat stopped; return how many."""
        overdue = [name for name, live in self._live.items() if self._is_overdue(live)]
        num_ended = 0
        for name in overdue:
            # It may have been resumed while the ones before were ended.
            live = self._live.get(name)
            if live is not None and self._is_overdue(live):
                await self._end(name, SessionState.EXPIRED)
                num_ended += 1
        return num_ended

    async def end_longest_silent(self, project: str, *, keep: SessionName) -> bool:
        """End the session of a project that was silent longest and has runs that take a place.

        Its client may resume it, as one that lost its heartbeat; one that is heard of stays.

        Args:
            project: Id of the project.
            keep: A session that is heard of just now.

        Returns:
            Whether there was one.
        """
        silent_since_s = self._clock() - self._silent_s
        silent = sorted(
            (live.heartbeat_s, name)
            for name, live in self._live.items()
            if name != str(keep)
            and SessionName.parse(name).project == project
            and live.heartbeat_s < silent_since_s
        )
        holding = await self._database.read(
            lambda connection: sessions_with_live_runs(connection, project)
        )
        for _, name in silent:
            live = self._live.get(name)
            # It may have been heard of while the runs were looked up.
            if name in holding and live is not None and live.heartbeat_s < silent_since_s:
                await self._end(name, SessionState.EXPIRED)
                return True
        return False

    def _is_overdue(self, live: _Live) -> bool:
        return self._clock() - live.heartbeat_s > self._timeout_s

    async def _end(
        self,
        name: str,
        state: SessionState,
        outcome: str = "",
        record: Callable[[sa.Connection], None] | None = None,
    ) -> None:
        def write(connection: sa.Connection) -> bool:
            changed = connection.execute(
                sa.update(sessions)
                .where(sessions.c.name == name, sessions.c.state == SessionState.ACTIVE.value)
                .values(state=state.value, outcome=outcome)
            )
            if changed.rowcount == 0:
                return False
            connection.execute(
                sa.delete(sampling_sessions).where(sampling_sessions.c.session == name)
            )
            owe_parking(connection, name)
            if record is not None:
                record(connection)
            return True

        ended = self._live.get(name)
        was_active = await self._database.write(write)
        if self._live.get(name) is ended:
            self._live.pop(name, None)
        ACTIVE_SESSIONS.set(len(self._live))
        if was_active:
            ENDED_SESSIONS.labels(state.value).inc()

    async def _read(self, name: SessionName) -> Session:
        return await self._database.read(lambda connection: _get_session(connection, name))


def require_active(connection: sa.Connection, name: SessionName) -> Session:
    """Return a session that things may be created in.

    Raises:
        SessionNotFoundError: If there is no such session.
        SessionFinishedError: If it was finished, or lost its heartbeat.
    """
    session = _get_session(connection, name)
    if session.state is not SessionState.ACTIVE:
        raise _finished(session.name, session.state)
    return session


def session_not_found(name: SessionName) -> SessionNotFoundError:
    """Return the error of a session that does not exist, or is not the caller's."""
    return SessionNotFoundError(f"session {name} does not exist; create one", session=name)


def _get_session(connection: sa.Connection, name: SessionName) -> Session:
    row = connection.execute(sa.select(sessions).where(sessions.c.name == str(name))).first()
    if row is None:
        raise session_not_found(name)
    return _session(row)


def _finished(name: str, state: SessionState) -> SessionFinishedError:
    why = (
        "lost its heartbeat; resume it or create a new one"
        if state is SessionState.EXPIRED
        else "was finished; create a new one"
    )
    return SessionFinishedError(f"session {name} {why}", session=name, state=state.value)


def _session(row: sa.Row[tuple[object, ...]]) -> Session:
    values = dict(row._mapping)
    del values["end_time_s"]
    return Session(**{**values, "state": SessionState(values["state"])})
