import random
from itertools import combinations

import pytest

from tinsmith.games.ratings import Pairing, fit_ratings, win_probability


def play_season(elos: dict[str, float], games: int, seed: int) -> list[Pairing]:
    """Return results of games between all pairs, drawn by their true ratings."""
    draws = random.Random(seed)
    return [
        Pairing(
            first,
            second,
            sum(draws.random() < win_probability(elos[first], elos[second]) for _ in range(games)),
            games,
        )
        for first, second in combinations(elos, 2)
    ]


def test_two_players_differ_by_what_their_score_says() -> None:
    # Without a prior, 3 of 4 points are 400 * log10(3) = 191 points of Elo apart.
    ratings = fit_ratings([Pairing("a", "b", 75.0, 100)], prior_elo=1e6)

    assert ratings["a"].elo - ratings["b"].elo == pytest.approx(190.85, abs=0.01)
    assert ratings["a"].elo + ratings["b"].elo == pytest.approx(0.0, abs=1e-6)


def test_the_error_of_two_players_is_that_of_a_binomial() -> None:
    ratings = fit_ratings([Pairing("a", "b", 50.0, 100)], prior_elo=1e6)

    # The logit of a share of 1/2 in 100 games has a deviation of 1 / sqrt(100 / 4) = 0.2.
    difference = 1.96 * 0.2 * 173.72
    assert ratings["a"].error == pytest.approx(difference / 2, rel=1e-3)
    assert ratings["a"].num_games == 100


def test_true_ratings_lie_in_their_intervals() -> None:
    elos = {"a": -300.0, "b": -100.0, "c": 0.0, "d": 150.0, "e": 250.0}
    num_inside = 0
    for seed in range(40):
        ratings = fit_ratings(play_season(elos, 60, seed), prior_elo=2000.0)
        num_inside += sum(abs(ratings[n].elo - elos[n]) <= ratings[n].error for n in elos)

    # 95 % of 200, within three standard deviations.
    assert 181 <= num_inside <= 199


def test_more_games_make_errors_smaller() -> None:
    elos = {"a": 0.0, "b": 100.0}
    few, many = (fit_ratings(play_season(elos, games, 0)) for games in (25, 2500))

    assert many["a"].error < few["a"].error / 5


def test_a_player_that_never_lost_stays_finite() -> None:
    ratings = fit_ratings([Pairing("a", "b", 30.0, 30)])

    assert 200.0 < ratings["a"].elo < 2000.0
    assert ratings["a"].error > 100.0


def test_order_and_side_of_results_do_not_matter() -> None:
    pairings = [Pairing("a", "b", 3.0, 4), Pairing("b", "c", 1.5, 2), Pairing("a", "c", 2.0, 2)]
    turned = [
        Pairing(each.second, each.first, each.num_games - each.score, each.num_games)
        for each in reversed(pairings)
    ]

    straight, back = fit_ratings(pairings), fit_ratings(turned)
    for name in ("a", "b", "c"):
        assert straight[name].elo == pytest.approx(back[name].elo, abs=1e-6)


def test_without_results_there_is_nobody() -> None:
    assert fit_ratings([]) == {}


@pytest.mark.parametrize(("score", "games"), [(-0.5, 1), (1.5, 1), (0.0, 0), (float("nan"), 1)])
def test_an_impossible_score_is_refused(score: float, games: int) -> None:
    with pytest.raises(ValueError, match="score is"):
        Pairing("a", "b", score, games)


def test_a_game_with_oneself_rates_nobody() -> None:
    with pytest.raises(ValueError, match="games with itself"):
        Pairing("a", "a", 1.0)
