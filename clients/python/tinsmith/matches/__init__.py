"""Matches: several agents that play and learn side by side, in step.

`Client.matches` creates, lists and joins them. `Member` is the seat of an agent, and `play` makes a
game the environment of a rollout. An agent is a program of its own, with a run, a sampler and an
optimizer of its own. The coordinator keeps them in step.
"""

from tinsmith.games import AgentGame
from tinsmith.matches.member import Epoch, Member, Phase
from tinsmith.matches.seat_instance import GameAbandonedError, SeatInstance, play
from tinsmith.matches.types import Match, MatchAgent, MatchGame, MatchSpec

__all__ = [
    "AgentGame",
    "Epoch",
    "GameAbandonedError",
    "Match",
    "MatchAgent",
    "MatchGame",
    "MatchSpec",
    "Member",
    "Phase",
    "SeatInstance",
    "play",
]
