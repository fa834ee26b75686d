"""What a member does: take its seat, keep it, move, arrive at a barrier, leave.

Each change is one transaction, answered after its commit, and its lease is judged by the clock of
the database in that transaction. A call that was answered and whose answer was lost may be sent
again: a move is known by its turn, an arrival by its barrier, a seat by the request that took it.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable

import sqlalchemy as sa

from tinsmith.names import MatchName
from tinsmith_coordinator import metrics
from tinsmith_coordinator.episodes.lease_tokens import (
    LeaseToken,
    derive_secret,
    hash_secret,
    matches,
)
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.matches import rules
from tinsmith_coordinator.matches.matches import announce_match, match_key
from tinsmith_coordinator.matches.settle import end_game, settle
from tinsmith_coordinator.store import match_store
from tinsmith_coordinator.store.database import Clock
from tinsmith_coordinator.store.match_records import (
    Game,
    GameState,
    Match,
    Member,
    MemberState,
    Move,
    Point,
    Seat,
    TurnOrder,
    barrier_index,
)
from tinsmith_runtime.errors import (
    CapacityExhaustedError,
    InvalidFieldError,
    LeaseLostError,
    MatchEndedError,
    OutOfTurnError,
    SeatTakenError,
)
from tinsmith_runtime.shielded import see_through
from tinsmith_runtime.sql import Database

_SALT_BYTES = 32
_MAX_GAME_BYTES = 2**20
# A lease is written again once a tenth of it is over, not at each of a hundred moves a second.
_FRESH_SHARE = 0.9

Change = tuple[Match, Match]
"""A match before and after."""


class Seats:
    """The seats of all matches.

    Args:
        bells: Rung when a match changes.
        clock: The time, within a transaction.
    """

    def __init__(self, database: Database, bells: Bells, *, clock: Clock) -> None:
        self._database = database
        self._bells = bells
        self._clock = clock

    async def join(self, name: MatchName, agent: str, client_id: str, request_id: str) -> Seat:
        """Take the seat of an agent; a repeated request gets the same token.

        Raises:
            MatchNotFoundError: If the project has no such match.
            MatchEndedError: If it is over.
            SeatTakenError: If another client holds the seat, or the agent was dropped.
            InvalidFieldError: If the match has no such agent.
        """
        tokens: list[str] = []

        def join(connection: sa.Connection) -> Change:
            match = match_store.get(connection, name)
            _require_open(match)
            member = _seat_of(match, agent)
            now_s = self._clock(connection)
            if _is_held(member, now_s):
                if not matches(request_id, member.request_sha256):
                    raise SeatTakenError(
                        f"agent {agent} of match {name} is held by {member.client_id} until its "
                        "lease runs out",
                        match=name,
                        agent=agent,
                    )
                secret = derive_secret(member.salt, request_id, "seat")
                tokens.append(str(LeaseToken(member.num_joins, secret)))
                return match, match
            if member.state is MemberState.DROPPED:
                raise SeatTakenError(
                    f"agent {agent} of match {name} was dropped: {member.failure}",
                    match=name,
                    agent=agent,
                )
            salt = secrets.token_bytes(_SALT_BYTES)
            secret = derive_secret(salt, request_id, "seat")
            seated = dataclasses.replace(
                member,
                state=MemberState.JOINED,
                client_id=client_id,
                num_joins=member.num_joins + 1,
                lease_expire_s=now_s + match.rules.lease_duration_s,
                failure="",
                request_sha256=hash_secret(request_id),
                salt=salt,
                token_sha256=hash_secret(secret),
            )
            tokens.append(str(LeaseToken(seated.num_joins, secret)))
            return match, settle(connection, match, _with(match, seated), now_s=now_s)

        return Seat(await self._change(join), tokens[-1])

    async def heartbeat(self, name: MatchName, token: LeaseToken) -> Match:
        """Renew the lease of a seat.

        Raises:
            MatchNotFoundError: If the project has no such match.
            MatchEndedError: If it is over.
            LeaseLostError: If the lease ran out, or the member was dropped.
        """

        def renew(connection: sa.Connection) -> Change:
            match, _, _ = self._require_member(connection, name, token)
            return match, match

        return await self._change(renew)

    async def leave(self, name: MatchName, token: LeaseToken, reason: str) -> Match:
        """Give a seat up; in a match that is over there is nothing to give up.

        Raises:
            MatchNotFoundError: If the project has no such match.
            LeaseLostError: If the lease ran out before.
        """

        def leave(connection: sa.Connection) -> Change:
            match = match_store.get(connection, name)
            member = _find_member(match, token)
            has_left = member.state in (MemberState.LOST, MemberState.DROPPED)
            if not match.state.is_open or (has_left and member.failure.startswith(_LEFT)):
                return match, match
            match, member, now_s = self._require_member(connection, name, token)
            left = rules.lose(match, member.agent, f"{_LEFT}: {reason}" if reason else _LEFT)
            return match, settle(connection, match, left, now_s=now_s)

        return await self._change(leave)

    async def take_turn(self, name: MatchName, token: LeaseToken, move: Move) -> Game:
        """Make a move as the agent of the seat. The same again changes nothing.

        Raises:
            MatchNotFoundError: If the project has no such match.
            MatchEndedError: If it is over.
            LeaseLostError: If the lease ran out, or the member was dropped.
            OutOfTurnError: If it is not the agent's turn.
            InvalidFieldError: If its next agents or its rewards are not those of such a match.
            CapacityExhaustedError: If the moves of the game take too much.
        """
        played: list[Game] = []

        def take(connection: sa.Connection) -> Change:
            match, member, now_s = self._require_member(connection, name, token)
            mine = dataclasses.replace(move, agent=member.agent)
            game = match_store.find_game(connection, match, mine.epoch, mine.game)
            if game is None:
                raise _no_game(match, mine.epoch, mine.game)
            known = match_store.moves_of_turn(connection, match, mine.epoch, mine.game, mine.turn)
            made = next((each for each in known if each.agent == mine.agent), None)
            if made == mine:
                played.append(game)
                return match, match
            _require_turn(match, game, mine, has_moved=made is not None)
            _require_next(match, mine)
            after_game = rules.move(match, game, [*known, mine], now_s=now_s)
            if after_game.num_bytes > _MAX_GAME_BYTES:
                raise CapacityExhaustedError(
                    f"the moves of game {game.game} would take more than {_MAX_GAME_BYTES} bytes; "
                    "end it, or say less in a move",
                    match=name,
                    game=game.game,
                )
            match_store.insert_move(connection, match, mine)
            if after_game.state is GameState.PLAYING:
                after = match_store.write(connection, match, match, now_s=now_s)
                after_game = match_store.write_game(connection, after, after_game)
            else:
                after = end_game(connection, match, after_game, now_s=now_s)
                after_game = dataclasses.replace(after_game, revision=after.revision)
            if not after_game.running or after_game.turn != game.turn:
                match_store.show_moves(connection, after, game.epoch, game.game, game.turn)
            played.append(after_game)
            return match, after

        await self._change(take)
        metrics.TURNS.inc()
        return played[-1]

    async def abandon_game(
        self, name: MatchName, token: LeaseToken, *, epoch: int, game: int, reason: str
    ) -> Game:
        """Give a game up for all its agents; one that has ended stays as it is.

        Raises:
            MatchNotFoundError: If the project has no such match.
            MatchEndedError: If it is over.
            LeaseLostError: If the lease ran out, or the member was dropped.
            OutOfTurnError: If there is no such game.
        """
        left: list[Game] = []

        def abandon(connection: sa.Connection) -> Change:
            match, member, now_s = self._require_member(connection, name, token)
            found = match_store.find_game(connection, match, epoch, game)
            if found is None:
                raise _no_game(match, epoch, game)
            left.append(found)
            if found.state is not GameState.PLAYING:
                return match, match
            why = f": {reason}" if reason else ""
            ended = rules.abandon(found, f"{member.agent} gave it up{why}")
            after = end_game(connection, match, ended, now_s=now_s)
            left.append(dataclasses.replace(ended, revision=after.revision))
            return match, after

        await self._change(abandon)
        return left[-1]

    async def arrive(
        self, name: MatchName, token: LeaseToken, epoch: int, point: Point, *, timeout_s: float
    ) -> tuple[bool, Match]:
        """Arrive at a barrier; return whether it opened in time, and the match.

        Raises:
            MatchNotFoundError: If the project has no such match.
            MatchEndedError: If it is over, and the barrier never opened.
            LeaseLostError: If the lease ran out, or the member was dropped.
            OutOfTurnError: If a barrier before it is not open.
            DrainingError: If the pod is about to end.
        """
        index = barrier_index(epoch, point)
        deadline_s = time.monotonic() + timeout_s

        def arrive(connection: sa.Connection) -> Change:
            match = match_store.get(connection, name)
            if index < match.num_opened:
                _find_member(match, token)
                return match, match
            match, member, now_s = self._require_member(connection, name, token)
            if index > match.num_opened:
                here = f"{match.next_point.name} of epoch {match.epoch}"
                raise OutOfTurnError(
                    f"the next barrier of match {name} is {here}; arrive there first",
                    match=name,
                    barrier=match.num_opened,
                )
            if member.arrived == index:
                return match, match
            arrived = _with(match, dataclasses.replace(member, arrived=index))
            return match, settle(connection, match, arrived, now_s=now_s)

        match = await self._change(arrive)
        while index >= match.num_opened:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False, match
            bell = self._bells.listen(match_key(name))
            try:
                match = await self._database.read(lambda c: match_store.get(c, name))
                if index < match.num_opened:
                    break
                _require_open(match)
                await bell.wait(left_s)
            finally:
                self._bells.forget(bell)
        return True, match

    async def _change(self, change: Callable[[sa.Connection], Change]) -> Match:
        async def change_and_tell() -> Match:
            before, after = await self._database.write(change)
            announce_match(self._bells, before, after)
            return after

        return await see_through(change_and_tell())

    def _require_member(
        self, connection: sa.Connection, name: MatchName, token: LeaseToken
    ) -> tuple[Match, Member, float]:
        """Return a match, whose seat the token is of, and the time; the lease is renewed."""
        match = match_store.get(connection, name)
        member = _find_member(match, token)
        _require_open(match)
        now_s = self._clock(connection)
        if not _is_held(member, now_s):
            why = member.failure or "the lease ran out"
            raise LeaseLostError(
                f"agent {member.agent} of match {name} lost its seat: {why}",
                match=name,
                agent=member.agent,
            )
        left_s = (member.lease_expire_s or 0.0) - now_s
        if left_s < _FRESH_SHARE * match.rules.lease_duration_s:
            member = dataclasses.replace(
                member, lease_expire_s=now_s + match.rules.lease_duration_s
            )
            match_store.write_member(connection, match, member)
            match = _with(match, member)
        return match, member, now_s


_LEFT = "it left"


def _with(match: Match, member: Member) -> Match:
    members = tuple(member if each.index == member.index else each for each in match.members)
    return dataclasses.replace(match, members=members)


def _is_held(member: Member, now_s: float) -> bool:
    if member.state is not MemberState.JOINED or member.lease_expire_s is None:
        return False
    return member.lease_expire_s > now_s


def _seat_of(match: Match, agent: str) -> Member:
    for member in match.members:
        if member.agent == agent:
            return member
    raise InvalidFieldError("agent", f"must be one of {', '.join(match.rules.agents)}")


def _find_member(match: Match, token: LeaseToken) -> Member:
    for member in match.members:
        if member.num_joins == token.attempt and matches(token.secret, member.token_sha256):
            return member
    raise LeaseLostError(
        f"the token is of no seat of match {match.name} that is held; join the match",
        match=match.name,
    )


def _require_open(match: Match) -> None:
    if not match.state.is_open:
        why = f": {match.failure}" if match.failure else ""
        raise MatchEndedError(
            f"match {match.name} is {match.state.value}{why}",
            match=match.name,
            state=match.state.value,
            failure=match.failure,
        )


def _no_game(match: Match, epoch: int, game: int) -> OutOfTurnError:
    return OutOfTurnError(
        f"epoch {epoch} of match {match.name} has no game {game} that is played; the "
        f"match is at epoch {match.epoch}",
        match=match.name,
        epoch=match.epoch,
    )


def _require_turn(match: Match, game: Game, move: Move, *, has_moved: bool) -> None:
    problem = ""
    if has_moved:
        problem = f"agent {move.agent} has made another move in turn {move.turn}"
    elif game.state is not GameState.PLAYING:
        problem = f"the game is {game.state.value}"
    elif move.turn != game.turn:
        problem = f"the game is at turn {game.turn}, not {move.turn}"
    elif move.agent not in game.running:
        problem = f"{', '.join(game.running)} moves now, not {move.agent}"
    if problem:
        raise OutOfTurnError(
            f"game {game.game} of epoch {game.epoch}: {problem}",
            match=match.name,
            game=game.game,
            turn=game.turn,
            state=game.state.value,
        )


def _require_next(match: Match, move: Move) -> None:
    """Check what a move says of what comes next."""
    agents = rules.active_agents(match)
    is_custom = match.rules.turn_order is TurnOrder.CUSTOM
    if move.next_agents and (move.is_over or not is_custom):
        raise InvalidFieldError(
            "next_agents", "must be empty unless the turn order is custom and the game goes on"
        )
    if is_custom and not move.is_over:
        unknown = [agent for agent in move.next_agents if agent not in agents]
        if unknown or not move.next_agents:
            raise InvalidFieldError("next_agents", f"must be some of {', '.join(agents)}")
    if move.rewards and not move.is_over:
        raise InvalidFieldError("rewards", "must be empty until the game is over")
    strangers = [agent for agent in move.rewards if agent not in agents]
    if strangers:
        raise InvalidFieldError("rewards", f"must be of {', '.join(agents)}")
