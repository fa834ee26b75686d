"""Games as recipes name them: our own and the user's, their scripts and their orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.recipes.scripted_sampler import ScriptedSampler
from tinsmith.recipes.tasks.agent_games import GAMES, choose_order, load_game
from tinsmith.types import ModelInput, SamplingParams

OWN = """
class Game:
    next_agents = rewards = observe = apply = None
    legal_moves = ("a", "b")
    max_turns = 3
    order = "fixed"

    def __init__(self, agents, seed):
        self.agents, self.seed = agents, seed

class Scripted(Game):
    scripts = {"mine": lambda seed: "a player"}

class Silent:
    next_agents = rewards = observe = apply = None
"""


def load(data: str) -> Any:
    return load_game(data, board_size=3, row_length=3)


@pytest.mark.parametrize("name", GAMES)
async def test_every_game_has_scripts_of_three_strengths(name: str) -> None:
    game = load(name)
    assert len(game.scripts) == 3
    for script in game.scripts:
        played = game.make_game(4)
        players = {agent: game.make_script(script, 7) for agent in played.next_agents or ()}
        turns = 0
        while agents := played.next_agents:
            for agent in agents:
                players.setdefault(agent, game.make_script(script, 8))
            played.apply({a: await players[a].choose_move(played, a) for a in agents})
            turns += 1
        assert sum(played.rewards.values()) == 0.0
        assert turns <= 2 * game.max_turns


async def test_a_game_of_the_users_own_is_named_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN, encoding="utf-8")
    game = load(f"{file}:Game")
    assert (game.name, game.scripts, game.max_turns, game.order) == (
        "Game",
        ("random",),
        3,
        "fixed",
    )
    made = game.seat(("x", "y"), 5)
    assert (made.agents, made.seed) == (("x", "y"), 5)
    player = game.make_script("random", 1)
    assert {await player.choose_move(made, "x") for _ in range(20)} == {"a", "b"}
    scripted = load(f"{file}:Scripted")
    assert scripted.scripts == ("random", "mine")
    assert scripted.make_script("mine", 1) == "a player"


@pytest.mark.parametrize(
    ("name", "problem"),
    [("Silent", "give it legal_moves, scripts"), ("OWN", "has no OWN")],
)
def test_a_class_that_is_no_game_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN, encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        load(f"{file}:{name}")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("game", "order", "chosen"),
    [
        ("kuhn", "", "rotating"),
        ("kuhn", "fixed", "fixed"),
        ("gomoku", "custom", "custom"),
        ("rock_paper_scissors", "", "simultaneous"),
        ("rock_paper_scissors", "simultaneous", "simultaneous"),
    ],
)
def test_the_order_is_the_settings_or_the_games(game: str, order: str, chosen: str) -> None:
    assert choose_order(load(game), order) == chosen


class Letters:
    """Writes a letter as a token."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]


async def test_a_script_that_says_more_than_the_model_may_is_told_so() -> None:
    async def say() -> str:
        return "scissors"

    tokenizer: Any = Letters()
    script = ScriptedSampler(tokenizer, say, (0,))
    prompt = ModelInput.from_ints([1])
    assert len((await script.sample_async(prompt, SamplingParams())).tokens) == 9
    with pytest.raises(ValueError, match="takes 9 tokens, and max_tokens is 6; raise max_tokens"):
        await script.sample_async(prompt, SamplingParams(max_tokens=6))
