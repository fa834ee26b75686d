"""Ends what has taken too long: seats, waits at barriers, and turns; removes old matches.

Time that the coordinator itself was away is not held against a member, which could not renew its
lease. So at the start each time limit that is past, or nearly so, is moved by the length of a
lease.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial

import sqlalchemy as sa

from tinsmith_coordinator import metrics
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.matches import rules
from tinsmith_coordinator.matches.matches import announce_match
from tinsmith_coordinator.matches.settle import end_game, settle
from tinsmith_coordinator.store import match_store
from tinsmith_coordinator.store.database import Clock
from tinsmith_coordinator.store.match_records import OPEN_MATCH_STATES, GameState, Match
from tinsmith_coordinator.store.tables import games, matches, members
from tinsmith_runtime.sql import Database

logger = logging.getLogger(__name__)

_MAX_EXPIRED = 100
_MAX_REMOVED = 50

Change = tuple[Match, Match]
"""A match before and after."""


class MatchKeeper:
    """Looks after the time limits of all matches; driven by the sweeper.

    Args:
        bells: Rung for matches that change.
        clock: The time, within a transaction.
        retention_s: How long a match is kept after its end.
    """

    def __init__(
        self, database: Database, bells: Bells, *, clock: Clock, retention_s: float
    ) -> None:
        self._database = database
        self._bells = bells
        self._clock = clock
        self._retention_s = retention_s

    async def excuse(self) -> None:
        """Move time limits that ran out while no coordinator was there."""
        await self._database.write(self._excuse)

    async def expire(self) -> float:
        """End what is over; return the time until the next limit, infinite if there is none."""
        left_s = await self._database.read(self._next_limit)
        if left_s > 0:
            return left_s
        for what, find in (
            ("seat", self._expire_seats),
            ("barrier", self._expire_waits),
            ("turn", self._expire_turns),
        ):
            for before, after in await self._database.write(find):
                metrics.EXPIRED_LIMITS.labels(what).inc()
                logger.info(
                    "a match was not kept up with",
                    extra={"match": str(after.name), "limit": what, "state": after.state.value},
                )
                announce_match(self._bells, before, after)
        return 0.0

    async def tidy(self) -> None:
        """Remove matches that ended long ago."""
        while await self._database.write(self._remove_old):
            pass

    def _next_limit(self, connection: sa.Connection) -> float:
        limits = [
            connection.execute(sa.select(sa.func.min(column))).scalar_one()
            for column in (members.c.lease_expire_s, matches.c.deadline_s, games.c.deadline_s)
        ]
        known = [float(limit) for limit in limits if limit is not None]
        return min(known) - self._clock(connection) if known else float("inf")

    def _expire_seats(self, connection: sa.Connection) -> list[Change]:
        now_s = self._clock(connection)
        query = (
            sa.select(members.c.serial, members.c.agent)
            .where(members.c.lease_expire_s <= now_s)
            .order_by(members.c.lease_expire_s)
            .limit(_MAX_EXPIRED)
        )
        return [
            change
            for row in connection.execute(query).all()
            for change in self._each(
                connection,
                matches.c.serial == row.serial,
                partial(rules.lose, agent=row.agent, reason="the lease ran out"),
            )
        ]

    def _expire_waits(self, connection: sa.Connection) -> list[Change]:
        is_late = matches.c.deadline_s <= self._clock(connection)
        return self._each(connection, is_late, rules.give_up_waiting)

    def _expire_turns(self, connection: sa.Connection) -> list[Change]:
        now_s = self._clock(connection)
        query = (
            sa.select(games.c.serial, games.c.epoch, games.c.game)
            .where(games.c.deadline_s <= now_s)
            .order_by(games.c.deadline_s)
            .limit(_MAX_EXPIRED)
        )
        changes = []
        for row in connection.execute(query).all():
            [match] = match_store.select(
                connection, sa.select(matches).where(matches.c.serial == row.serial)
            )
            game = match_store.find_game(connection, match, row.epoch, row.game)
            if game is None or game.state is not GameState.PLAYING:
                continue
            late = ", ".join(game.running)
            limit_s = match.rules.turn_timeout_s
            ended = rules.abandon(game, f"{late} did not move within {limit_s:g} s")
            changes.append((match, end_game(connection, match, ended, now_s=now_s)))
        return changes

    def _each(
        self,
        connection: sa.Connection,
        condition: sa.ColumnElement[bool],
        change: Callable[[Match], Match],
    ) -> list[Change]:
        """Change the open matches of a condition, with what follows."""
        query = sa.select(matches).where(
            condition, matches.c.state.in_([state.value for state in OPEN_MATCH_STATES])
        )
        now_s = self._clock(connection)
        return [
            (match, settle(connection, match, change(match), now_s=now_s))
            for match in match_store.select(connection, query.limit(_MAX_EXPIRED))
        ]

    def _excuse(self, connection: sa.Connection) -> None:
        now_s = self._clock(connection)
        query = sa.select(matches).where(
            matches.c.state.in_([state.value for state in OPEN_MATCH_STATES])
        )
        for match in match_store.select(connection, query):
            excused_s = now_s + match.rules.lease_duration_s
            for member in match.members:
                if member.lease_expire_s is not None and member.lease_expire_s < excused_s:
                    later = dataclasses.replace(member, lease_expire_s=excused_s)
                    match_store.write_member(connection, match, later)
            connection.execute(
                sa.update(matches)
                .where(matches.c.serial == match.serial, matches.c.deadline_s < excused_s)
                .values(deadline_s=excused_s)
            )
            connection.execute(
                sa.update(games)
                .where(games.c.serial == match.serial, games.c.deadline_s < excused_s)
                .values(deadline_s=excused_s)
            )

    def _remove_old(self, connection: sa.Connection) -> bool:
        """Remove some of what is old; return whether there may be more."""
        limit_s = self._clock(connection) - self._retention_s
        query = sa.select(matches.c.serial).where(matches.c.end_time_s < limit_s)
        old = connection.execute(query.limit(_MAX_REMOVED)).scalars().all()
        match_store.delete(connection, old)
        return len(old) == _MAX_REMOVED
