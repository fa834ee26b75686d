"""What came of the games of a match, by agent."""

from __future__ import annotations

import pytest

from tinsmith.v1.coordinator_pb2 import Game
from tinsmith_gateway.page.results import results_of


def over(**rewards: float) -> Game:
    return Game(state=Game.STATE_OVER, rewards=rewards)


def test_the_stronger_agent_comes_first_with_its_games() -> None:
    games = [over(a=1.0, b=-1.0), over(a=-1.0, b=1.0), over(a=-1.0, b=1.0), over(a=0.0, b=0.0)]
    first, second = results_of([*games, Game(state=Game.STATE_PLAYING)])
    assert (first["agent"], first["games"], first["wins"]) == ("b", 4, 2)
    assert (second["agent"], second["wins"], second["mean"]) == ("a", 1, -0.25)
    assert first["elo"] == pytest.approx(-second["elo"])
    assert first["elo"] > 0


def test_an_agent_alone_has_no_rating_and_no_games_have_no_results() -> None:
    assert results_of([]) == []
    [alone] = results_of([over(a=2.0)])
    assert (alone["elo"], alone["mean"], alone["wins"]) == (0.0, 2.0, 1)
