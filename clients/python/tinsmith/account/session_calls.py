"""Calls on the sessions of a project, as coroutines of the background loop."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.rpc.lists import read_pages
from tinsmith.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One client's stay on the server."""

    name: str
    state: str
    """`active`, `finished` by its client, or `expired` without a heartbeat."""
    outcome: str
    """How its client says that it went: `success`, `errored` or `interrupted`; else empty."""
    display_name: str
    create_time: datetime.datetime | None
    labels: dict[str, str] = field(default_factory=dict)
    training_runs: tuple[str, ...] = ()
    """Runs that were created in it and not deleted, oldest first; of `get` alone."""
    sampling_sessions: tuple[str, ...] = ()
    """Of `get` alone."""


class SessionCalls:
    """The sessions of a project: what its clients opened, and how they ended.

    Example:
        >>> open_ones = [each for each in client.sessions.list() if each.state == "active"]
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core

    @call
    async def _list(self) -> list[SessionInfo]:
        """Return the sessions of the project, newest first.

        Returns:
            The sessions, without their runs.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> names = [session.name for session in client.sessions.list()]
        """
        pages = read_pages(
            self._core.transport,
            self._core.scheduler,
            lambda c: c.scheduler.ListSessions,
            scheduler_pb2.ListSessionsRequest(parent=self._core.project),
        )
        return [_decode(message) async for page in pages for message in page.sessions]

    @call
    async def _get(self, name: str) -> SessionInfo:
        """Return a session with its runs.

        Args:
            name: Its resource name or id.

        Returns:
            The session.

        Raises:
            NotFoundError: If there is no such session.

        Example:
            >>> runs = client.sessions.get(client.session).training_runs
        """
        request = scheduler_pb2.GetSessionRequest(name=self._core.session_name(name))
        return _decode(
            await self._core.transport.call(
                self._core.scheduler, lambda c: c.scheduler.GetSession, request
            )
        )


def _decode(message: scheduler_pb2.Session) -> SessionInfo:
    state = scheduler_pb2.Session.State.Name(message.state)
    return SessionInfo(
        name=message.name,
        state=state.removeprefix("STATE_").lower(),
        outcome=message.outcome,
        display_name=message.display_name,
        create_time=message.create_time.ToDatetime(tzinfo=datetime.UTC),
        labels=dict(message.labels),
        training_runs=tuple(message.training_runs),
        sampling_sessions=tuple(message.sampling_sessions),
    )
