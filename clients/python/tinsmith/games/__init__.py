"""Games of several agents, and scripted players of them.

`AgentGame` is what a game has to be; `GomokuGame`, `KuhnGame`, `RockPaperScissorsGame` are three.
They run wherever their agents run: in a match, at a table in one process, in an environment, or in
a test. A `League` keeps a learner's opponents, and `fit_ratings` says how strong each player is.
"""

from tinsmith.games.agent_game import AgentGame, Player
from tinsmith.games.gomoku import GomokuGame, GomokuRules
from tinsmith.games.gomoku_players import STRENGTHS, GomokuPlayer, Strength
from tinsmith.games.kuhn import KuhnGame
from tinsmith.games.kuhn_players import KUHN_STRENGTHS, KuhnPlayer, KuhnStrength
from tinsmith.games.league import League, LeaguePlayer
from tinsmith.games.ratings import Pairing, Rating, fit_ratings
from tinsmith.games.rock_paper_scissors import (
    RPS_STRENGTHS,
    RockPaperScissorsGame,
    RpsPlayer,
    RpsStrength,
)
from tinsmith.games.table import GameOverError, TableInstance, sit_down

__all__ = [
    "KUHN_STRENGTHS",
    "RPS_STRENGTHS",
    "STRENGTHS",
    "AgentGame",
    "GameOverError",
    "GomokuGame",
    "GomokuPlayer",
    "GomokuRules",
    "KuhnGame",
    "KuhnPlayer",
    "KuhnStrength",
    "League",
    "LeaguePlayer",
    "Pairing",
    "Player",
    "Rating",
    "RockPaperScissorsGame",
    "RpsPlayer",
    "RpsStrength",
    "Strength",
    "TableInstance",
    "fit_ratings",
    "sit_down",
]
