"""Games that the recipes of self-play know, with the scripts that play them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tinsmith.errors import ConfigurationError
from tinsmith.games import (
    KUHN_STRENGTHS,
    STRENGTHS,
    AgentGame,
    GomokuGame,
    GomokuPlayer,
    GomokuRules,
    KuhnGame,
    KuhnPlayer,
    Player,
)

AGENTS = ("first", "second")
"""Names of the seats; the first one begins."""
GAMES = ("gomoku", "kuhn")


@dataclass(frozen=True, slots=True)
class GameTask:
    """A game of two agents, and its scripts.

    Attributes:
        name: One of `GAMES`.
        scripts: Names of its scripts, the weakest first.
        max_turns: Moves of one agent in a game, at most.
        best_reward: What an agent can win at most, and lose.
        seat: Returns a game at its beginning: its agents, the first of which begins, and a seed.
        make_script: Returns a script, by its name and a seed.
    """

    name: str
    scripts: tuple[str, ...]
    max_turns: int
    best_reward: float
    seat: Callable[[Sequence[str], int], AgentGame]
    make_script: Callable[[str, int], Player]

    def make_game(self, seed: int) -> AgentGame:
        """Return a game of the seats `AGENTS` at its beginning."""
        return self.seat(AGENTS, seed)

    def share_won(self, reward: float) -> float:
        """Return a reward as a score of a game: 1 for the most, 0.5 for a draw."""
        return min(1.0, max(0.0, 0.5 + reward / (2 * self.best_reward)))


def load_game(data: str, *, board_size: int, row_length: int) -> GameTask:
    """Return a game by its name; size and length are gomoku's.

    Raises:
        ConfigurationError: If there is no such game, or no such board.
    """
    if data == "kuhn":
        return GameTask("kuhn", KUHN_STRENGTHS, 2, 2.0, _kuhn, _kuhn_script)
    if data != "gomoku":
        raise ConfigurationError(
            f"there is no game {data!r}", remedy=f"use one of {_listed(GAMES)}"
        )
    try:
        rules = GomokuRules(board_size, row_length)
    except ValueError as error:
        raise ConfigurationError(str(error), remedy="change board_size or row_length") from error
    max_turns = (rules.num_cells + 1) // 2
    return GameTask("gomoku", STRENGTHS, max_turns, 1.0, partial(_gomoku, rules), _gomoku_script)


def check_script(game: GameTask, setting: str, script: str) -> None:
    """Refuse a script that the game does not have.

    Raises:
        ConfigurationError: If there is none of this name.
    """
    if script not in game.scripts:
        raise ConfigurationError(
            f"{setting} is {script!r}, which {game.name} has no script for",
            remedy=f"give one of {_listed(game.scripts)}",
        )


def _gomoku(rules: GomokuRules, agents: Sequence[str], _seed: int) -> AgentGame:
    return GomokuGame(agents, rules)


def _gomoku_script(strength: str, seed: int) -> Player:
    [known] = [each for each in STRENGTHS if each == strength]
    return GomokuPlayer(known, seed=seed)


def _kuhn(agents: Sequence[str], seed: int) -> AgentGame:
    return KuhnGame.dealt(agents, seed)


def _kuhn_script(strength: str, seed: int) -> Player:
    [known] = [each for each in KUHN_STRENGTHS if each == strength]
    return KuhnPlayer(known, seed=seed)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
