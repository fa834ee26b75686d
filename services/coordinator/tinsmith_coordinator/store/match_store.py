"""Matches as rows: how they are read and written.

Every function runs inside a transaction of the caller; there is one writer. Each change of a match
has the next revision, which its games and moves carry. A watcher that has seen a revision has
missed nothing below it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa

from tinsmith.names import MatchName
from tinsmith_coordinator.store.match_records import (
    Game,
    GameState,
    LossPolicy,
    Match,
    MatchRules,
    MatchState,
    Member,
    MemberState,
    Move,
    TurnOrder,
)
from tinsmith_coordinator.store.tables import games, matches, members, moves
from tinsmith_runtime.errors import MatchNotFoundError

_FIELDS = ("state", "num_opened", "num_open_games", "deadline_s", "failure", "end_time_s")
_MEMBER_FIELDS = tuple(field.name for field in dataclasses.fields(Member) if field.name != "index")
_GAME_FIELDS = tuple(field.name for field in dataclasses.fields(Game))

# Statements of every move are built once: SQLAlchemy takes longer to build one than SQLite to run
# it. Names of bound values differ from those of columns, which an update would take for its own.
_BY_ID = sa.select(matches).where(matches.c.match_id == sa.bindparam("match_id"))
_MEMBERS = (
    sa.select(members).where(members.c.serial == sa.bindparam("match")).order_by(members.c.index)
)
_GAME = sa.select(games).where(
    games.c.serial == sa.bindparam("match"),
    games.c.epoch == sa.bindparam("of_epoch"),
    games.c.game == sa.bindparam("of_game"),
)
_MOVES = (
    sa.select(moves)
    .where(
        moves.c.serial == sa.bindparam("match"),
        moves.c.epoch == sa.bindparam("of_epoch"),
        moves.c.game == sa.bindparam("of_game"),
        moves.c.turn == sa.bindparam("of_turn"),
    )
    .order_by(moves.c.agent)
)
_SHOW_MOVES = (
    sa.update(moves)
    .where(
        moves.c.serial == sa.bindparam("match"),
        moves.c.epoch == sa.bindparam("of_epoch"),
        moves.c.game == sa.bindparam("of_game"),
        moves.c.turn == sa.bindparam("of_turn"),
    )
    .values(revision=sa.bindparam("shown_revision"))
)
_UPDATE_MATCH = (
    sa.update(matches)
    .where(matches.c.serial == sa.bindparam("match"))
    .values({name: sa.bindparam(f"new_{name}") for name in (*_FIELDS, "revision")})
)
_UPDATE_MEMBER = (
    sa.update(members)
    .where(members.c.serial == sa.bindparam("match"), members.c.index == sa.bindparam("seat"))
    .values({name: sa.bindparam(f"new_{name}") for name in _MEMBER_FIELDS})
)
_GAME_CHANGES = ("state", "turn", "running", "rewards", "failure", "num_bytes", "deadline_s")
_UPDATE_GAME = (
    sa.update(games)
    .where(
        games.c.serial == sa.bindparam("match"),
        games.c.epoch == sa.bindparam("of_epoch"),
        games.c.game == sa.bindparam("of_game"),
    )
    .values({name: sa.bindparam(f"new_{name}") for name in (*_GAME_CHANGES, "revision")})
)
_INSERT_MOVE = sa.insert(moves)


def match_not_found(name: MatchName) -> MatchNotFoundError:
    """Return the error of a match that is not there, or of another project."""
    return MatchNotFoundError(f"match {name} does not exist", match=name)


def get(connection: sa.Connection, name: MatchName) -> Match:
    """Return a match.

    Raises:
        MatchNotFoundError: If the project has none of this name.
    """
    row = connection.execute(_BY_ID, {"match_id": name.match}).first()
    if row is None or row.project != name.project:
        raise match_not_found(name)
    return _match(connection, row)


def select(connection: sa.Connection, query: sa.Select[Any]) -> list[Match]:
    """Return the matches of a query."""
    return [_match(connection, row) for row in connection.execute(query).all()]


def insert(
    connection: sa.Connection,
    project: str,
    match_id: str,
    rules: MatchRules,
    *,
    request_id: str,
    digest: bytes,
    now_s: float,
) -> Match:
    """Write a new match with its empty seats."""
    row = connection.execute(
        sa.insert(matches).returning(matches.c.serial),
        {
            "match_id": match_id,
            "project": project,
            "request_id": request_id,
            "request_digest": digest,
            "rules": _plain(rules),
            "state": MatchState.GATHERING.value,
            "num_opened": 0,
            "num_open_games": 0,
            "deadline_s": now_s + rules.barrier_timeout_s,
            "failure": "",
            "revision": 1,
            "create_time_s": now_s,
        },
    ).one()
    seats = [
        Member(
            index=index,
            agent=agent,
            state=MemberState.ABSENT,
            client_id="",
            num_joins=0,
            lease_expire_s=None,
            arrived=-1,
            failure="",
            request_sha256=b"",
            salt=b"",
            token_sha256=b"",
        )
        for index, agent in enumerate(rules.agents)
    ]
    connection.execute(
        sa.insert(members),
        [{"serial": row.serial, **_plain(seat)} for seat in seats],
    )
    return get(connection, MatchName(project, match_id))


def find_by_request(
    connection: sa.Connection, project: str, request_id: str
) -> tuple[Match, bytes] | None:
    """Return the match that a request made, and the digest of the request."""
    query = sa.select(matches).where(
        matches.c.project == project, matches.c.request_id == request_id
    )
    row = connection.execute(query).first()
    return None if row is None else (_match(connection, row), row.request_digest)


def write(connection: sa.Connection, before: Match, after: Match, *, now_s: float) -> Match:
    """Write what changed in a match, with its next revision; return it as it is then."""
    end_time_s = after.end_time_s
    if before.state.is_open and not after.state.is_open:
        end_time_s = now_s
    after = dataclasses.replace(after, revision=before.revision + 1, end_time_s=end_time_s)
    values = {f"new_{name}": _column(getattr(after, name)) for name in (*_FIELDS, "revision")}
    connection.execute(_UPDATE_MATCH, {"match": after.serial, **values})
    for old, new in zip(before.members, after.members, strict=True):
        if new != old:
            write_member(connection, after, new)
    return after


def write_member(connection: sa.Connection, match: Match, member: Member) -> None:
    """Write a seat."""
    values = {f"new_{name}": _column(getattr(member, name)) for name in _MEMBER_FIELDS}
    connection.execute(_UPDATE_MEMBER, {"match": match.serial, "seat": member.index, **values})


def find_game(connection: sa.Connection, match: Match, epoch: int, game: int) -> Game | None:
    """Return a game; None if there is none, or it was long ago."""
    values = {"match": match.serial, "of_epoch": epoch, "of_game": game}
    row = connection.execute(_GAME, values).first()
    return None if row is None else _game(row)


def select_games(
    connection: sa.Connection, match: Match, *conditions: sa.ColumnElement[bool]
) -> list[Game]:
    """Return games of a match in the order of their revisions."""
    query = sa.select(games).where(games.c.serial == match.serial, *conditions)
    return [_game(row) for row in connection.execute(query.order_by(games.c.revision))]


def insert_games(connection: sa.Connection, match: Match, new: Sequence[Game]) -> None:
    """Write games that begin, with the revision of the match."""
    if new:
        rows = [{**_plain(each), "revision": match.revision} for each in new]
        connection.execute(sa.insert(games), [{"serial": match.serial, **row} for row in rows])


def write_game(connection: sa.Connection, match: Match, game: Game) -> Game:
    """Write a game with the revision of the match; return it as it is then."""
    game = dataclasses.replace(game, revision=match.revision)
    values = {f"new_{name}": _column(getattr(game, name)) for name in (*_GAME_CHANGES, "revision")}
    connection.execute(
        _UPDATE_GAME,
        {"match": match.serial, "of_epoch": game.epoch, "of_game": game.game, **values},
    )
    return game


def insert_move(connection: sa.Connection, match: Match, move: Move) -> None:
    """Write a move, which is not shown yet."""
    plain = _plain(move)
    verdict = {name: plain.pop(name) for name in ("next_agents", "is_over", "rewards")}
    connection.execute(
        _INSERT_MOVE, {"serial": match.serial, **plain, "verdict": verdict, "revision": 0}
    )


def show_moves(connection: sa.Connection, match: Match, epoch: int, game: int, turn: int) -> None:
    """Show the moves of a turn from the revision of the match on."""
    values = {"match": match.serial, "of_epoch": epoch, "of_game": game, "of_turn": turn}
    connection.execute(_SHOW_MOVES, {**values, "shown_revision": match.revision})


def moves_of_turn(
    connection: sa.Connection, match: Match, epoch: int, game: int, turn: int
) -> list[Move]:
    """Return the moves of a turn."""
    values = {"match": match.serial, "of_epoch": epoch, "of_game": game, "of_turn": turn}
    return [_move(row) for row in connection.execute(_MOVES, values)]


def moves_after(
    connection: sa.Connection, match: Match, revision: int, *, limit: int
) -> list[tuple[int, Move]]:
    """Return moves that were shown after a revision, each with its own, oldest first."""
    query = (
        sa.select(moves)
        .where(moves.c.serial == match.serial, moves.c.revision > revision)
        .order_by(moves.c.revision, moves.c.epoch, moves.c.game, moves.c.turn, moves.c.agent)
        .limit(limit)
    )
    return [(row.revision, _move(row)) for row in connection.execute(query)]


def forget_epochs(connection: sa.Connection, match: Match, before_epoch: int) -> None:
    """Remove games and moves of epochs that are past."""
    for table in (moves, games):
        connection.execute(
            sa.delete(table).where(table.c.serial == match.serial, table.c.epoch < before_epoch)
        )


def delete(connection: sa.Connection, serials: Iterable[int]) -> None:
    """Remove matches and all that belongs to them."""
    chosen = list(serials)
    for table in (moves, games, members, matches):
        connection.execute(sa.delete(table).where(table.c.serial.in_(chosen)))


def _match(connection: sa.Connection, row: sa.Row[Any]) -> Match:
    seats = connection.execute(_MEMBERS, {"match": row.serial})
    return Match(
        serial=row.serial,
        project=row.project,
        match_id=row.match_id,
        rules=_rules(row.rules),
        state=MatchState(row.state),
        members=tuple(_member(seat) for seat in seats),
        num_opened=row.num_opened,
        num_open_games=row.num_open_games,
        deadline_s=row.deadline_s,
        failure=row.failure,
        revision=row.revision,
        create_time_s=row.create_time_s,
        end_time_s=row.end_time_s,
    )


def _rules(value: dict[str, Any]) -> MatchRules:
    return MatchRules(
        **{
            **value,
            "agents": tuple(value["agents"]),
            "models": tuple(value["models"]),
            "turn_order": TurnOrder(value["turn_order"]),
            "policy": LossPolicy(value["policy"]),
        }
    )


def _member(row: sa.Row[Any]) -> Member:
    values = {name: getattr(row, name) for name in _MEMBER_FIELDS}
    return Member(index=row._mapping["index"], **{**values, "state": MemberState(row.state)})


def _game(row: sa.Row[Any]) -> Game:
    values = {name: getattr(row, name) for name in _GAME_FIELDS}
    return Game(**{**values, "state": GameState(row.state), "running": tuple(row.running)})


def _move(row: sa.Row[Any]) -> Move:
    return Move(
        epoch=row.epoch,
        game=row.game,
        turn=row.turn,
        agent=row.agent,
        action_json=row.action_json,
        next_agents=tuple(row.verdict["next_agents"]),
        is_over=row.verdict["is_over"],
        rewards=row.verdict["rewards"],
    )


def _plain(value: Any) -> dict[str, Any]:
    """Return the fields of a record as columns hold them."""
    return {field.name: _column(getattr(value, field.name)) for field in dataclasses.fields(value)}


def _column(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return list(value)
    return value
