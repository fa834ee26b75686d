"""The seat of an agent: kept by heartbeats, told of moves by a watch, and in step by barriers.

A member runs in the background loop of its client. Its methods block, and may be called from any
thread; those with `_async` are for asyncio code. A member whose program hangs in its own code keeps
its seat, since heartbeats go on. That is what the time limits of turns and barriers are for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tinsmith.errors import FailedPreconditionError, TinsmithError
from tinsmith.matches.game_log import GameLog
from tinsmith.matches.types import POINTS, Match, MatchGame, decode_game, decode_match
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.durations import encode_duration
from tinsmith.rpc.transport import Backoff, Endpoint, is_away
from tinsmith.v1 import coordinator_pb2

_LOG = logging.getLogger(__name__)

_HEARTBEATS_PER_LEASE = 4
_LONG_POLL_S = 20.0
_OVER_REASONS = frozenset({"LEASE_LOST", "MATCH_ENDED", "MATCH_NOT_FOUND"})


class Member:
    """The seat of an agent in a match. Usable as a context manager, which leaves it at the end."""

    def __init__(
        self, core: ClientCore, endpoint: Endpoint, match: Match, agent: str, lease_token: str
    ) -> None:
        self._core = core
        self._endpoint = endpoint
        self._lease_token = lease_token
        self._log = GameLog()
        self._tasks: list[asyncio.Task[None]] = []
        self.match = match
        """As it was known last."""
        self.agent = agent

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs of the match, from the one that it is at, until it has had its last.

        Each must be gone through by `rollout` and then `update`.

        Example:
            >>> for epoch in member.epochs():
            ...     with epoch.rollout():
            ...         play(epoch.index)
            ...     with epoch.update():
            ...         train()
        """
        index = self.match.epoch
        while not self.match.num_epochs or index < self.match.num_epochs:
            yield Epoch(self, index)
            index += 1

    def arrive(self, point: str, epoch: int) -> Match:
        """Arrive at a barrier, and return once it opens.

        Args:
            point: `rollout_start`, `rollout_end`, `update_start` or `update_end`.
            epoch: From 0.

        Raises:
            AbortedError: If the seat is lost (`LEASE_LOST`).
            FailedPreconditionError: If the match is over (`MATCH_ENDED`), or a barrier before it is
                not open (`OUT_OF_TURN`).
        """
        return self._core.background.call(self._arrive(point, epoch))

    async def arrive_async(self, point: str, epoch: int) -> Match:
        """Do as `arrive`, without blocking."""
        return await self._core.background.acall(self._arrive(point, epoch))

    def leave(self, reason: str = "") -> None:
        """Give the seat up; the policy of the match says what follows. Repeating it is harmless.

        Raises:
            TinsmithError: If the server cannot be reached.
        """
        self._core.background.call(self._leave(reason))

    async def leave_async(self, reason: str = "") -> None:
        """Do as `leave`, without blocking."""
        await self._core.background.acall(self._leave(reason))

    async def take_turn_async(
        self,
        epoch: int,
        game: int,
        turn: int,
        action: Any,
        *,
        next_agents: Sequence[str] = (),
        rewards: Mapping[str, float] | None = None,
    ) -> MatchGame:
        """Make a move; `SeatInstance` does so for a rollout.

        Args:
            epoch: From 0.
            game: Of the epoch, from 0.
            turn: Of the game, from 0.
            action: Anything that JSON can hold.
            next_agents: Those that move next, where the order is custom.
            rewards: What the game was worth to each agent; given with the move that ends it.

        Returns:
            The game.

        Raises:
            AbortedError: If the seat is lost (`LEASE_LOST`).
            FailedPreconditionError: If it is not the agent's turn (`OUT_OF_TURN`), or the match is
                over (`MATCH_ENDED`).
        """
        request = coordinator_pb2.TakeTurnRequest(
            name=self.match.name,
            lease_token=self._lease_token,
            epoch=epoch,
            game=game,
            turn=turn,
            action_json=json.dumps(action),
            next_agents=next_agents,
            is_over=rewards is not None,
            rewards=rewards or {},
        )
        return await self._core.background.acall(
            self._send_about_game(lambda c: c.coordinator.TakeTurn, request)
        )

    async def abandon_async(self, epoch: int, game: int, reason: str) -> MatchGame:
        """Give a game up for all its agents; one that has ended stays as it is.

        Raises:
            AbortedError: If the seat is lost (`LEASE_LOST`).
            FailedPreconditionError: If the match is over (`MATCH_ENDED`).
        """
        request = coordinator_pb2.AbandonGameRequest(
            name=self.match.name,
            lease_token=self._lease_token,
            epoch=epoch,
            game=game,
            reason=reason[:1000],
        )
        return await self._core.background.acall(
            self._send_about_game(lambda c: c.coordinator.AbandonGame, request)
        )

    async def wait_for_turn_async(
        self, epoch: int, game: int, turn: int
    ) -> tuple[MatchGame, Mapping[str, Any]]:
        """Wait for the moves of a turn, or the end of the game.

        Returns:
            The game, and the moves of the turn by agent; none if it was abandoned before.

        Raises:
            TinsmithError: If the seat is lost, or the match is over.
        """
        found, moves = await self._core.background.acall(self._log.wait_for_turn(epoch, game, turn))
        return found, {agent: json.loads(action) for agent, action in moves.items()}

    async def wait_for_begin_async(self, epoch: int, game: int) -> MatchGame:
        """Wait until a game has begun, and return it.

        Raises:
            TinsmithError: If the seat is lost, or the match is over.
        """
        return await self._core.background.acall(self._log.wait_for_begin(epoch, game))

    def __enter__(self) -> Member:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.leave("" if kind is None else f"it failed: {kind.__name__}")

    async def __aenter__(self) -> Member:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.leave_async("" if kind is None else f"it failed: {kind.__name__}")

    def __repr__(self) -> str:
        return f"Member({self.match.name!r}, {self.agent!r})"

    def begin(self) -> None:
        """Keep the seat and watch the match from now on. Inside the background loop."""
        self._tasks = [
            self._core.background.spawn(self._keep_seat()),
            self._core.background.spawn(self._watch()),
        ]

    async def _arrive(self, point: str, epoch: int) -> Match:
        request = coordinator_pb2.ArriveAtBarrierRequest(
            name=self.match.name,
            lease_token=self._lease_token,
            barrier=coordinator_pb2.Barrier(epoch=epoch, point=POINTS[point]),
            timeout=encode_duration(_LONG_POLL_S),
        )
        while True:
            answer = await self._core.transport.call(
                self._endpoint,
                lambda c: c.coordinator.ArriveAtBarrier,
                request,
                timeout_s=_LONG_POLL_S + self._core.settings.call_timeout_s,
            )
            self.match = decode_match(answer.match)
            if answer.is_open:
                return self.match

    async def _leave(self, reason: str) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []
        request = coordinator_pb2.LeaveMatchRequest(
            name=self.match.name, lease_token=self._lease_token, reason=reason[:1000]
        )
        with contextlib.suppress(_OverError):
            answer = await self._send(lambda c: c.coordinator.LeaveMatch, request)
            self.match = decode_match(answer)

    async def _send_about_game(self, method: Any, request: Any) -> MatchGame:
        answer = await self._core.transport.call(self._endpoint, method, request)
        game = decode_game(answer)
        self._log.note(game)
        return game

    async def _send(self, method: Any, request: Any) -> Any:
        """Send a call of the seat.

        Raises:
            _OverError: If the seat is lost or the match is over.
        """
        try:
            return await self._core.transport.call(self._endpoint, method, request)
        except TinsmithError as error:
            if error.reason in _OVER_REASONS:
                raise _OverError(error) from None
            raise

    async def _keep_seat(self) -> None:
        request = coordinator_pb2.HeartbeatMemberRequest(
            name=self.match.name, lease_token=self._lease_token
        )
        while True:
            await asyncio.sleep(self.match.lease_s / _HEARTBEATS_PER_LEASE)
            try:
                answer = await self._send(lambda c: c.coordinator.HeartbeatMember, request)
                self.match = decode_match(answer)
            except _OverError as over:
                self._log.fail(over.error)
                return
            except TinsmithError as error:
                _LOG.warning(
                    "heartbeat failed", extra={"match": self.match.name, "error": str(error)}
                )

    async def _watch(self) -> None:
        revision = 0
        backoff = Backoff(self._core.settings.retry)
        while True:
            request = coordinator_pb2.WatchMatchRequest(
                name=self.match.name, after_revision=revision
            )
            stream = self._core.transport.stream_once(
                self._endpoint,
                lambda c: c.coordinator.WatchMatch,
                request,
                timeout_s=_LONG_POLL_S + self._core.settings.call_timeout_s,
            )
            try:
                async for update in stream:
                    revision = update.revision
                    backoff = Backoff(self._core.settings.retry)
                    self.match = decode_match(update.match)
                    self._log.apply(update)
                if not self.match.is_open:
                    self._log.fail(_ended(self.match))
                    return
            except TinsmithError as error:
                delay_s = backoff.delay_s(error, time.monotonic())
                if delay_s is None:
                    self._log.fail(error)
                    return
                await asyncio.sleep(delay_s)
                if is_away(error):
                    await self._endpoint.relocate()
            finally:
                await stream.aclose()


class Epoch:
    """One round of a match: a rollout phase, then an update phase.

    Attributes:
        index: From 0.
    """

    def __init__(self, member: Member, index: int) -> None:
        self.index = index
        self._member = member

    def rollout(self) -> Phase:
        """Return the phase in which games are played, as a context."""
        return Phase(self._member, self.index, "rollout")

    def update(self) -> Phase:
        """Return the phase in which each agent trains, as a context."""
        return Phase(self._member, self.index, "update")


class Phase:
    """A phase: entered and left together with all members, by `with` or `async with`.

    A phase that ends by an exception is not arrived at the end of: the program is about to leave.
    """

    def __init__(self, member: Member, epoch: int, name: str) -> None:
        self._member = member
        self._epoch = epoch
        self._name = name

    def __enter__(self) -> Match:
        return self._member.arrive(f"{self._name}_start", self._epoch)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._member.arrive(f"{self._name}_end", self._epoch)

    async def __aenter__(self) -> Match:
        return await self._member.arrive_async(f"{self._name}_start", self._epoch)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._member.arrive_async(f"{self._name}_end", self._epoch)


class _OverError(Exception):
    """The seat is lost, or the match is over."""

    def __init__(self, error: TinsmithError) -> None:
        super().__init__(str(error))
        self.error = error


def _ended(match: Match) -> TinsmithError:
    why = f": {match.failure}" if match.failure else ""
    return FailedPreconditionError(f"match {match.name} is {match.state}{why}")
