"""Matches and their games as values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith.rpc.durations import encode_duration
from tinsmith.v1 import coordinator_pb2

_Match = coordinator_pb2.Match
_STATES = {
    _Match.STATE_GATHERING: "gathering",
    _Match.STATE_RUNNING: "running",
    _Match.STATE_COMPLETED: "completed",
    _Match.STATE_ABORTED: "aborted",
    _Match.STATE_CANCELLED: "cancelled",
}
_AGENT_STATES = {
    coordinator_pb2.Agent.STATE_ABSENT: "absent",
    coordinator_pb2.Agent.STATE_RUNNING: "running",
    coordinator_pb2.Agent.STATE_PENDING: "pending",
    coordinator_pb2.Agent.STATE_LOST: "lost",
    coordinator_pb2.Agent.STATE_DROPPED: "dropped",
}
_GAME_STATES = {
    coordinator_pb2.Game.STATE_PLAYING: "playing",
    coordinator_pb2.Game.STATE_OVER: "over",
    coordinator_pb2.Game.STATE_ABANDONED: "abandoned",
}
_ORDERS = {
    "fixed": _Match.TURN_ORDER_FIXED,
    "simultaneous": _Match.TURN_ORDER_SIMULTANEOUS,
    "custom": _Match.TURN_ORDER_CUSTOM,
}
_POLICIES = {
    "wait": _Match.POLICY_WAIT,
    "drop": _Match.POLICY_DROP,
    "abort": _Match.POLICY_ABORT,
}
_ORDER_NAMES = {number: name for name, number in _ORDERS.items()}
_POLICY_NAMES = {number: name for name, number in _POLICIES.items()}
POINTS = {
    "rollout_start": coordinator_pb2.Barrier.POINT_ROLLOUT_START,
    "rollout_end": coordinator_pb2.Barrier.POINT_ROLLOUT_END,
    "update_start": coordinator_pb2.Barrier.POINT_UPDATE_START,
    "update_end": coordinator_pb2.Barrier.POINT_UPDATE_END,
}
"""The barriers of an epoch, in their order."""
_POINT_NAMES = {number: name for name, number in POINTS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchSpec:
    """What is agreed of a match."""

    agents: Sequence[str]
    """Names, in the order of turns."""
    models: Mapping[str, str] = field(default_factory=dict)
    """What plays as an agent, for people: a run, a checkpoint or a script."""
    turn_order: str = "fixed"
    """`fixed`, `simultaneous`, or `custom`: the agent that moves names the next one."""
    rotates_first_agent: bool = False
    """Whether the first move passes from agent to agent with each game of an epoch."""
    policy: str = "wait"
    """What follows when a member is lost: `wait`, `drop` or `abort`."""
    min_members: int = 2
    """Fewest members that go on under `drop`."""
    num_games: int = 1
    """Games of an epoch."""
    num_epochs: int = 0
    """0 for as many as are played until the match is cancelled."""
    seed: int = 0
    """Agents derive from it what they draw."""
    lease_s: float = 60.0
    """How long a seat lasts without a sign of life."""
    turn_timeout_s: float = 600.0
    """A game with a later turn is abandoned."""
    barrier_timeout_s: float = 3600.0
    """How long members are waited for at a barrier, and at the beginning."""
    config: Any = None
    """What the agents need to know; anything that JSON can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchAgent:
    """One of the players of a match.

    Attributes:
        state: `absent`, `running`, `pending`, `lost` or `dropped`.
    """

    agent: str
    model: str
    state: str
    client_id: str
    num_joins: int
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A match as the server describes it.

    Attributes:
        state: `gathering`, `running`, `completed`, `aborted` or `cancelled`.
        epoch: Of the barrier that opens next.
        next_point: The point of the epoch where that barrier is.
        num_open_games: Games of this epoch that are played still.
        failure: Why it was aborted.
        waiting_for: What it waits for, in words.
    """

    name: str
    state: str
    agents: tuple[MatchAgent, ...]
    turn_order: str
    policy: str
    num_games: int
    num_epochs: int
    seed: int
    lease_s: float
    config: Any
    epoch: int
    next_point: str
    num_open_games: int
    failure: str
    waiting_for: str
    revision: int

    @property
    def is_open(self) -> bool:
        """Whether it may go on."""
        return self.state in ("gathering", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchGame:
    """A game of a match as the server describes it.

    Attributes:
        state: `playing`, `over` or `abandoned`.
        running_agents: Agents that may move now.
        rewards: What it was worth to each agent, once it is over.
        failure: Why it was abandoned.
    """

    epoch: int
    game: int
    state: str
    turn: int
    running_agents: tuple[str, ...]
    rewards: Mapping[str, float]
    failure: str


def encode_match(spec: MatchSpec) -> coordinator_pb2.Match:
    """Return the message of a match that is to be created.

    Raises:
        ValueError: If the turn order or the policy is unknown, or the config is no JSON.
    """
    for value, known, what in (
        (spec.turn_order, _ORDERS, "turn_order"),
        (spec.policy, _POLICIES, "policy"),
    ):
        if value not in known:
            raise ValueError(f"{what} must be one of {', '.join(known)}, got {value!r}")
    return _Match(
        agents=[
            coordinator_pb2.Agent(agent=agent, model=spec.models.get(agent, ""))
            for agent in spec.agents
        ],
        turn_order=_ORDERS[spec.turn_order],
        rotates_first_agent=spec.rotates_first_agent,
        policy=_POLICIES[spec.policy],
        min_members=spec.min_members,
        num_games=spec.num_games,
        num_epochs=spec.num_epochs,
        seed=spec.seed,
        lease_duration=encode_duration(spec.lease_s),
        turn_timeout=encode_duration(spec.turn_timeout_s),
        barrier_timeout=encode_duration(spec.barrier_timeout_s),
        config_json="" if spec.config is None else json.dumps(spec.config),
    )


def decode_match(message: coordinator_pb2.Match) -> Match:
    """Return the value of a message."""
    return Match(
        name=message.name,
        state=_STATES[message.state],
        agents=tuple(
            MatchAgent(
                agent=agent.agent,
                model=agent.model,
                state=_AGENT_STATES[agent.state],
                client_id=agent.client_id,
                num_joins=agent.num_joins,
                failure=agent.failure,
            )
            for agent in message.agents
        ),
        turn_order=_ORDER_NAMES[message.turn_order],
        policy=_POLICY_NAMES[message.policy],
        num_games=message.num_games,
        num_epochs=message.num_epochs,
        seed=message.seed,
        lease_s=message.lease_duration.ToTimedelta().total_seconds(),
        config=json.loads(message.config_json) if message.config_json else None,
        epoch=message.next_barrier.epoch,
        next_point=_POINT_NAMES[message.next_barrier.point],
        num_open_games=message.num_open_games,
        failure=message.failure,
        waiting_for=message.waiting_for,
        revision=message.revision,
    )


def decode_game(message: coordinator_pb2.Game) -> MatchGame:
    """Return the value of a message."""
    return MatchGame(
        epoch=message.epoch,
        game=message.game,
        state=_GAME_STATES[message.state],
        turn=message.turn,
        running_agents=tuple(message.running_agents),
        rewards=dict(message.rewards),
        failure=message.failure,
    )
