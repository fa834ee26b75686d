import random
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from tinsmith.games import GomokuGame, GomokuPlayer, GomokuRules
from tinsmith.games.league import League, LeaguePlayer, describe_ratings


def league_of(*names: str) -> League:
    league = League()
    for name in names:
        league.add(LeaguePlayer(name, "script", name))
    return league


def snapshot(step: int) -> LeaguePlayer:
    return LeaguePlayer(f"step-{step}", "snapshot", f"checkpoints/{step}", step)


def test_the_hardest_opponents_come_most_often() -> None:
    league = league_of("easy", "even", "hard")
    league.record("learner", "easy", 98.0, 100)
    league.record("learner", "even", 50.0, 100)
    league.record("hard", "learner", 90.0, 100)

    drawn = Counter(player.name for player in league.draw(10_000, seed=0))

    weights = {name: (1 - league.expected_score(name)) ** 2 for name in ("easy", "even", "hard")}
    total = sum(weights.values())
    for name, weight in weights.items():
        assert drawn[name] / 10_000 == pytest.approx(weight / total, abs=0.02)


def test_an_opponent_without_results_counts_as_even() -> None:
    league = league_of("new")

    assert league.expected_score("new") == 0.5
    league.record("learner", "new", 2.0, 2)
    assert league.expected_score("new") == 0.75


def test_uniform_draws_all_alike_and_latest_the_newest_snapshot() -> None:
    league = league_of("a", "b")
    league.add(snapshot(8))
    league.add(snapshot(4))
    league.record("learner", "a", 100.0, 100)

    drawn = Counter(player.name for player in league.draw(8000, choice="uniform", seed=1))
    assert all(1800 <= number <= 2200 for number in drawn.values())
    assert [player.step for player in league.draw(3, choice="latest", seed=1)] == [8, 8, 8]


def test_equal_seeds_draw_equal_opponents() -> None:
    league = league_of("a", "b", "c")

    assert league.draw(20, seed=5) == league.draw(20, seed=5)
    assert league.draw(20, seed=5) != league.draw(20, seed=6)


def test_snapshots_are_bounded_and_stay_spread_over_time() -> None:
    league = League(max_snapshots=4)
    league.add(LeaguePlayer("script", "script", "greedy"))
    dropped = [league.add(snapshot(step)) for step in range(0, 100, 10)]

    kept = [player.step for player in league.players if player.kind == "snapshot"]
    assert len(kept) == 4
    assert (min(kept), max(kept)) == (0, 90)
    assert max(after - before for before, after in pairwise(kept)) <= 60
    assert sum(player is not None for player in dropped) == 6
    assert league.players[0].name == "script"


def test_results_of_a_snapshot_leave_with_it() -> None:
    league = League(max_snapshots=1)
    league.add(snapshot(1))
    league.record("learner", "step-1", 1.0)
    league.add(snapshot(2))

    assert league.ratings() == {}
    with pytest.raises(ValueError, match="no player step-1"):
        league.record("learner", "step-1", 1.0)


def test_a_league_survives_its_file(tmp_path: Path) -> None:
    league = league_of("a", "b")
    league.add(snapshot(3))
    league.record("learner", "a", 1.5, 2)
    league.record("a", "b", 3.0, 4)
    league.save(tmp_path / "league.json")

    loaded = League.load(tmp_path / "league.json")

    assert loaded.players == league.players
    assert loaded.ratings() == league.ratings()
    assert loaded.draw(10, seed=2) == league.draw(10, seed=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["league.json"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"learner": "x", "max_snapshots": 0}'])
def test_a_file_that_holds_no_league_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "league.json"
    path.write_text(content)

    with pytest.raises(ValueError, match="holds no league"):
        League.load(path)


def test_mistakes_say_what_is_wrong() -> None:
    league = league_of("a")

    with pytest.raises(ValueError, match="has a player a already"):
        league.add(LeaguePlayer("a", "script", "x"))
    with pytest.raises(ValueError, match="has a player learner already"):
        league.add(LeaguePlayer("learner", "script", "x"))
    with pytest.raises(ValueError, match="no player stranger"):
        league.record("learner", "stranger", 1.0)
    with pytest.raises(ValueError, match="choice is 'best'"):
        league.draw(1, choice="best", seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no players"):
        League().draw(1, seed=0)
    with pytest.raises(ValueError, match="max_snapshots is 0"):
        League(max_snapshots=0)


class Wavering:
    """Plays as one script in a share of its moves, and at random in the others."""

    def __init__(self, share: float, seed: int) -> None:
        self._share = share
        self._random = random.Random(seed)
        self._strong = GomokuPlayer("greedy", seed=seed)
        self._weak = GomokuPlayer("random", seed=seed)

    async def choose_move(self, game: GomokuGame, agent: str) -> str:
        player = self._strong if self._random.random() < self._share else self._weak
        return await player.choose_move(game, agent)


async def test_a_league_of_eight_strengths_is_ordered_by_its_ratings() -> None:
    names = [f"level-{level}" for level in range(8)]
    league = League(names[0])
    for name in names[1:]:
        league.add(LeaguePlayer(name, "script", name))
    for (i, first), (j, second) in combinations(enumerate(names), 2):
        for seed in range(60):
            seats = (first, second) if seed % 2 == 0 else (second, first)
            game = GomokuGame(seats, GomokuRules(5, 3))
            players = {
                first: Wavering(i / 7, seed * 8 + i),
                second: Wavering(j / 7, seed * 8 + j),
            }
            while game.next_agents:
                [agent] = game.next_agents
                game.apply({agent: await players[agent].choose_move(game, agent)})
            # 1 for the winner, 0 for the loser, a half each for a draw.
            margin = game.rewards.get(first, 0.0) - game.rewards.get(second, 0.0)
            league.record(first, second, 0.5 if margin == 0 else float(margin > 0))

    ratings = league.ratings()
    order = [line.split()[0] for line in describe_ratings(ratings)]
    assert order == names[::-1]
    for weak, strong in zip(names, names[2:], strict=False):
        # Not even the intervals overlap of those two levels apart.
        assert ratings[weak].elo + ratings[weak].error < ratings[strong].elo - ratings[strong].error
