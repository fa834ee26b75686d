"""Games that the recipes of self-play know, with the scripts that play them, and the user's own.

A game of one's own is a class, named as `FILE.py:CLASS` or `MODULE:CLASS`. It is made from its two
agents and a seed, and is an `AgentGame`. With `legal_moves`, the texts that are moves now, it has a
script that plays at random. Further scripts are its own `scripts`, by their names.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinsmith.errors import ConfigurationError
from tinsmith.games import (
    KUHN_STRENGTHS,
    RPS_STRENGTHS,
    STRENGTHS,
    AgentGame,
    GomokuGame,
    GomokuPlayer,
    GomokuRules,
    KuhnGame,
    KuhnPlayer,
    Player,
    RockPaperScissorsGame,
    RpsPlayer,
)
from tinsmith.user_code import load_object, names_code

AGENTS = ("first", "second")
"""Names of the seats; the first one begins."""
GAMES = ("gomoku", "kuhn", "rock_paper_scissors")
AT_ONCE = "simultaneous"
"""The order of a game whose agents move all at once."""
ORDERS = ("rotating", "fixed", "custom", AT_ONCE)
"""Orders of moves: the first move passes from game to game; the first of `agents` begins every
game; the game names the next ones; all at once."""

_OWN_MAX_TURNS = 32


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
        order: One of `ORDERS`, unless the settings have another.
    """

    name: str
    scripts: tuple[str, ...]
    max_turns: int
    best_reward: float
    seat: Callable[[Sequence[str], int], AgentGame]
    make_script: Callable[[str, int], Player]
    order: str = "rotating"

    def make_game(self, seed: int) -> AgentGame:
        """Return a game of the seats `AGENTS` at its beginning."""
        return self.seat(AGENTS, seed)

    def share_won(self, reward: float) -> float:
        """Return a reward as a score of a game: 1 for the most, 0.5 for a draw."""
        return min(1.0, max(0.0, 0.5 + reward / (2 * self.best_reward)))


def load_game(
    data: str, *, board_size: int, row_length: int, numbered_cells: bool = False
) -> GameTask:
    """Return a game by its name; size, length and numbers are gomoku's.

    Raises:
        ConfigurationError: If there is no such game, or no such board.
    """
    if names_code(data):
        return _load_own(data)
    if data == "kuhn":
        return GameTask("kuhn", KUHN_STRENGTHS, 2, 2.0, _kuhn, _kuhn_script)
    if data == "rock_paper_scissors":
        return GameTask(data, RPS_STRENGTHS, 1, 1.0, _rps, _rps_script, AT_ONCE)
    if data != "gomoku":
        raise ConfigurationError(
            f"there is no game {data!r}",
            remedy=f"use one of {_listed(GAMES)}, or FILE.py:CLASS of your own",
        )
    try:
        rules = GomokuRules(board_size, row_length, numbered_cells)
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


def choose_order(game: GameTask, order: str) -> str:
    """Return the order of moves: as the settings say, or as the game is played.

    Raises:
        ConfigurationError: If there is no such order, or the game is not played in it.
    """
    if not order:
        return game.order
    if order not in ORDERS:
        raise ConfigurationError(f"order is {order!r}", remedy=f"give one of {_listed(ORDERS)}")
    if (order == AT_ONCE) != (game.order == AT_ONCE):
        how = "all at once" if game.order == AT_ONCE else "one after the other"
        raise ConfigurationError(
            f"order is {order!r}, and agents of {game.name} move {how}",
            remedy="leave order out",
        )
    return order


class _RandomPlayer:
    """Draws a move among those that a game calls legal."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(f"player:{seed}")

    async def choose_move(self, game: Any, agent: str) -> Any:
        """Return one of the legal moves."""
        del agent
        return self._random.choice(list(game.legal_moves))


def _load_own(path: str) -> GameTask:
    made = load_object(path, "data")
    example, failure = made, ""
    try:
        example = made(("first", "second"), 0)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    scripts: dict[str, Callable[[int], Player]] = {}
    if hasattr(example, "legal_moves"):
        scripts["random"] = _RandomPlayer
    own: Mapping[str, Callable[[int], Player]] = getattr(made, "scripts", {})
    scripts |= own
    missing = [
        name
        for name in ("next_agents", "rewards", "observe", "apply")
        if not hasattr(example, name)
    ]
    if missing or not scripts:
        raise ConfigurationError(
            f"data: {path} is no game, or has nothing to learn from",
            remedy=f"give it {_listed(tuple(missing) or ('legal_moves', 'scripts'))}",
        )
    if failure:
        raise ConfigurationError(
            f"data: {path}(agents, seed) fails: {failure}",
            remedy="make it a class whose instances are games of these agents",
        )
    order = str(getattr(made, "order", ORDERS[0]))
    if order not in ORDERS:
        raise ConfigurationError(
            f"data: {path}.order is {order!r}", remedy=f"give one of {_listed(ORDERS)}"
        )
    return GameTask(
        path.rpartition(":")[2],
        tuple(scripts),
        int(getattr(made, "max_turns", _OWN_MAX_TURNS)),
        float(getattr(made, "best_reward", 1.0)),
        made,
        lambda name, seed: scripts[name](seed),
        order,
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


def _rps(agents: Sequence[str], _seed: int) -> AgentGame:
    return RockPaperScissorsGame(agents)


def _rps_script(strength: str, seed: int) -> Player:
    [known] = [each for each in RPS_STRENGTHS if each == strength]
    return RpsPlayer(known, seed=seed)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
