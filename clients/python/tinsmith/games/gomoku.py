"""Gomoku: two agents set stones on a square board, and a row of a given length wins.

Size and length are free: 9x9 with rows of five is the game as people play it, 3x3 with three is
tic-tac-toe. A move is written `row,column`, both from 0, or as the number that a free cell shows.
A move that breaks the rules loses the game, which keeps it zero-sum and lets a policy learn the
rules.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tinsmith.environments.environment_calls import Observation

EMPTY, FIRST, SECOND = 0, 1, 2
STONES = ".XO"
"""How an empty cell, a stone of the first agent and one of the second are written."""

MAX_SIZE = 19
_MOVE = re.compile(r"\s*(\d{1,2})\s*,\s*(\d{1,2})\s*", re.ASCII)
_NUMBER = re.compile(r"\s*(\d{1,3})\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class GomokuRules:
    """Width of the board, how many stones in a row win, and how moves are written."""

    size: int = 9
    row_length: int = 5
    numbered_cells: bool = False
    """Whether free cells show a number, from 1, which is the move: what may be played is then to
    be read off the board, which a small model learns in a few hundred games."""

    def __post_init__(self) -> None:
        if not 2 <= self.size <= MAX_SIZE:
            raise ValueError(f"size is {self.size}; a board has 2 to {MAX_SIZE} rows")
        if not 2 <= self.row_length <= self.size:
            raise ValueError(f"row_length is {self.row_length}; take 2 to the size, {self.size}")

    @property
    def num_cells(self) -> int:
        """Cells of the board."""
        return self.size * self.size


class Board:
    """Stones on a board, and whether one side has its row."""

    def __init__(self, rules: GomokuRules) -> None:
        self.rules = rules
        self.cells = [EMPTY] * rules.num_cells
        """Row by row: `EMPTY`, `FIRST` or `SECOND`."""
        self.num_stones = 0
        self.winner = EMPTY

    @property
    def is_over(self) -> bool:
        """Whether a row was made or no cell is free."""
        return self.winner != EMPTY or self.num_stones == self.rules.num_cells

    @property
    def free_cells(self) -> list[int]:
        """Cells without a stone, ascending."""
        return [cell for cell, stone in enumerate(self.cells) if stone == EMPTY]

    def place(self, cell: int, stone: int) -> None:
        """Set a stone on a free cell.

        Raises:
            ValueError: If the cell is not free or not on the board.
        """
        if not 0 <= cell < self.rules.num_cells or self.cells[cell] != EMPTY:
            raise ValueError(f"cell {cell} is not free")
        self.cells[cell] = stone
        self.num_stones += 1
        if any(
            all(self.cells[other] == stone for other in row)
            for row in rows_through(self.rules)[cell]
        ):
            self.winner = stone

    def copy(self) -> Board:
        """Return a board with the same stones."""
        board = Board(self.rules)
        board.cells = list(self.cells)
        board.num_stones = self.num_stones
        board.winner = self.winner
        return board

    def __str__(self) -> str:
        size, is_numbered = self.rules.size, self.rules.numbered_cells
        texts = [
            str(cell + 1) if is_numbered and stone == EMPTY else STONES[stone]
            for cell, stone in enumerate(self.cells)
        ]
        width = len(str(len(texts))) if is_numbered else 1
        between = " " if is_numbered else ""
        rows = (texts[start : start + size] for start in range(0, len(texts), size))
        return "\n".join(between.join(text.rjust(width) for text in row) for row in rows)


@functools.lru_cache(maxsize=64)
def rows_through(rules: GomokuRules) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Return, for each cell, the rows of winning length that go through it."""
    size, length = rules.size, rules.row_length
    through: list[list[tuple[int, ...]]] = [[] for _ in range(rules.num_cells)]
    for row in range(size):
        for column in range(size):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                last_row = row + down * (length - 1)
                last_column = column + right * (length - 1)
                if last_row < size and 0 <= last_column < size:
                    cells = tuple(
                        (row + down * step) * size + column + right * step for step in range(length)
                    )
                    for cell in cells:
                        through[cell].append(cells)
    return tuple(tuple(rows) for rows in through)


def parse_move(text: Any, rules: GomokuRules) -> int | None:
    """Return the cell that a move names, or None if it names none of the board."""
    notation = _NUMBER if rules.numbered_cells else _MOVE
    match = notation.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    if rules.numbered_cells:
        return int(match[1]) - 1 if 1 <= int(match[1]) <= rules.num_cells else None
    row, column = int(match[1]), int(match[2])
    return row * rules.size + column if row < rules.size and column < rules.size else None


def write_move(cell: int, rules: GomokuRules) -> str:
    """Return the text of a move to a cell: `row,column`, or the cell's number."""
    return str(cell + 1) if rules.numbered_cells else f"{cell // rules.size},{cell % rules.size}"


class GomokuGame:
    """One game of two agents; the first one sets X and begins."""

    def __init__(self, agents: Sequence[str], rules: GomokuRules | None = None) -> None:
        if len(set(agents)) != 2 or len(agents) != 2:
            raise ValueError(f"gomoku has two agents of different names, not {list(agents)}")
        self.board = Board(rules or GomokuRules())
        self.ended_by: Literal["", "row", "full", "illegal_move"] = ""
        """What ended the game; empty while it goes on."""
        self._agents = tuple(agents)
        self._next = 0
        self._loser = ""

    @property
    def rules(self) -> GomokuRules:
        """Size and length of rows."""
        return self.board.rules

    @property
    def next_agents(self) -> tuple[str, ...]:
        """The agent that moves now; none once the game is over."""
        return () if self.ended_by else (self._agents[self._next],)

    @property
    def rewards(self) -> Mapping[str, float]:
        """1 for the winner, -1 for the loser, 0 for a full board; empty while the game goes on."""
        if not self.ended_by:
            return {}
        if not self._loser:
            return dict.fromkeys(self._agents, 0.0)
        return {agent: -1.0 if agent == self._loser else 1.0 for agent in self._agents}

    def stone_of(self, agent: str) -> int:
        """Return the stones that an agent sets, `FIRST` or `SECOND`."""
        return FIRST + self._agents.index(agent)

    def observe(self, agent: str) -> Observation:
        """Return the board, and what the agent sets, as a message."""
        if self.ended_by:
            return Observation()
        length = self.rules.row_length
        content = f"{self.board}\n{STONES[self.stone_of(agent)]} to move, {length} in a row win."
        return Observation(messages=[{"role": "user", "content": content}])

    def apply(self, actions: Mapping[str, Any]) -> None:
        """Set a stone for the agent that is next; text that is no legal move loses the game.

        Raises:
            ValueError: If the game is over, or it is another agent's turn.
        """
        if tuple(actions) != self.next_agents:
            raise ValueError(f"{list(self.next_agents)} moves now, not {list(actions)}")
        [(agent, text)] = actions.items()
        cell = parse_move(text, self.rules)
        other = self._agents[1 - self._next]
        if cell is None or self.board.cells[cell] != EMPTY:
            self.ended_by, self._loser = "illegal_move", agent
            return
        self.board.place(cell, self.stone_of(agent))
        if self.board.winner:
            self.ended_by, self._loser = "row", other
        elif self.board.is_over:
            self.ended_by = "full"
        self._next = 1 - self._next
