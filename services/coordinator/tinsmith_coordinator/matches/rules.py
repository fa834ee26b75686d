"""What follows in a match from a move, an arrival or a loss: pure functions of what is known.

Nothing here reads a clock or a database, so that every rule is a row of a table in the tests. A
function gives the match, or the game, as it is afterwards. The caller writes that down.

A barrier opens when no member is waited for, and one is until it arrives or is dropped. A loss is a
lease that ran out, a member that left, or one that is late at a barrier. The policy turns it into
one of three things: the seat is kept for a while, the seat is closed, or the match is aborted. A
game whose agents are not all there any more is abandoned: it cannot be finished as it was begun,
and says nothing about how its agents play.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tinsmith_coordinator.store.match_records import (
    Game,
    GameState,
    LossPolicy,
    Match,
    MatchState,
    Member,
    MemberState,
    Move,
    Point,
    TurnOrder,
)

_PRESENT = (MemberState.JOINED, MemberState.LOST)


def awaited_members(match: Match) -> list[Member]:
    """Return the members without which the next barrier does not open."""
    if match.state is MatchState.GATHERING:
        return [member for member in match.members if member.state is MemberState.ABSENT]
    return [
        member
        for member in match.members
        if member.state in _PRESENT and member.arrived < match.num_opened
    ]


def active_agents(match: Match) -> tuple[str, ...]:
    """Return the agents that take part in games, in the order of turns."""
    return tuple(member.agent for member in match.members if member.state in _PRESENT)


def is_pending(match: Match, member: Member, *, may_move: bool) -> bool:
    """Return whether a member can do nothing but wait for others.

    Args:
        match: What the member is one of.
        member: One of its members.
        may_move: Whether it is its turn in some game.
    """
    if match.state is MatchState.GATHERING:
        return True
    if match.is_in_rollout and match.num_open_games and member.arrived < match.num_opened:
        return not may_move
    return member.arrived >= match.num_opened


def can_open(match: Match) -> bool:
    """Return whether the next barrier opens, or, before the first one, the match begins."""
    if not match.state.is_open or awaited_members(match):
        return False
    ends_rollout = match.state is MatchState.RUNNING and match.next_point is Point.ROLLOUT_END
    return not (ends_rollout and match.num_open_games)


def open_next(match: Match) -> Match:
    """Return the match with its next barrier open; its agents have come, if it was gathering.

    The match is over once the last barrier of its last epoch has opened.
    """
    if match.state is MatchState.GATHERING:
        return dataclasses.replace(match, state=MatchState.RUNNING)
    opened = dataclasses.replace(match, num_opened=match.num_opened + 1)
    if opened.next_point is Point.ROLLOUT_START and opened.epoch == match.rules.num_epochs:
        return dataclasses.replace(opened, state=MatchState.COMPLETED)
    return opened


def wait_deadline(match: Match, *, now_s: float) -> float | None:
    """Return until when members are waited for: from the first arrival, or the first loss, on."""
    if not match.state.is_open:
        return None
    is_waiting = match.state is MatchState.GATHERING or any(
        member.state is MemberState.LOST
        or (member.state is MemberState.JOINED and member.arrived >= match.num_opened)
        for member in match.members
    )
    if not is_waiting or not awaited_members(match):
        return None
    return match.deadline_s or now_s + match.rules.barrier_timeout_s


def lose(match: Match, agent: str, reason: str) -> Match:
    """Return the match after a member was lost: its lease ran out, or it left."""
    policy = match.rules.policy
    if policy is LossPolicy.ABORT:
        return abort(match, f"agent {agent} is lost: {reason}")
    state = MemberState.LOST if policy is LossPolicy.WAIT else MemberState.DROPPED
    return _require_members(_with_member(match, agent, state=state, failure=reason))


def give_up_waiting(match: Match) -> Match:
    """Return the match after the time is over in which its members were waited for."""
    late = [member.agent for member in awaited_members(match)]
    what = "agents to join" if match.state is MatchState.GATHERING else "members at a barrier"
    waited = f"waited {match.rules.barrier_timeout_s:g} s for {what}"
    if match.rules.policy is not LossPolicy.DROP:
        return abort(match, f"{waited}: {', '.join(late)}")
    for agent in late:
        match = _with_member(match, agent, state=MemberState.DROPPED, failure=waited)
    return _require_members(match)


def abort(match: Match, failure: str) -> Match:
    """Return the match after it could not go on."""
    return dataclasses.replace(match, state=MatchState.ABORTED, failure=failure)


def first_turn(match: Match, game: int, *, now_s: float) -> Game:
    """Return a game of the current epoch as it begins."""
    agents = active_agents(match)
    if match.rules.turn_order is not TurnOrder.SIMULTANEOUS:
        first = game % len(agents) if match.rules.rotates_first_agent else 0
        agents = (agents[first],)
    return Game(
        epoch=match.epoch,
        game=game,
        state=GameState.PLAYING,
        turn=0,
        running=agents,
        deadline_s=now_s + match.rules.turn_timeout_s,
    )


def move(match: Match, game: Game, moves: Sequence[Move], *, now_s: float) -> Game:
    """Return a game after a move.

    Args:
        match: What the game is one of.
        game: As it was; the agent of the last move is running.
        moves: Of the turn, the new one last.
        now_s: The time.
    """
    last = moves[-1]
    num_bytes = game.num_bytes + len(last.action_json.encode())
    still = tuple(agent for agent in game.running if agent != last.agent)
    game = dataclasses.replace(game, running=still, num_bytes=num_bytes)
    if still:
        return game
    if any(_verdict(other) != _verdict(last) for other in moves):
        agents = ", ".join(each.agent for each in moves)
        return abandon(game, f"{agents} do not agree on what turn {game.turn} led to")
    turn = game.turn + 1
    if last.is_over:
        return dataclasses.replace(
            game, state=GameState.OVER, turn=turn, rewards=dict(last.rewards), deadline_s=None
        )
    return dataclasses.replace(
        game,
        turn=turn,
        running=_next_agents(match, last),
        deadline_s=now_s + match.rules.turn_timeout_s,
    )


def abandon(game: Game, failure: str) -> Game:
    """Return a game that cannot go on."""
    return dataclasses.replace(
        game, state=GameState.ABANDONED, running=(), deadline_s=None, failure=failure
    )


def may_continue(before: Match, after: Match) -> bool:
    """Return whether the games of a match go on after its members changed."""
    return after.state.is_open and active_agents(before) == active_agents(after)


def _next_agents(match: Match, last: Move) -> tuple[str, ...]:
    agents = active_agents(match)
    if match.rules.turn_order is TurnOrder.SIMULTANEOUS:
        return agents
    if match.rules.turn_order is TurnOrder.CUSTOM:
        return last.next_agents
    return (agents[(agents.index(last.agent) + 1) % len(agents)],)


def _verdict(move: Move) -> tuple[object, ...]:
    """Return what the agents of a turn must agree on."""
    return move.is_over, sorted(move.rewards.items()), sorted(move.next_agents)


def _require_members(match: Match) -> Match:
    """Abort a match that has too few members to go on."""
    if match.state is MatchState.GATHERING:
        left = [member for member in match.members if member.state is not MemberState.DROPPED]
    else:
        left = [member for member in match.members if member.state in _PRESENT]
    if len(left) >= match.rules.min_members:
        return match
    reasons = "; ".join(
        f"{member.agent}: {member.failure}"
        for member in match.members
        if member.state is MemberState.DROPPED
    )
    return abort(match, f"{len(left)} of {match.rules.min_members} members are left ({reasons})")


def _with_member(match: Match, agent: str, *, state: MemberState, failure: str) -> Match:
    members = tuple(
        dataclasses.replace(member, state=state, failure=failure, lease_expire_s=None)
        if member.agent == agent
        else member
        for member in match.members
    )
    return dataclasses.replace(match, members=members)
