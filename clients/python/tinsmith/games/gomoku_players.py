"""Scripted players of gomoku in three strengths.

- `random` sets a stone anywhere.
- `greedy` wins where it can, blocks where it must, and else builds beside its own stones.
- `search` looks three moves ahead among the cells that matter most.

Equal seeds play equal games.
"""

from __future__ import annotations

import math
import random
from typing import Literal, get_args

from tinsmith.games.gomoku import EMPTY, FIRST, SECOND, Board, GomokuGame, rows_through, write_move

Strength = Literal["random", "greedy", "search"]
STRENGTHS: tuple[Strength, ...] = get_args(Strength)

_WIN = 1e6
_SEARCH_DEPTH = 3
_SEARCH_WIDTH = 4


class GomokuPlayer:
    """A script that plays gomoku."""

    def __init__(self, strength: Strength = "greedy", *, seed: int = 0) -> None:
        if strength not in STRENGTHS:
            raise ValueError(f"strength is {strength!r}; take one of {', '.join(STRENGTHS)}")
        self.strength = strength
        self._random = random.Random(seed)

    async def choose_move(self, game: GomokuGame, agent: str) -> str:
        """Return a legal move as text."""
        cell = self.choose_cell(game.board, game.stone_of(agent))
        return write_move(cell, game.rules)

    def choose_cell(self, board: Board, stone: int) -> int:
        """Return a free cell.

        Raises:
            ValueError: If no cell is free.
        """
        free = board.free_cells
        if not free:
            raise ValueError("no cell is free")
        if self.strength == "random":
            return self._random.choice(free)
        if self.strength == "greedy":
            return self._choose_greedily(board, stone, free)
        return self._choose_by_search(board, stone, free)

    def _choose_greedily(self, board: Board, stone: int, free: list[int]) -> int:
        for side in (stone, _other(stone)):
            winning = [cell for cell in free if _makes_row(board, cell, side)]
            if winning:
                return self._random.choice(winning)
        beside = [cell for cell in free if _touches(board, cell, stone)]
        return self._random.choice(beside or free)

    def _choose_by_search(self, board: Board, stone: int, free: list[int]) -> int:
        if board.num_stones == 0:
            size = board.rules.size
            return (size // 2) * size + size // 2
        self._random.shuffle(free)
        best, best_value = free[0], -math.inf
        for cell in _most_promising(board, stone, free):
            value = _value_of_move(board, cell, stone, _SEARCH_DEPTH, best_value, math.inf)
            if value > best_value:
                best, best_value = cell, value
        return best


def _value_of_move(
    board: Board, cell: int, stone: int, depth: int, alpha: float, beta: float
) -> float:
    """Return what a move is worth to its side: negamax, `depth` moves deep, with its bounds."""
    after = board.copy()
    after.place(cell, stone)
    if after.winner:
        return _WIN * depth
    if after.is_over:
        return 0.0
    other = _other(stone)
    if depth == 1:
        threats = (_cell_score(after, reply, other) for reply in after.free_cells)
        return _cell_score(board, cell, stone) - max(threats)
    best = -math.inf
    for reply in _most_promising(after, other, after.free_cells):
        best = max(best, _value_of_move(after, reply, other, depth - 1, -beta, -alpha))
        if -best <= alpha:
            break
        beta = min(beta, -best)
    return -best


def _most_promising(board: Board, stone: int, free: list[int]) -> list[int]:
    return sorted(free, key=lambda cell: -_cell_score(board, cell, stone))[:_SEARCH_WIDTH]


def _cell_score(board: Board, cell: int, stone: int) -> float:
    """Return what a cell does for a side: its open rows, and those of the other side it closes."""
    score = 0.0
    length = board.rules.row_length
    for row in rows_through(board.rules)[cell]:
        own = sum(board.cells[other] == stone for other in row)
        foreign = sum(board.cells[other] not in (EMPTY, stone) for other in row)
        if foreign == 0:
            score += _WIN if own == length - 1 else 8.0**own
        elif own == 0:
            score += _WIN / 4 if foreign == length - 1 else 0.7 * 8.0**foreign
    return score


def _makes_row(board: Board, cell: int, stone: int) -> bool:
    return any(
        all(board.cells[other] == stone for other in row if other != cell)
        for row in rows_through(board.rules)[cell]
    )


def _touches(board: Board, cell: int, stone: int) -> bool:
    size = board.rules.size
    row, column = divmod(cell, size)
    return any(
        0 <= row + down < size
        and 0 <= column + right < size
        and board.cells[(row + down) * size + column + right] == stone
        for down in (-1, 0, 1)
        for right in (-1, 0, 1)
    )


def _other(stone: int) -> int:
    return SECOND if stone == FIRST else FIRST
