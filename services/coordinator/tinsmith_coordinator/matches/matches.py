"""Creating, reading, watching and cancelling matches."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator
from functools import partial

import sqlalchemy as sa

from tinsmith.names import MatchName
from tinsmith_coordinator import metrics
from tinsmith_coordinator.episodes.episodes import request_id_reused
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.matches.settle import open_games, settle
from tinsmith_coordinator.store import match_store
from tinsmith_coordinator.store.database import Clock
from tinsmith_coordinator.store.match_records import (
    OPEN_MATCH_STATES,
    Match,
    MatchPage,
    MatchRules,
    MatchState,
    MatchUpdate,
    Move,
)
from tinsmith_coordinator.store.tables import games, matches
from tinsmith_runtime.errors import QueueFullError
from tinsmith_runtime.records import RequestIdentity
from tinsmith_runtime.shielded import see_through
from tinsmith_runtime.sql import Database

MAX_QUIET_S = 20.0
"""A watch is ended after this time without a change, so that a dead peer is found out."""

_ID_BYTES = 12
_MAX_WATCHED_MOVES = 256
# With one more move, and all games of an epoch, below the 4 MiB that gRPC's clients take.
_MAX_WATCHED_BYTES = 2 * 2**20
_MAX_PAGE_BYTES = 2 * 2**20


class Matches:
    """The matches of all projects.

    Args:
        bells: Rung when a match changes.
        clock: The time, within a transaction.
        max_open: Matches of one project that have not ended.
    """

    def __init__(self, database: Database, bells: Bells, *, clock: Clock, max_open: int) -> None:
        self._database = database
        self._bells = bells
        self._clock = clock
        self._max_open = max_open

    async def create(self, rules: MatchRules, request: RequestIdentity) -> Match:
        """Open a match; a repeated request opens none.

        Raises:
            RequestIdReusedError: If the request id was used with another body.
            QueueFullError: If too many matches of the project have not ended.
        """

        def create(connection: sa.Connection) -> tuple[Match, bool]:
            known = match_store.find_by_request(connection, request.project, request.request_id)
            if known is not None:
                match, digest = known
                if digest != request.digest:
                    raise request_id_reused(request.request_id)
                return match, False
            self._require_room(connection, request.project)
            match = match_store.insert(
                connection,
                request.project,
                secrets.token_hex(_ID_BYTES),
                rules,
                request_id=request.request_id,
                digest=request.digest,
                now_s=self._clock(connection),
            )
            return match, True

        match, is_new = await see_through(self._database.write(create))
        if is_new:
            metrics.CREATED_MATCHES.inc()
        return match

    async def get(self, name: MatchName) -> tuple[Match, frozenset[str]]:
        """Return a match, and the agents that may move in it.

        Raises:
            MatchNotFoundError: If the project has none of this name.
        """

        def read(connection: sa.Connection) -> tuple[Match, frozenset[str]]:
            match = match_store.get(connection, name)
            return match, find_movers(connection, match)

        return await self._database.read(read)

    async def list_page(
        self, project: str, *, page_size: int, before_serial: int | None
    ) -> MatchPage:
        """Return a part of the matches of a project, newest first.

        It is smaller than asked for where the matches are large.
        """
        query = sa.select(matches).where(matches.c.project == project)
        if before_serial is not None:
            query = query.where(matches.c.serial < before_serial)
        query = query.order_by(matches.c.serial.desc()).limit(page_size + 1)

        def read(connection: sa.Connection) -> MatchPage:
            page: list[Match] = []
            num_bytes = 0
            for match in match_store.select(connection, query):
                num_bytes += len(match.rules.config_json.encode())
                if page and (len(page) == page_size or num_bytes > _MAX_PAGE_BYTES):
                    return MatchPage(page, page[-1].serial)
                page.append(match)
            return MatchPage(page, None)

        return await self._database.read(read)

    async def cancel(self, name: MatchName) -> Match:
        """End a match for all its members; one that has ended stays as it is.

        Raises:
            MatchNotFoundError: If the project has none of this name.
        """

        def cancel(connection: sa.Connection) -> tuple[Match, Match]:
            match = match_store.get(connection, name)
            if not match.state.is_open:
                return match, match
            ended = dataclasses.replace(match, state=MatchState.CANCELLED)
            return match, settle(connection, match, ended, now_s=self._clock(connection))

        async def cancel_and_tell() -> Match:
            before, after = await self._database.write(cancel)
            announce_match(self._bells, before, after)
            return after

        return await see_through(cancel_and_tell())

    async def watch(
        self, name: MatchName, after_revision: int
    ) -> AsyncIterator[tuple[MatchUpdate, frozenset[str]]]:
        """Yield what changes in a match, until it ends or nothing changes for a while.

        Raises:
            MatchNotFoundError: If the project has none of this name.
            DrainingError: If the pod is about to end.
        """
        while True:
            bell = self._bells.listen(match_key(name))
            try:
                read = partial(_read_update, name=name, after_revision=after_revision)
                update, movers = await self._database.read(read)
                is_new = update.revision > after_revision
                if is_new:
                    yield update, movers
                    after_revision = update.revision
                is_all = update.revision == update.match.revision
                if is_all and not update.match.state.is_open:
                    return
                if not is_new and not await bell.wait(MAX_QUIET_S):
                    return
            finally:
                self._bells.forget(bell)

    def _require_room(self, connection: sa.Connection, project: str) -> None:
        query = (
            sa.select(sa.func.count())
            .select_from(matches)
            .where(
                matches.c.project == project,
                matches.c.state.in_([state.value for state in OPEN_MATCH_STATES]),
            )
        )
        num_open: int = connection.execute(query).scalar_one()
        if num_open >= self._max_open:
            raise QueueFullError(
                f"{num_open} matches of the project have not ended, and there may be "
                f"{self._max_open}; cancel one, or wait for one to end",
                num_open=num_open,
                limit=self._max_open,
            )


def _read_update(
    connection: sa.Connection, name: MatchName, after_revision: int
) -> tuple[MatchUpdate, frozenset[str]]:
    match = match_store.get(connection, name)
    shown = match_store.moves_after(connection, match, after_revision, limit=_MAX_WATCHED_MOVES)
    moves, until = _whole_revisions(shown)
    revision = match.revision if until is None else until
    changed = match_store.select_games(
        connection, match, games.c.revision > after_revision, games.c.revision <= revision
    )
    update = MatchUpdate(match, tuple(changed), tuple(moves), revision)
    return update, find_movers(connection, match)


def _whole_revisions(shown: list[tuple[int, Move]]) -> tuple[list[Move], int | None]:
    """Return the moves of one message, and the revision that it reaches; None if it holds all.

    A turn is not split: its moves have one revision, and a watch goes on after a revision.
    """
    num_bytes, last = 0, None
    for index, (revision, move) in enumerate(shown):
        num_bytes += len(move.action_json.encode())
        is_full = num_bytes > _MAX_WATCHED_BYTES or index == _MAX_WATCHED_MOVES - 1
        if is_full and revision != shown[0][0]:
            last = revision - 1
            break
    moves = [move for revision, move in shown if last is None or revision <= last]
    return moves, last


def find_movers(connection: sa.Connection, match: Match) -> frozenset[str]:
    """Return the agents that may move in some game of a match."""
    if not match.num_open_games:
        return frozenset()
    return frozenset(agent for game in open_games(connection, match) for agent in game.running)


def match_key(name: MatchName) -> tuple[str, str]:
    """Return what is rung when a match changes."""
    return ("match", str(name))


def announce_match(bells: Bells, before: Match, after: Match) -> None:
    """Wake the calls that wait for a match to change, after the commit."""
    if after.revision == before.revision:
        return
    bells.ring_all(match_key(after.name))
    if before.state.is_open and not after.state.is_open:
        metrics.ENDED_MATCHES.labels(after.state.value).inc()
    metrics.OPENED_BARRIERS.inc(after.num_opened - before.num_opened)
