import pytest

from tinsmith.games.gomoku import (
    EMPTY,
    FIRST,
    Board,
    GomokuGame,
    GomokuRules,
    parse_move,
    rows_through,
    write_move,
)

AGENTS = ("black", "white")


def play(rules: GomokuRules, moves: str) -> GomokuGame:
    game = GomokuGame(AGENTS, rules)
    for move in moves.split():
        [agent] = game.next_agents
        game.apply({agent: move})
    return game


@pytest.mark.parametrize(
    ("moves", "ended_by", "winner"),
    [
        ("0,0 1,0 0,1 1,1 0,2", "row", "black"),
        ("0,0 0,1 1,0 1,1 2,2 2,1", "row", "white"),
        ("0,0 0,1 1,1 0,2 2,2", "row", "black"),
        ("0,2 0,1 1,1 0,0 2,0", "row", "black"),
        ("0,0 0,1 0,2 1,1 1,0 2,0 1,2 2,2 2,1", "full", None),
        ("1,1 1,1", "illegal_move", "black"),
        ("3,0", "illegal_move", "white"),
        ("middle", "illegal_move", "white"),
    ],
)
def test_a_game_ends_as_its_rules_say(moves: str, ended_by: str, winner: str | None) -> None:
    game = play(GomokuRules(3, 3), moves)

    assert game.ended_by == ended_by
    assert game.next_agents == ()
    assert game.rewards == {
        agent: 0.0 if winner is None else 1.0 if agent == winner else -1.0 for agent in AGENTS
    }


def test_a_row_is_as_long_as_the_rules_say() -> None:
    assert play(GomokuRules(5, 4), "0,0 1,0 0,1 1,1 0,2 1,2").ended_by == ""
    assert play(GomokuRules(5, 4), "0,0 1,0 0,1 1,1 0,2 1,2 0,3").ended_by == "row"


@pytest.mark.parametrize(("size", "length", "number"), [(3, 3, 8), (5, 4, 28), (9, 5, 140)])
def test_every_row_of_the_board_is_known_once(size: int, length: int, number: int) -> None:
    through = rows_through(GomokuRules(size, length))

    rows = {row for rows in through for row in rows}
    assert len(rows) == number
    assert sum(len(rows) for rows in through) == number * length


def test_an_agent_reads_the_board_and_its_own_stones() -> None:
    game = play(GomokuRules(3, 3), "1,1 0,0")

    [message] = game.observe("black").messages
    assert message == {"role": "user", "content": "O..\n.X.\n...\nX to move, 3 in a row win."}


def test_nothing_is_shown_after_the_end() -> None:
    assert play(GomokuRules(3, 3), "9,9").observe("white").messages == []


def test_a_move_out_of_turn_is_a_mistake_of_the_program() -> None:
    game = GomokuGame(AGENTS, GomokuRules(3, 3))

    with pytest.raises(ValueError, match=r"\['black'\] moves now, not \['white'\]"):
        game.apply({"white": "0,0"})


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("0,0", 0),
        (" 1 , 2 \n", 5),
        ("2,2", 8),
        ("3,0", None),
        ("0,3", None),
        ("-1,0", None),
        ("1;1", None),
        ("0,0 1,1", None),
        ("٢,٢", None),
        ("", None),
        (None, None),
        (4, None),
    ],
)
def test_a_move_is_a_row_and_a_column(text: object, cell: int | None) -> None:
    assert parse_move(text, GomokuRules(3, 3)) == cell


@pytest.mark.parametrize("numbered_cells", [False, True])
def test_moves_are_written_as_they_are_read(numbered_cells: bool) -> None:
    rules = GomokuRules(19, 5, numbered_cells)
    assert all(parse_move(write_move(cell, rules), rules) == cell for cell in range(361))


@pytest.mark.parametrize(
    ("text", "cell"),
    [("1", 0), (" 9\n", 8), ("0", None), ("10", None), ("0,0", None), ("-1", None), ("٣", None)],
)
def test_a_move_is_the_number_of_a_cell(text: str, cell: int | None) -> None:
    assert parse_move(text, GomokuRules(3, 3, numbered_cells=True)) == cell


def test_free_cells_show_their_numbers() -> None:
    assert str(play(GomokuRules(3, 3, numbered_cells=True), "5 1").board) == "O 2 3\n4 X 6\n7 8 9"
    wide = str(play(GomokuRules(4, 3, numbered_cells=True), "1").board)
    assert wide.splitlines()[0] == " X  2  3  4"


@pytest.mark.parametrize(
    ("size", "length", "problem"),
    [(1, 2, "size is 1"), (20, 5, "size is 20"), (5, 6, "row_length is 6"), (5, 1, "row_length")],
)
def test_rules_that_no_board_has_are_refused(size: int, length: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GomokuRules(size, length)


@pytest.mark.parametrize("agents", [("black",), ("a", "a"), ("a", "b", "c")])
def test_two_agents_play(agents: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="two agents of different names"):
        GomokuGame(agents)


def test_a_copy_of_a_board_goes_its_own_way() -> None:
    board = Board(GomokuRules(3, 3))
    copy = board.copy()
    copy.place(4, FIRST)

    assert board.cells[4] == EMPTY
    assert board.num_stones == 0
    with pytest.raises(ValueError, match="cell 4 is not free"):
        copy.place(4, FIRST)
