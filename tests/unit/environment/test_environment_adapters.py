"""Environments of Gymnasium and games of PettingZoo, played as ours."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gym_spaces
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.pettingzoo_games import Matching, Nim
from tests.fakes.pictures import picture

from tinsmith.environments.adapters import spaces
from tinsmith.environments.adapters.gymnasium import GymnasiumEnvironment
from tinsmith.environments.environment import Action
from tinsmith.environments.local import create_local_instance
from tinsmith.errors import ConfigurationError
from tinsmith.games import sit_down
from tinsmith.games.pettingzoo import PettingZooGame
from tinsmith.images import ImageChunk


def frozen_lake(**settings: Any) -> GymnasiumEnvironment:
    return GymnasiumEnvironment("FrozenLake-v1", is_slippery=False, **settings)


def test_an_episode_is_played_to_the_goal() -> None:
    environment = frozen_lake(instruction="Reach the goal.")
    first = environment.reset(0, {"options": {}})
    assert first.messages[0].content == (
        "Reach the goal.\nAnswer with a whole number from 0 to 3.\n0"
    )
    rewards = []
    for move in (2, 2, 1, 1, 1, 2):
        result = environment.step(Action(text=f"I go {move}"))
        rewards.append(result.reward)
    environment.close()
    assert (sum(rewards), result.done, result.info["terminated"]) == (1.0, True, True)
    assert result.observation.messages == ()


def test_the_same_seed_gives_the_same_episode() -> None:
    shown = []
    for seed in (1, 1, 2):
        environment = GymnasiumEnvironment("CartPole-v1")
        first = environment.reset(seed, {})
        step = environment.step(Action(text="1"))
        shown.append((first, step.observation, step.reward))
    assert shown[0] == shown[1] != shown[2]


def test_a_text_without_an_action_leaves_the_episode_as_it_is() -> None:
    environment = frozen_lake(invalid_reward=-0.5)
    environment.reset(0, {})
    for text in ("hm", "9", "1.5"):
        result = environment.step(Action(text=text))
        assert (result.reward, result.done) == (-0.5, False)
        assert "a whole number from 0 to 3" in str(result.observation.messages[0].content)
    assert environment.step(Action(text="2")).observation.messages[0].content == "1"


def test_a_render_may_show_images_and_a_parse_may_read_words() -> None:
    image = picture(28, 28)
    environment = frozen_lake(
        render=lambda _env, seen: [image, {"type": "text", "text": f"field {seen}"}],
        parse=lambda text, _env: ["left", "down", "right", "up"].index(text),
        instruction="Go.",
    )
    first = environment.reset(0, {})
    assert first.images == (image,)
    assert isinstance(first.images[0], ImageChunk)
    assert [part["text"] for part in first.messages[0].content] == ["Go.", "field 0"]  # type: ignore[index]
    assert environment.step(Action(text="right")).info["prob"] == 1.0
    assert "invalid_action" in environment.step(Action(text="jump")).info


async def test_a_subclass_needs_no_arguments_and_plays_in_the_client() -> None:
    class Taxi(GymnasiumEnvironment):
        env_id = "Taxi-v4"

    instance = await create_local_instance(Taxi, seed=3)
    outcome = await instance.step_async("0")
    assert (outcome.reward, outcome.done) == (-1.0, False)
    assert isinstance(outcome.info["action_mask"], list)
    await instance.delete_async()


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        pytest.param("Nothing-v0", "makes no environment Nothing-v0", id="unknown"),
        pytest.param(None, "no environment of Gymnasium is named", id="none"),
    ],
)
def test_what_gymnasium_lacks_is_said(env: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        GymnasiumEnvironment(env)


@pytest.mark.parametrize(
    "space",
    [
        gym_spaces.Discrete(4, start=-1),
        gym_spaces.MultiDiscrete([3, 4]),
        gym_spaces.MultiBinary(3),
        gym_spaces.Box(-1.0, 1.0, (2, 2)),
    ],
    ids=lambda space: type(space).__name__,
)
@given(seed=st.integers(0, 10_000), before=st.sampled_from(("", "12 and 7, so ", "x=3.5: ")))
def test_an_action_that_is_written_is_read_again(
    space: gymnasium.Space[Any], seed: int, before: str
) -> None:
    space.seed(seed)
    action = space.sample()
    written = ", ".join(repr(float(each)) for each in np.ravel(action))
    found = spaces.read(before + written, space)
    assert space.contains(found)
    np.testing.assert_array_equal(found, action)


def test_a_space_that_no_text_is_read_into_is_refused() -> None:
    space = gym_spaces.Dict({"a": gym_spaces.Discrete(2)})
    with pytest.raises(TypeError, match="give a `parse`"):
        spaces.read("1", space)
    with pytest.raises(ValueError, match="give a `render`"):
        spaces.show(np.zeros((40, 40)))


def test_agents_move_in_turn_and_the_last_stone_wins() -> None:
    game = PettingZooGame(Nim(), ("black", "white"))
    assert game.next_agents == ("black",)
    [message] = game.observe("black").messages
    assert message["content"] == (
        "stones: 4\nlegal: 1, 2, 3\nAnswer with a whole number from 1 to 3."
    )
    assert not game.observe("white").messages
    game.apply({"black": "I take 3"})
    assert game.next_agents == ("white",)
    assert "legal: 1" in str(game.observe("white").messages[0]["content"])
    game.apply({"white": "1"})
    assert not game.next_agents
    assert game.rewards == {"black": -1.0, "white": 1.0}
    with pytest.raises(ValueError, match="move now"):
        game.apply({"black": "1"})


@pytest.mark.parametrize("text", ["none", "3", "7"])
def test_a_text_without_a_legal_move_forfeits_the_game(text: str) -> None:
    game = PettingZooGame(Nim(2), ("black", "white"))
    game.apply({"black": text})
    assert not game.next_agents
    assert game.forfeited_by == "black"
    assert game.rewards == {"black": -1.0, "white": 0.0}


@given(moves=st.lists(st.integers(1, 3), max_size=8), seed=st.integers(0, 5))
def test_the_same_moves_lead_every_copy_to_the_same_position(moves: list[int], seed: int) -> None:
    copies = [PettingZooGame(Nim(), seed=seed) for _ in range(2)]
    for move in moves:
        for game in copies:
            if game.next_agents:
                game.apply(dict.fromkeys(game.next_agents, str(move)))
        assert copies[0].next_agents == copies[1].next_agents
        assert copies[0].rewards == copies[1].rewards


def test_all_move_at_once_in_a_parallel_game() -> None:
    game = PettingZooGame(Matching())
    assert game.next_agents == ("a", "b")
    game.apply({"a": "0", "b": "0"})
    assert game.observe("b").messages[0]["content"] == "1\nAnswer with a whole number from 0 to 1."
    game.apply({"a": "0", "b": "1"})
    assert not game.next_agents
    assert game.rewards == {"a": 0.0, "b": 0.0}


def test_seats_are_as_many_as_agents() -> None:
    with pytest.raises(ValueError, match="no names of the 2 agents"):
        PettingZooGame(Nim(), ("black",))


class TakesOne:
    async def choose_move(self, game: Any, agent: str) -> str:
        return "1"


def test_a_table_of_ours_is_played_with_a_game_of_theirs() -> None:
    async def play() -> tuple[float, bool]:
        game = PettingZooGame(Nim(), ("black", "white"), seed=1)
        table = await sit_down(game, "black", {"white": TakesOne()})
        await table.step_async("1")
        result = await table.step_async("3")
        return result.reward, result.done

    assert asyncio.run(play()) == (1.0, True)


def test_arguments_reach_the_environment() -> None:
    make = partial(GymnasiumEnvironment, "FrozenLake-v1", map_name="8x8", is_slippery=False)
    environment = make()
    environment.reset(0, {})
    for _ in range(7):
        result = environment.step(Action(text="2"))
    assert result.observation.messages[0].content == "7"
