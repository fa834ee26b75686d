"""A game whose seats all learn: turns are kept, rewards are opposite, leaving ends it for all."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith.games import GameOverError, GomokuGame, GomokuRules
from tinsmith.games.shared_table import SharedTable

AGENTS = ("first", "second")


def table() -> SharedTable:
    return SharedTable(GomokuGame(AGENTS, GomokuRules(3, 3)))


async def play(shared: SharedTable, agent: str, moves: list[str]) -> tuple[list[float], bool]:
    seat = await shared.sit_down(agent)
    rewards = []
    done = False
    for move in moves:
        step = await seat.step_async(move)
        rewards.append(step.reward)
        done = step.done
    await seat.delete_async()
    return rewards, done


async def test_seats_move_in_turn_and_earn_opposite_rewards() -> None:
    shared = table()
    first, second = await asyncio.gather(
        play(shared, "first", ["0,0", "0,1", "0,2"]), play(shared, "second", ["1,0", "1,1"])
    )
    assert first == ([0.0, 0.0, 1.0], True)
    assert second == ([0.0, -1.0], True)
    assert shared.is_over
    assert not shared.failure


async def test_each_seat_sees_the_board_when_it_moves() -> None:
    shared = table()
    first = await shared.sit_down("first")
    assert "X to move" in first.observation.messages[0]["content"]
    moving = asyncio.create_task(first.step_async("1,1"))
    second = await shared.sit_down("second")
    assert ".X." in second.observation.messages[0]["content"]
    assert not moving.done()
    await shared.give_up("second")
    with pytest.raises(GameOverError):
        await moving


async def test_a_seat_that_leaves_ends_the_game_for_the_one_that_waits() -> None:
    shared = table()
    waiting = asyncio.create_task(shared.sit_down("second"))
    seat = await shared.sit_down("first")
    await seat.delete_async()
    with pytest.raises(GameOverError, match="first left the game before its end"):
        await waiting
    assert shared.failure


async def test_leaving_after_the_end_changes_nothing() -> None:
    shared = table()
    await asyncio.gather(play(shared, "first", ["nonsense"]), _sit(shared))
    assert shared.rewards == {"first": -1.0, "second": 1.0}
    await shared.give_up("second")
    assert not shared.failure


async def test_a_move_out_of_turn_is_refused() -> None:
    shared = table()
    with pytest.raises(ValueError, match="it is not second's turn"):
        await shared.move("second", "0,0")


async def _sit(shared: SharedTable) -> None:
    with pytest.raises(GameOverError, match="over before second moves"):
        await shared.sit_down("second")
