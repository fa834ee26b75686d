"""Ratings from results: the model of Bradley and Terry on the scale of Elo, with error bars.

The chance that a player of rating a beats one of rating b is 1 / (1 + 10^((b - a) / 400)). A draw
counts as half a win. Ratings are fitted to all results at once, so their order in time does not
matter. A weak normal prior keeps a player finite that never lost.

Sources: R. A. Bradley and M. E. Terry, "Rank analysis of incomplete block designs", 1952;
A. Elo, "The rating of chessplayers", 1978.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ELO_PER_LOGIT = 400.0 / math.log(10.0)
_MAX_STEPS = 100
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Pairing:
    """Games between two players.

    Attributes:
        first: Name of one player.
        second: Name of the other.
        score: What the first one made of them: a win is 1, a draw 0.5.
        num_games: How many were played.
    """

    first: str
    second: str
    score: float
    num_games: int = 1

    def __post_init__(self) -> None:
        if self.first == self.second:
            raise ValueError(f"{self.first} cannot be rated by games with itself")
        if self.num_games < 1 or not 0.0 <= self.score <= self.num_games:
            raise ValueError(
                f"score is {self.score} of {self.num_games} games; take 0 to the number of games"
            )


@dataclass(frozen=True, slots=True)
class Rating:
    """How strong a player is.

    Attributes:
        elo: Rating; the mean over all players is 0.
        error: Half the width of the 95 % interval of `elo`.
        num_games: Games that it rests on.
    """

    elo: float
    error: float
    num_games: int


def win_probability(elo: float, other_elo: float) -> float:
    """Return the expected score of a game between two ratings."""
    return 1.0 / (1.0 + math.pow(10.0, (other_elo - elo) / 400.0))


def fit_ratings(pairings: Iterable[Pairing], *, prior_elo: float = 800.0) -> dict[str, Rating]:
    """Return the ratings that explain results best, by name.

    Args:
        pairings: Results; several of the same two players add up.
        prior_elo: Standard deviation of the prior.

    Errors come from the curvature of the likelihood at its maximum.
    """
    scores: dict[tuple[str, str], list[float]] = {}
    for pairing in pairings:
        total = scores.setdefault((pairing.first, pairing.second), [0.0, 0.0])
        total[0] += pairing.score
        total[1] += pairing.num_games
    names = sorted({name for pair in scores for name in pair})
    if not names:
        return {}
    index = {name: i for i, name in enumerate(names)}
    firsts = np.asarray([index[first] for first, _ in scores])
    seconds = np.asarray([index[second] for _, second in scores])
    won, played = np.asarray(list(scores.values()), dtype=np.float64).T
    precision = (_ELO_PER_LOGIT / prior_elo) ** 2
    ratings, curvature = _maximize(firsts, seconds, won, played, len(names), precision)
    covariance = np.linalg.inv(curvature)
    # Only differences mean something: the mean is taken off, and its uncertainty with it.
    centring = np.eye(len(names)) - 1.0 / len(names)
    ratings = centring @ ratings
    errors = 1.96 * np.sqrt(np.diag(centring @ covariance @ centring.T))
    num_games = np.zeros(len(names))
    np.add.at(num_games, firsts, played)
    np.add.at(num_games, seconds, played)
    return {
        name: Rating(
            float(ratings[i] * _ELO_PER_LOGIT),
            float(errors[i] * _ELO_PER_LOGIT),
            int(num_games[i]),
        )
        for name, i in index.items()
    }


def _maximize(
    firsts: NDArray[np.int64],
    seconds: NDArray[np.int64],
    won: NDArray[np.float64],
    played: NDArray[np.float64],
    num_players: int,
    precision: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ratings in logits and the curvature there, by damped Newton steps.

    The logarithm of the posterior is concave: there is one maximum.
    """
    ratings = np.zeros(num_players)
    curvature = np.eye(num_players)
    for _ in range(_MAX_STEPS):
        chance = 1.0 / (1.0 + np.exp(ratings[seconds] - ratings[firsts]))
        gradient = -precision * ratings
        np.add.at(gradient, firsts, won - played * chance)
        np.add.at(gradient, seconds, played * chance - won)
        weights = played * chance * (1.0 - chance)
        curvature = precision * np.eye(num_players)
        np.add.at(curvature, (firsts, firsts), weights)
        np.add.at(curvature, (seconds, seconds), weights)
        np.add.at(curvature, (firsts, seconds), -weights)
        np.add.at(curvature, (seconds, firsts), -weights)
        step = np.linalg.solve(curvature, gradient)
        step *= min(1.0, 2.0 / max(float(np.abs(step).max()), _TOLERANCE))
        ratings = ratings + step
        if float(np.abs(step).max()) < _TOLERANCE:
            break
    return ratings, curvature
