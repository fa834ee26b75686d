"""Matches as plain values: what is agreed, the seats, and how each game stands."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tinsmith.names import MatchName


class MatchState(enum.Enum):
    """Where a match is in its life."""

    GATHERING = "gathering"
    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"
    CANCELLED = "cancelled"

    @property
    def is_open(self) -> bool:
        """Whether it may go on."""
        return self in OPEN_MATCH_STATES


OPEN_MATCH_STATES = (MatchState.GATHERING, MatchState.RUNNING)


class TurnOrder(enum.Enum):
    """The order of moves in a game."""

    FIXED = "fixed"
    SIMULTANEOUS = "simultaneous"
    CUSTOM = "custom"


class LossPolicy(enum.Enum):
    """What follows when a member is lost or late."""

    WAIT = "wait"
    DROP = "drop"
    ABORT = "abort"


class MemberState(enum.Enum):
    """Whether a seat is held."""

    ABSENT = "absent"
    JOINED = "joined"
    LOST = "lost"
    DROPPED = "dropped"


class GameState(enum.Enum):
    """Where a game is in its life."""

    PLAYING = "playing"
    OVER = "over"
    ABANDONED = "abandoned"


class Point(enum.IntEnum):
    """The barriers of an epoch, in the order in which they open."""

    ROLLOUT_START = 0
    ROLLOUT_END = 1
    UPDATE_START = 2
    UPDATE_END = 3


def barrier_index(epoch: int, point: Point) -> int:
    """Return how many barriers of a match open before this one."""
    return epoch * len(Point) + point


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchRules:
    """What is agreed of a match when it is created.

    Attributes:
        agents: Names in the order of turns.
        models: What plays as each agent, for people.
        num_epochs: 0 for no end.
    """

    agents: tuple[str, ...]
    models: tuple[str, ...]
    turn_order: TurnOrder
    rotates_first_agent: bool
    policy: LossPolicy
    min_members: int
    num_games: int
    num_epochs: int
    seed: int
    lease_duration_s: float
    turn_timeout_s: float
    barrier_timeout_s: float
    config_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The seat of an agent.

    Attributes:
        index: Of the agent in the order of turns.
        arrived: Index of the last barrier that it arrived at; -1 for none.
        request_sha256: Of the request that took the seat.
        salt: Of the lease, which the token is derived from.
    """

    index: int
    agent: str
    state: MemberState
    client_id: str
    num_joins: int
    lease_expire_s: float | None
    arrived: int
    failure: str
    request_sha256: bytes
    salt: bytes
    token_sha256: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A match and its members.

    Attributes:
        num_opened: Barriers that have opened.
        deadline_s: When the wait for members is over; None while none is waited for.
        num_open_games: Of the current epoch.
    """

    serial: int
    project: str
    match_id: str
    rules: MatchRules
    state: MatchState
    members: tuple[Member, ...]
    num_opened: int
    num_open_games: int
    deadline_s: float | None
    failure: str
    revision: int
    create_time_s: float
    end_time_s: float | None

    @property
    def name(self) -> MatchName:
        """Resource name."""
        return MatchName(self.project, self.match_id)

    @property
    def epoch(self) -> int:
        """The epoch that the next barrier belongs to."""
        return self.num_opened // len(Point)

    @property
    def next_point(self) -> Point:
        """The barrier that opens next."""
        return Point(self.num_opened % len(Point))

    @property
    def is_in_rollout(self) -> bool:
        """Whether the rollout phase has begun and not ended."""
        return self.state is MatchState.RUNNING and self.next_point is Point.ROLLOUT_END


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """One game of an epoch.

    Attributes:
        running: Agents that may move now.
        num_bytes: What its moves take.
        deadline_s: When the turn is over.
    """

    epoch: int
    game: int
    state: GameState
    turn: int
    running: tuple[str, ...]
    rewards: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    num_bytes: int = 0
    deadline_s: float | None = None
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What an agent does in its turn.

    Attributes:
        next_agents: Those that move next, where the order is custom.
        is_over: Whether the move ends the game.
    """

    epoch: int
    game: int
    turn: int
    agent: str
    action_json: str
    next_agents: tuple[str, ...] = ()
    is_over: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seat:
    """A match as one of its members joined it."""

    match: Match
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class MatchUpdate:
    """What changed in a match up to a revision."""

    match: Match
    games: tuple[Game, ...]
    moves: tuple[Move, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class MatchPage:
    """A part of a list.

    Attributes:
        next_serial: Where the next part begins; None at the end.
    """

    matches: list[Match]
    next_serial: int | None
