"""Games that two policies play against each other, each of them learning from its own side.

A game gives both an episode. They share its course and their rewards are opposite, while tokens,
log-probabilities and advantages are each policy's own. Seats alternate from game to game.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tinsmith.games.shared_table import SharedTable
from tinsmith.recipes.experience import Experience, answers_of, length_metrics
from tinsmith.recipes.game_source import LearnedGame
from tinsmith.recipes.tasks.agent_games import AGENTS, GameTask
from tinsmith.rollouts import RoleBaselines, RolloutError, RolloutRunner, Trajectory
from tinsmith.rollouts.datums import trajectory_arrays

_SEEDS = 1_000_000_000
_MAX_CONCURRENCY = 64


@dataclass(slots=True)
class PlayedGame:
    """One game that came to its end.

    Attributes:
        seed: Of the game.
        seats: The seat of each policy.
        rewards: Of each policy.
        episodes: Of each policy; None for one that had no turn.
    """

    seed: int
    seats: tuple[str, str]
    rewards: tuple[float, float]
    episodes: tuple[Trajectory | None, Trajectory | None]


@dataclass(slots=True)
class PlayedGames:
    """The games of a step.

    Attributes:
        games: Those that came to their end.
        num_lost: Games that did not.
        last_failure: What the last of them failed of.
    """

    games: list[PlayedGame] = field(default_factory=list)
    num_lost: int = 0
    last_failure: str = ""

    def advantages(self, policy: int, baselines: RoleBaselines) -> Sequence[float]:
        """Return what each game was worth to a policy, compared with others of its seat."""
        rewards = [game.rewards[policy] for game in self.games]
        return baselines.advantages([game.seats[policy] for game in self.games], rewards)

    def episodes(self, policy: int, advantages: Sequence[float]) -> Iterator[LearnedGame]:
        """Yield a policy's side of each game that it had a turn in."""
        for game, advantage in zip(self.games, advantages, strict=True):
            episode = game.episodes[policy]
            if episode is not None:
                yield LearnedGame(episode, game.seed, game.seats[policy], "partner", advantage)

    def experience(self, policy: int, advantages: Sequence[float]) -> Experience:
        """Return what a policy learns from."""
        rewards = [game.rewards[policy] for game in self.games]
        sequences = []
        played = []
        for game, advantage in zip(self.games, advantages, strict=True):
            episode = game.episodes[policy]
            if episode is not None:
                sequences += trajectory_arrays(episode, advantage)
                played.append(episode)
        metrics = {
            "is_success": _mean([reward > 0 for reward in rewards]),
            "turns": _mean([len(episode.turns) for episode in played]),
            **length_metrics(answers_of(played)),
            "lost": float(self.num_lost),
        }
        return Experience(sequences, len(rewards), _mean(rewards), metrics)


async def play_shared_games(
    game: GameTask, runners: Sequence[RolloutRunner], num_games: int, key: str
) -> PlayedGames:
    """Play games of two policies; equal keys begin equal games.

    Args:
        game: What is played.
        runners: Of the two policies.
        num_games: How many.
        key: Tells the random draws of these games from those of others.
    """
    places = asyncio.Semaphore(_MAX_CONCURRENCY)
    generator = random.Random(f"shared games:{key}")
    seeds = [generator.randrange(_SEEDS) for _ in range(num_games)]
    played = PlayedGames()

    async def play(number: int, seed: int) -> PlayedGame | None:
        seats = (AGENTS[number % 2], AGENTS[1 - number % 2])
        async with places:
            table = SharedTable(game.make_game(seed))
            episodes = await asyncio.gather(
                *(
                    _play_seat(runner, table, seat, f"{key}/{number}/{index}")
                    for index, (runner, seat) in enumerate(zip(runners, seats, strict=True))
                )
            )
        if table.failure or not table.is_over:
            played.last_failure = table.failure
            return None
        rewards = (float(table.rewards[seats[0]]), float(table.rewards[seats[1]]))
        return PlayedGame(seed, seats, rewards, (episodes[0], episodes[1]))

    found = await asyncio.gather(*(play(number, seed) for number, seed in enumerate(seeds)))
    played.games = [each for each in found if each is not None]
    played.num_lost = num_games - len(played.games)
    if not played.games:
        raise RolloutError(f"not one of {num_games} games came to its end: {played.last_failure}")
    return played


async def _play_seat(
    runner: RolloutRunner, table: SharedTable, seat: str, key: str
) -> Trajectory | None:
    """Return a seat's episode; None if it had no turn, or its game was given up."""
    try:
        episode = await runner.run(lambda: table.sit_down(seat), episode_key=key)
    except Exception as error:
        # The other seat waits: it is told, and the game is lost for both.
        await table.give_up(seat)
        table.failure = f"{seat}: {error}"
        return None
    return None if episode.reason.is_infrastructure else episode


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
