from __future__ import annotations

import random

import pytest

from tinsmith.games.kuhn import VALUE, KuhnGame, best_response_value, expected_value
from tinsmith.games.kuhn_players import KUHN_STRENGTHS, KuhnPlayer, policy_of


def test_nothing_wins_against_the_equilibrium() -> None:
    best = policy_of("equilibrium")
    assert expected_value(best, best) == pytest.approx(VALUE)
    assert best_response_value(best, seat=0) == pytest.approx(VALUE)
    assert best_response_value(best, seat=1) == pytest.approx(-VALUE)


@pytest.mark.parametrize("strength", ["random", "honest"])
def test_the_others_can_be_exploited(strength: str) -> None:
    [known] = [each for each in KUHN_STRENGTHS if each == strength]
    policy = policy_of(known)
    assert best_response_value(policy, seat=0) + best_response_value(policy, seat=1) > 0.5


@pytest.mark.parametrize("strength", KUHN_STRENGTHS)
async def test_scripts_play_whole_games_as_their_policies_say(strength: str) -> None:
    [known] = [each for each in KUHN_STRENGTHS if each == strength]
    gains = []
    for seed in range(2000):
        game = KuhnGame.dealt(("a", "b"), seed)
        players = {"a": KuhnPlayer(known, seed=seed), "b": KuhnPlayer("random", seed=seed + 2000)}
        while game.next_agents:
            [agent] = game.next_agents
            game.apply({agent: await players[agent].choose_move(game, agent)})
        gains.append(game.rewards["a"])
    expected = expected_value(policy_of(known), policy_of("random"))
    # Four standard errors of games that win or lose up to 2 chips.
    assert sum(gains) / len(gains) == pytest.approx(expected, abs=4 * 1.5 / 2000**0.5)


async def test_equal_seeds_play_equal_games() -> None:
    deals = [KuhnGame(("a", "b"), (1, random.Random(i).choice((0, 2)))) for i in range(50)]
    moves = [
        [await player.choose_move(game, "a") for game in deals]
        for player in (KuhnPlayer("random", seed=3), KuhnPlayer("random", seed=3))
    ]
    assert moves[0] == moves[1]


def test_an_unknown_strength_is_refused() -> None:
    with pytest.raises(ValueError, match="take one of random, honest, equilibrium"):
        KuhnPlayer("best")  # type: ignore[arg-type]
