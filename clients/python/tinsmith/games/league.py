"""A league: a learner's opponents, its own past among them, and what came of each game.

A policy that plays only itself forgets how to beat what it once was, and may collapse. A league
keeps snapshots of it beside scripts and frozen checkpoints, and draws opponents from all of them.
`hardest` draws by (1 - p)^2, where p is the learner's expected score: those it still loses to come
most often. Source: Vinyals et al. 2019, "Grandmaster level in StarCraft II", prioritized
fictitious self-play.

The league knows names. What a name plays with, a checkpoint or a script, is its `source`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tinsmith.games.ratings import Pairing, Rating, fit_ratings
from tinsmith.whole_files import write_whole

Choice = Literal["uniform", "latest", "hardest"]
Kind = Literal["script", "frozen", "snapshot"]

_PRIOR_GAMES = 2.0
"""Games that an opponent without results counts as, half of them won."""


@dataclass(frozen=True, slots=True)
class LeaguePlayer:
    """An opponent.

    Attributes:
        name: Unique in the league.
        kind: A `script`, a `frozen` checkpoint from elsewhere, or a `snapshot` of the learner.
        source: What plays: a script's strength or a checkpoint's name.
        step: Training step of a snapshot; 0 for others.
    """

    name: str
    kind: Kind
    source: str
    step: int = 0


class League:
    """Opponents of one learner.

    Args:
        learner: Its name, apart from those of all opponents.
        max_snapshots: Snapshots that are kept. Beyond that, those are dropped that lie closest
            together in time, so that the early ones stay represented.
    """

    def __init__(self, learner: str = "learner", *, max_snapshots: int = 16) -> None:
        if max_snapshots < 1:
            raise ValueError(f"max_snapshots is {max_snapshots}; take 1 or more")
        self.learner = learner
        self.max_snapshots = max_snapshots
        self._players: dict[str, LeaguePlayer] = {}
        self._results: dict[tuple[str, str], tuple[float, int]] = {}

    @property
    def players(self) -> tuple[LeaguePlayer, ...]:
        """Opponents, in the order in which they came."""
        return tuple(self._players.values())

    def add(self, player: LeaguePlayer) -> LeaguePlayer | None:
        """Take an opponent in; return the snapshot that had to leave for it, if one had to.

        Raises:
            ValueError: If the name is taken.
        """
        if player.name == self.learner or player.name in self._players:
            raise ValueError(f"the league has a player {player.name} already")
        self._players[player.name] = player
        snapshots = [each for each in self.players if each.kind == "snapshot"]
        if len(snapshots) <= self.max_snapshots:
            return None
        leaving = _most_crowded(snapshots)
        del self._players[leaving.name]
        self._results = {
            pair: result for pair, result in self._results.items() if leaving.name not in pair
        }
        return leaving

    def record(self, first: str, second: str, score: float, num_games: int = 1) -> None:
        """Note games between two players; `score` is the first one's, a draw is 0.5.

        Raises:
            ValueError: If a name is unknown or the score impossible.
        """
        for name in (first, second):
            if name != self.learner and name not in self._players:
                raise ValueError(f"the league has no player {name}")
        pairing = Pairing(first, second, score, num_games)
        if (second, first) in self._results:
            first, second, score = second, first, num_games - score
        old_score, old_games = self._results.get((first, second), (0.0, 0))
        self._results[first, second] = (old_score + score, old_games + pairing.num_games)

    def expected_score(self, opponent: str) -> float:
        """Return what the learner makes of a game with an opponent, by their results so far."""
        score, games = self._results.get((self.learner, opponent), (0.0, 0))
        back_score, back_games = self._results.get((opponent, self.learner), (0.0, 0))
        won = score + back_games - back_score
        return (won + _PRIOR_GAMES / 2) / (games + back_games + _PRIOR_GAMES)

    def draw(self, number: int, *, choice: Choice = "hardest", seed: int) -> list[LeaguePlayer]:
        """Return opponents for a number of games; equal seeds and results draw equal ones.

        Raises:
            ValueError: If the league is empty or the choice unknown.
        """
        if not self._players:
            raise ValueError("the league has no players; add one first")
        if choice not in get_args(Choice):
            raise ValueError(f"choice is {choice!r}; take one of {', '.join(get_args(Choice))}")
        players = list(self.players)
        if choice == "latest":
            newest = max(players, key=lambda player: (player.kind == "snapshot", player.step))
            return [newest] * number
        weights = [1.0] * len(players)
        if choice == "hardest":
            weights = [(1.0 - self.expected_score(player.name)) ** 2 for player in players]
        return random.Random(seed).choices(players, weights, k=number)

    def ratings(self) -> dict[str, Rating]:
        """Return the rating of every player with results, the learner's among them."""
        return fit_ratings(
            Pairing(first, second, score, games)
            for (first, second), (score, games) in self._results.items()
        )

    @property
    def state(self) -> dict[str, Any]:
        """Players and results as JSON has them; `from_state` takes it."""
        return {
            "learner": self.learner,
            "max_snapshots": self.max_snapshots,
            "players": [asdict(player) for player in self.players],
            "results": [
                [first, second, score, games]
                for (first, second), (score, games) in self._results.items()
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> League:
        """Return a league as it was.

        Raises:
            ValueError: If the state is none of a league.
        """
        try:
            league = cls(state["learner"], max_snapshots=state["max_snapshots"])
            for player in state["players"]:
                league.add(LeaguePlayer(**player))
            for first, second, score, games in state["results"]:
                league.record(first, second, score, games)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no state of a league: {error}") from error
        return league

    def save(self, path: Path) -> None:
        """Write the league as JSON, whole or not at all."""
        write_whole(path, f"{json.dumps(self.state, indent=1)}\n".encode())

    @classmethod
    def load(cls, path: Path) -> League:
        """Return a league that `save` wrote.

        Raises:
            ValueError: If the file holds no league.
            OSError: If it cannot be read.
        """
        try:
            return cls.from_state(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"{path} holds no league: {error}") from error


def describe_ratings(ratings: Mapping[str, Rating]) -> list[str]:
    """Return a line for each player, the strongest first."""
    ordered = sorted(ratings.items(), key=lambda item: -item[1].elo)
    width = max((len(name) for name in ratings), default=0)
    return [
        f"{name:<{width}}  {rating.elo:+6.0f} +- {rating.error:.0f}  ({rating.num_games} games)"
        for name, rating in ordered
    ]


def _most_crowded(snapshots: list[LeaguePlayer]) -> LeaguePlayer:
    """Return the snapshot whose neighbours in time are closest; never the first or the last."""
    ordered = sorted(snapshots, key=lambda player: player.step)
    if len(ordered) < 3:
        return ordered[0]
    spans = [
        (after.step - before.step, index)
        for index, (before, after) in enumerate(zip(ordered, ordered[2:], strict=False), start=1)
    ]
    return ordered[min(spans)[1]]
