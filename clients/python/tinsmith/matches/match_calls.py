"""Matches on the server: created, joined, read and cancelled; `match_forms.py` has the forms."""

from __future__ import annotations

import os
import socket
import uuid

from tinsmith.matches.member import Member
from tinsmith.matches.types import Match, MatchSpec, decode_match, encode_match
from tinsmith.names import MatchName
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.forms import call
from tinsmith.rpc.lists import read_pages
from tinsmith.rpc.located_service import LocatedService
from tinsmith.v1 import coordinator_pb2


class MatchCalls:
    """The matches of a project.

    Example:
        >>> match = client.matches.create(MatchSpec(agents=["black", "white"], num_games=16))
        >>> with client.matches.join(match.name, "black") as member:
        ...     for epoch in member.epochs():
        ...         with epoch.rollout():
        ...             play(member, epoch.index)
        ...         with epoch.update():
        ...             train()
    """

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._service = LocatedService.of_coordinator(core)

    @call
    async def _create(self, spec: MatchSpec) -> Match:
        """Open a match, which waits for its agents.

        Args:
            spec: What is agreed.

        Returns:
            The match.

        Raises:
            InvalidArgumentError: If it cannot be played, such as with a single agent.
            ResourceExhaustedError: If too many matches of the project have not ended.

        Example:
            >>> match = client.matches.create(MatchSpec(agents=["black", "white"]))
        """
        request = coordinator_pb2.CreateMatchRequest(
            parent=self._core.project, request_id=str(uuid.uuid4()), match=encode_match(spec)
        )
        answer = await self._core.transport.call(
            await self._service.endpoint(), lambda c: c.coordinator.CreateMatch, request
        )
        return decode_match(answer)

    @call
    async def _join(self, match: str, agent: str, *, client_id: str = "") -> Member:
        """Take the seat of an agent, and keep it until the member leaves.

        Args:
            match: Its name or id.
            agent: The agent.
            client_id: Names this program, for people; drawn if empty.

        Returns:
            The member.

        Raises:
            NotFoundError: If there is no such match.
            FailedPreconditionError: If another client holds the seat (`SEAT_TAKEN`), or the match
                is over (`MATCH_ENDED`).

        Example:
            >>> member = client.matches.join(match.name, "black")
        """
        request = coordinator_pb2.JoinMatchRequest(
            name=self._match_name(match),
            request_id=str(uuid.uuid4()),
            agent=agent,
            client_id=client_id or f"{socket.gethostname()}-{os.getpid()}",
        )
        endpoint = await self._service.endpoint()
        answer = await self._core.transport.call(
            endpoint, lambda c: c.coordinator.JoinMatch, request
        )
        member = Member(self._core, endpoint, decode_match(answer.match), agent, answer.lease_token)
        member.begin()
        return member

    @call
    async def _get(self, match: str) -> Match:
        """Return a match, by its name or id.

        Returns:
            The match.

        Raises:
            NotFoundError: If there is none.

        Example:
            >>> print(client.matches.get(name).waiting_for)
        """
        request = coordinator_pb2.GetMatchRequest(name=self._match_name(match))
        answer = await self._core.transport.call(
            await self._service.endpoint(), lambda c: c.coordinator.GetMatch, request
        )
        return decode_match(answer)

    @call
    async def _list(self) -> list[Match]:
        """Return the matches of the project, newest first.

        Returns:
            The matches.

        Raises:
            TinsmithError: If the server cannot be reached or refuses the key.

        Example:
            >>> running = [each for each in client.matches.list() if each.is_open]
        """
        pages = read_pages(
            self._core.transport,
            await self._service.endpoint(),
            lambda c: c.coordinator.ListMatches,
            coordinator_pb2.ListMatchesRequest(parent=self._core.project),
        )
        return [decode_match(message) async for page in pages for message in page.matches]

    @call
    async def _cancel(self, match: str) -> Match:
        """End a match for all its members; one that has ended stays as it is.

        Returns:
            The match.

        Raises:
            NotFoundError: If there is none.

        Example:
            >>> client.matches.cancel(match.name)
        """
        request = coordinator_pb2.CancelMatchRequest(name=self._match_name(match))
        answer = await self._core.transport.call(
            await self._service.endpoint(), lambda c: c.coordinator.CancelMatch, request
        )
        return decode_match(answer)

    def _match_name(self, value: str) -> str:
        if "/" not in value:
            return str(MatchName(self._core.settings.project, value))
        return str(MatchName.parse(value))
