import pytest

from tinsmith.games.gomoku import FIRST, SECOND, Board, GomokuGame, GomokuRules
from tinsmith.games.gomoku_players import STRENGTHS, GomokuPlayer, Strength

AGENTS = ("black", "white")


async def play(rules: GomokuRules, black: GomokuPlayer, white: GomokuPlayer) -> GomokuGame:
    game = GomokuGame(AGENTS, rules)
    while game.next_agents:
        [agent] = game.next_agents
        player = black if agent == "black" else white
        game.apply({agent: await player.choose_move(game, agent)})
    return game


async def mean_reward(rules: GomokuRules, strong: Strength, weak: Strength, number: int) -> float:
    """Play games in which each of the two begins half of them."""
    total = 0.0
    for seed in range(number):
        players = (GomokuPlayer(strong, seed=seed), GomokuPlayer(weak, seed=seed + 1000))
        is_first = seed % 2 == 0
        game = await play(rules, *(players if is_first else players[::-1]))
        assert game.ended_by in ("row", "full")
        total += game.rewards["black" if is_first else "white"]
    return total / number


@pytest.mark.parametrize("rules", [GomokuRules(5, 4), GomokuRules(6, 4)], ids=str)
@pytest.mark.parametrize(
    ("strong", "weak", "least"),
    [("greedy", "random", 0.9), ("search", "random", 0.9), ("search", "greedy", 0.5)],
)
async def test_strengths_are_ordered(
    rules: GomokuRules, strong: Strength, weak: Strength, least: float
) -> None:
    assert await mean_reward(rules, strong, weak, 20) >= least


@pytest.mark.parametrize("strength", STRENGTHS)
async def test_equal_seeds_play_equal_games(strength: Strength) -> None:
    rules = GomokuRules(5, 4)
    games = [
        await play(rules, GomokuPlayer(strength, seed=3), GomokuPlayer(strength, seed=4))
        for _ in range(2)
    ]

    assert games[0].board.cells == games[1].board.cells


@pytest.mark.parametrize("strength", ["greedy", "search"])
@pytest.mark.parametrize("stone", [FIRST, SECOND])
def test_a_row_is_completed_before_another_is_blocked(strength: Strength, stone: int) -> None:
    board = Board(GomokuRules(3, 3))
    for cell, placed in ((0, stone), (1, stone), (3, 3 - stone), (4, 3 - stone)):
        board.place(cell, placed)

    assert GomokuPlayer(strength).choose_cell(board, stone) == 2


@pytest.mark.parametrize("strength", ["greedy", "search"])
def test_a_row_of_the_other_side_is_blocked(strength: Strength) -> None:
    board = Board(GomokuRules(5, 4))
    for cell in (5, 6, 7):
        board.place(cell, SECOND)
    board.place(8, FIRST)
    board.place(20, FIRST)
    # The row 5, 6, 7 has cells 8 and 9 to its right; one end is closed, and no other is left.
    board.place(12, SECOND)
    board.place(17, SECOND)

    # 2, 7, 12, 17 and 7, 12, 17, 22 are threats in a column.
    assert GomokuPlayer(strength).choose_cell(board, FIRST) in (2, 22)


def test_a_full_board_has_no_move() -> None:
    board = Board(GomokuRules(2, 2))
    for cell in range(4):
        board.place(cell, FIRST)

    with pytest.raises(ValueError, match="no cell is free"):
        GomokuPlayer().choose_cell(board, FIRST)


def test_an_unknown_strength_is_refused() -> None:
    with pytest.raises(ValueError, match="strength is 'perfect'; take one of random, greedy"):
        GomokuPlayer("perfect")  # type: ignore[arg-type]
