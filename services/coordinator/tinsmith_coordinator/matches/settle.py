"""Writes a match after a change, with all that follows from it: the one place that opens barriers.

A move, an arrival and a loss each change one thing. What they lead to is the same for all. Games
are abandoned if an agent is missing, barriers open, and the games of the next epoch begin. The time
is set until which members are waited for. All of it is one transaction with the change itself, so a
coordinator that dies in between leaves no phase half begun.
"""

from __future__ import annotations

import dataclasses

import sqlalchemy as sa

from tinsmith_coordinator.matches import rules
from tinsmith_coordinator.store import match_store
from tinsmith_coordinator.store.match_records import (
    Game,
    GameState,
    Match,
    MatchState,
    Member,
    MemberState,
)
from tinsmith_coordinator.store.tables import games

# Moves of the epoch before may still be read by a watcher that is behind.
_KEPT_EPOCHS = 1


def settle(connection: sa.Connection, before: Match, after: Match, *, now_s: float) -> Match:
    """Write what became of a match; return it as it is then.

    Args:
        connection: Of the transaction.
        before: The match as it was read.
        after: The same after the change.
        now_s: The time of the database.
    """
    abandoned: list[Game] = []
    if before.num_open_games and not rules.may_continue(before, after):
        abandoned = [
            rules.abandon(game, _failure_of_games(before, after))
            for game in open_games(connection, before)
        ]
        after = dataclasses.replace(after, num_open_games=0)
    begun: list[Game] = []
    while rules.can_open(after):
        after = dataclasses.replace(rules.open_next(after), deadline_s=None)
        if after.is_in_rollout:
            begun = [
                rules.first_turn(after, game, now_s=now_s) for game in range(after.rules.num_games)
            ]
            after = dataclasses.replace(after, num_open_games=len(begun))
    after = dataclasses.replace(after, deadline_s=rules.wait_deadline(after, now_s=now_s))
    if not after.state.is_open:
        after = dataclasses.replace(
            after, members=tuple(_without_lease(member) for member in after.members)
        )
    after = match_store.write(connection, before, after, now_s=now_s)
    for game in abandoned:
        match_store.write_game(connection, after, game)
    match_store.insert_games(connection, after, begun)
    if after.epoch > before.epoch:
        match_store.forget_epochs(connection, after, after.epoch - _KEPT_EPOCHS)
    return after


def end_game(connection: sa.Connection, match: Match, game: Game, *, now_s: float) -> Match:
    """Write a game that has ended, and what follows for its match."""
    ended = dataclasses.replace(match, num_open_games=match.num_open_games - 1)
    after = settle(connection, match, ended, now_s=now_s)
    match_store.write_game(connection, after, game)
    return after


def open_games(connection: sa.Connection, match: Match) -> list[Game]:
    """Return the games of a match that are played."""
    return match_store.select_games(connection, match, games.c.state == GameState.PLAYING.value)


def _failure_of_games(before: Match, after: Match) -> str:
    if after.state is MatchState.CANCELLED:
        return "the match was cancelled"
    if after.failure:
        return after.failure
    gone = [
        f"agent {new.agent} was dropped: {new.failure}"
        for old, new in zip(before.members, after.members, strict=True)
        if new.state is MemberState.DROPPED and old.state is not MemberState.DROPPED
    ]
    return "; ".join(gone)


def _without_lease(member: Member) -> Member:
    return dataclasses.replace(member, lease_expire_s=None)
