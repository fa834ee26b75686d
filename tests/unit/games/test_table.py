from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.fakes.table_games import Nim, Pennies

from tinsmith.games import GomokuGame, GomokuPlayer, GomokuRules, sit_down


class Taking:
    """Answers with texts in turn."""

    def __init__(self, *texts: str | Exception) -> None:
        self._texts = list(texts)
        self.seats: list[str] = []

    async def choose_move(self, _game: Any, agent: str) -> str:
        self.seats.append(agent)
        text = self._texts.pop(0)
        if isinstance(text, Exception):
            raise text
        return text


async def test_the_others_move_until_it_is_the_agents_turn() -> None:
    other = Taking("3", "1")
    table = await sit_down(Nim(("me", "you"), 8, first=1), "me", {"you": other})

    assert table.observation.messages == [{"role": "user", "content": "5 stones"}]
    first = await table.step_async("1")
    assert (first.reward, first.done) == (0.0, False)
    assert first.observation.messages == [{"role": "user", "content": "3 stones"}]
    last = await table.step_async("3")
    assert (last.reward, last.done) == (1.0, True)
    assert last.info == {"turn": 4}
    assert other.seats == ["you", "you"]


async def test_a_game_that_another_agent_ends_is_paid_at_once() -> None:
    table = await sit_down(Nim(("me", "you"), 4), "me", {"you": Taking("3")})

    result = await table.step_async("1")

    assert (result.reward, result.done) == (-1.0, True)


async def test_moves_at_once_are_applied_together_and_paid_as_they_fall() -> None:
    game = Pennies(("me", "you"), 3)
    table = await sit_down(game, "me", {"you": Taking("h", "t", "h")})

    rewards = [(await table.step_async("h")).reward for _ in range(3)]

    assert rewards == [1.0, -1.0, 1.0]
    assert game.seen == [{"me": "h", "you": side} for side in "hth"]


async def test_several_opponents_have_seats_of_their_own() -> None:
    players = {"b": Taking("1"), "c": Taking("1")}
    table = await sit_down(Nim(("a", "b", "c"), 4), "a", players)

    await table.step_async("1")

    assert table.observation.messages[0]["content"] == "4 stones"
    assert [player.seats for player in players.values()] == [["b"], ["c"]]


async def test_an_opponent_that_fails_is_an_error_and_no_victory() -> None:
    table = await sit_down(
        Nim(("me", "you"), 7), "me", {"you": Taking(ConnectionError("sampler is gone"))}
    )

    with pytest.raises(ConnectionError, match="sampler is gone"):
        await table.step_async("1")


async def test_a_game_that_ends_before_the_agents_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="over before me moves"):
        await sit_down(Nim(("me", "you"), 2, first=1), "me", {"you": Taking("2")})


@pytest.mark.parametrize("seat", ["black", "white"])
async def test_a_whole_game_of_scripts_is_worth_what_the_game_says(seat: str) -> None:
    rewards: Mapping[str, float] = {}
    other = "white" if seat == "black" else "black"
    for seed in range(5):
        game = GomokuGame(("black", "white"), GomokuRules(5, 4))
        table = await sit_down(game, seat, {other: GomokuPlayer("random", seed=seed)})
        mine = GomokuPlayer("search", seed=seed)
        total, done = 0.0, False
        while not done:
            result = await table.step_async(await mine.choose_move(game, seat))
            total, done = total + result.reward, result.done
        rewards = game.rewards
        assert total == rewards[seat]
        await table.delete_async()
