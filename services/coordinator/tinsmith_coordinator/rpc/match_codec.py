"""Messages of matches to domain values and back, and the validation of requests."""

from __future__ import annotations

import math
from typing import Any

from tinsmith.names import is_valid_id
from tinsmith.rpc.durations import decode_duration, encode_duration
from tinsmith.v1 import coordinator_pb2
from tinsmith_coordinator.matches import rules
from tinsmith_coordinator.rpc.codec import check_json
from tinsmith_coordinator.store.match_records import (
    Game,
    GameState,
    LossPolicy,
    Match,
    MatchRules,
    MatchState,
    MatchUpdate,
    Member,
    MemberState,
    Move,
    Point,
    Seat,
    TurnOrder,
)
from tinsmith_runtime.errors import InvalidFieldError, NotFiniteInputError
from tinsmith_runtime.rpc.requests import check_text, encode_time

_MIN_AGENTS = 2
_MAX_AGENTS = 64
_MAX_GAMES = 4096
_MAX_EPOCHS = 2**40
_MAX_ACTION_BYTES = 64 * 2**10
_MIN_TIME_S = 1.0
_MAX_TIME_S = 86_400.0
_DEFAULT_LEASE_S = 60.0
_DEFAULT_TURN_S = 600.0
_DEFAULT_BARRIER_S = 3600.0
_DEFAULT_MEMBERS = 2
_MAX_WAIT_S = 20.0

_MatchMessage = coordinator_pb2.Match
_AgentMessage = coordinator_pb2.Agent
_STATES = {each: _MatchMessage.State.Value(f"STATE_{each.name}") for each in MatchState}
_ORDERS = {each: _MatchMessage.TurnOrder.Value(f"TURN_ORDER_{each.name}") for each in TurnOrder}
_POLICIES = {each: _MatchMessage.Policy.Value(f"POLICY_{each.name}") for each in LossPolicy}
_POINTS = {each: coordinator_pb2.Barrier.Point.Value(f"POINT_{each.name}") for each in Point}
_GAME_STATES = {each: coordinator_pb2.Game.State.Value(f"STATE_{each.name}") for each in GameState}
_SEAT_STATES = {
    MemberState.ABSENT: _AgentMessage.STATE_ABSENT,
    MemberState.LOST: _AgentMessage.STATE_LOST,
    MemberState.DROPPED: _AgentMessage.STATE_DROPPED,
}
_DECODED_ORDERS: dict[Any, TurnOrder] = {number: order for order, number in _ORDERS.items()}
_DECODED_POLICIES: dict[Any, LossPolicy] = {number: each for each, number in _POLICIES.items()}
_DECODED_POINTS: dict[Any, Point] = {number: point for point, number in _POINTS.items()}


def decode_rules(message: coordinator_pb2.Match) -> MatchRules:
    """Return what is agreed of a match that is to be created, defaults filled in."""
    agents = tuple(agent.agent for agent in message.agents)
    if not _MIN_AGENTS <= len(agents) <= _MAX_AGENTS:
        raise InvalidFieldError("match.agents", f"must be {_MIN_AGENTS} to {_MAX_AGENTS}")
    for index, agent in enumerate(agents):
        if not is_valid_id(agent):
            raise InvalidFieldError(
                f"match.agents[{index}].agent",
                "must be 1 to 63 of letters, digits, '-', '_' and '.'",
            )
    if len(set(agents)) < len(agents):
        raise InvalidFieldError("match.agents", "must have a name each of its own")
    min_members = message.min_members or _DEFAULT_MEMBERS
    if not 1 <= min_members <= len(agents):
        raise InvalidFieldError("match.min_members", f"must be 1 to {len(agents)}")
    if not 0 <= message.num_games <= _MAX_GAMES:
        raise InvalidFieldError("match.num_games", f"must be 0 to {_MAX_GAMES}")
    if not 0 <= message.num_epochs <= _MAX_EPOCHS:
        raise InvalidFieldError("match.num_epochs", f"must be 0 to {_MAX_EPOCHS}")
    order = message.turn_order or _MatchMessage.TURN_ORDER_FIXED
    policy = message.policy or _MatchMessage.POLICY_WAIT
    if order not in _DECODED_ORDERS:
        raise InvalidFieldError("match.turn_order", "must be an order of turns")
    if policy not in _DECODED_POLICIES:
        raise InvalidFieldError("match.policy", "must be a policy")
    return MatchRules(
        agents=agents,
        models=tuple(
            check_text(agent.model, f"match.agents[{index}].model")
            for index, agent in enumerate(message.agents)
        ),
        turn_order=_DECODED_ORDERS[order],
        rotates_first_agent=message.rotates_first_agent,
        policy=_DECODED_POLICIES[policy],
        min_members=min_members,
        num_games=message.num_games,
        num_epochs=message.num_epochs,
        seed=message.seed,
        lease_duration_s=_decode_time(message, "lease_duration", _DEFAULT_LEASE_S),
        turn_timeout_s=_decode_time(message, "turn_timeout", _DEFAULT_TURN_S),
        barrier_timeout_s=_decode_time(message, "barrier_timeout", _DEFAULT_BARRIER_S),
        config_json=check_json(message.config_json, "match.config_json"),
    )


def decode_move(request: coordinator_pb2.TakeTurnRequest) -> Move:
    """Return a move; the agent is known by the seat."""
    for field in ("epoch", "game", "turn"):
        if getattr(request, field) < 0:
            raise InvalidFieldError(field, "must not be negative")
    if len(request.action_json.encode()) > _MAX_ACTION_BYTES:
        raise InvalidFieldError("action_json", f"must be at most {_MAX_ACTION_BYTES} bytes")
    if len(request.next_agents) > _MAX_AGENTS or len(request.rewards) > _MAX_AGENTS:
        raise InvalidFieldError("next_agents", f"must be at most {_MAX_AGENTS}, rewards as well")
    if not all(map(math.isfinite, request.rewards.values())):
        raise NotFiniteInputError("rewards", "must be finite")
    return Move(
        epoch=request.epoch,
        game=request.game,
        turn=request.turn,
        agent="",
        action_json=check_json(request.action_json, "action_json"),
        next_agents=tuple(dict.fromkeys(request.next_agents)),
        is_over=request.is_over,
        rewards=dict(request.rewards),
    )


def decode_game(request: coordinator_pb2.AbandonGameRequest) -> tuple[int, int]:
    """Return the epoch and the number of a game."""
    for field, value in (("epoch", request.epoch), ("game", request.game)):
        if value < 0:
            raise InvalidFieldError(field, "must not be negative")
    return request.epoch, request.game


def decode_barrier(message: coordinator_pb2.Barrier) -> tuple[int, Point]:
    """Return the epoch and the point of a barrier."""
    if not 0 <= message.epoch <= _MAX_EPOCHS:
        raise InvalidFieldError("barrier.epoch", f"must be 0 to {_MAX_EPOCHS}")
    if message.point not in _DECODED_POINTS:
        raise InvalidFieldError("barrier.point", "must be a point of an epoch")
    return message.epoch, _DECODED_POINTS[message.point]


def decode_wait(request: coordinator_pb2.ArriveAtBarrierRequest) -> float:
    """Return how long a caller waits, in seconds."""
    timeout_s = decode_duration(request.timeout)
    if timeout_s < 0:
        raise InvalidFieldError("timeout", "must not be negative")
    return min(timeout_s, _MAX_WAIT_S)


def encode_match(match: Match, movers: frozenset[str] = frozenset()) -> coordinator_pb2.Match:
    """Return the message of a match.

    Args:
        match: The match.
        movers: Agents that may move in some game.
    """
    terms = match.rules
    message = coordinator_pb2.Match(
        name=str(match.name),
        state=_STATES[match.state],
        agents=[_encode_agent(match, member, movers) for member in match.members],
        turn_order=_ORDERS[terms.turn_order],
        rotates_first_agent=terms.rotates_first_agent,
        policy=_POLICIES[terms.policy],
        min_members=terms.min_members,
        num_games=terms.num_games,
        num_epochs=terms.num_epochs,
        seed=terms.seed,
        lease_duration=encode_duration(terms.lease_duration_s),
        turn_timeout=encode_duration(terms.turn_timeout_s),
        barrier_timeout=encode_duration(terms.barrier_timeout_s),
        config_json=terms.config_json,
        next_barrier=coordinator_pb2.Barrier(epoch=match.epoch, point=_POINTS[match.next_point]),
        num_open_games=match.num_open_games,
        failure=match.failure,
        revision=match.revision,
        create_time=encode_time(match.create_time_s),
        waiting_for=_waiting_for(match, movers),
    )
    if match.end_time_s is not None:
        message.end_time.CopyFrom(encode_time(match.end_time_s))
    return message


def encode_seat(seat: Seat) -> coordinator_pb2.JoinMatchResponse:
    """Return the answer to a member that joined."""
    return coordinator_pb2.JoinMatchResponse(match=encode_match(seat.match), lease_token=seat.token)


def encode_game(game: Game) -> coordinator_pb2.Game:
    """Return the message of a game."""
    return coordinator_pb2.Game(
        epoch=game.epoch,
        game=game.game,
        state=_GAME_STATES[game.state],
        turn=game.turn,
        running_agents=game.running,
        rewards=dict(game.rewards),
        failure=game.failure,
        revision=game.revision,
    )


def encode_update(update: MatchUpdate, movers: frozenset[str]) -> coordinator_pb2.MatchUpdate:
    """Return the message of what changed."""
    return coordinator_pb2.MatchUpdate(
        match=encode_match(update.match, movers),
        games=[encode_game(game) for game in update.games],
        turns=[
            coordinator_pb2.Turn(
                epoch=move.epoch,
                game=move.game,
                turn=move.turn,
                agent=move.agent,
                action_json=move.action_json,
            )
            for move in update.moves
        ],
        revision=update.revision,
    )


def _encode_agent(match: Match, member: Member, movers: frozenset[str]) -> coordinator_pb2.Agent:
    state = _SEAT_STATES.get(member.state)
    if state is None:
        is_pending = rules.is_pending(match, member, may_move=member.agent in movers)
        state = _AgentMessage.STATE_PENDING if is_pending else _AgentMessage.STATE_RUNNING
    message = coordinator_pb2.Agent(
        agent=member.agent,
        model=match.rules.models[member.index],
        state=state,
        client_id=member.client_id,
        num_joins=member.num_joins,
        failure=member.failure,
    )
    if member.lease_expire_s is not None:
        message.lease_expire_time.CopyFrom(encode_time(member.lease_expire_s))
    return message


def _waiting_for(match: Match, movers: frozenset[str]) -> str:
    if not match.state.is_open:
        return ""
    awaited = ", ".join(member.agent for member in rules.awaited_members(match))
    if match.state is MatchState.GATHERING:
        return f"{awaited} to join"
    if match.is_in_rollout and match.num_open_games:
        moving = ", ".join(agent for agent in match.rules.agents if agent in movers)
        games = "game" if match.num_open_games == 1 else "games"
        return f"{moving or 'agents'} to move in {match.num_open_games} {games}"
    point = match.next_point.name.lower().replace("_", " ")
    return f"{awaited} to arrive at the {point} of epoch {match.epoch}"


def _decode_time(message: coordinator_pb2.Match, field: str, default_s: float) -> float:
    if not message.HasField(field):  # type: ignore[arg-type]
        return default_s
    time_s = decode_duration(getattr(message, field))
    if not _MIN_TIME_S <= time_s <= _MAX_TIME_S:
        raise InvalidFieldError(f"match.{field}", f"must be {_MIN_TIME_S:g} s to {_MAX_TIME_S:g} s")
    return time_s
