"""What came of the games of a match: by agent, with ratings."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from tinsmith.games import Pairing, fit_ratings
from tinsmith.v1 import coordinator_pb2
from tinsmith_gateway.page.encoding import Json


def results_of(games: Iterable[coordinator_pb2.Game]) -> list[Json]:
    """Return games, mean reward, wins and rating of each agent, the strongest first.

    Each pair of agents of a game counts as one comparison: the higher reward wins.
    """
    rewards: dict[str, list[float]] = {}
    wins: dict[str, int] = {}
    pairings = []
    for game in games:
        if game.state != coordinator_pb2.Game.STATE_OVER:
            continue
        best = max(game.rewards.values(), default=0.0)
        leaders = [agent for agent, reward in game.rewards.items() if reward == best]
        for agent, reward in game.rewards.items():
            rewards.setdefault(agent, []).append(reward)
            wins[agent] = wins.get(agent, 0) + (leaders == [agent])
        for first, second in combinations(sorted(game.rewards), 2):
            gap = game.rewards[first] - game.rewards[second]
            pairings.append(Pairing(first, second, 0.5 if gap == 0 else float(gap > 0)))
    ratings = fit_ratings(pairings)
    found: list[Json] = [
        {
            "agent": agent,
            "games": len(earned),
            "mean": sum(earned) / len(earned),
            "wins": wins[agent],
            "elo": ratings[agent].elo if agent in ratings else 0.0,
            "error": ratings[agent].error if agent in ratings else 0.0,
        }
        for agent, earned in rewards.items()
    ]
    return sorted(found, key=lambda each: (-each["elo"], each["agent"]))
