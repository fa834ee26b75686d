from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.fakes.table_games import Nim
from tests.unit.rollouts.fakes import CharTokenizer, ScriptedSampler

from tinsmith.games import sit_down
from tinsmith.rollouts import PolicyPlayer, RolloutRunner
from tinsmith.types import SamplingParams

TOKENIZER = CharTokenizer()


async def test_an_opponent_reads_what_it_read_as_the_learner() -> None:
    answers = ["1<|im_end|>", "2<|im_end|>"]
    learning = ScriptedSampler(answers, tokenizer=TOKENIZER)
    playing = ScriptedSampler(answers, tokenizer=TOKENIZER)
    opponent = PolicyPlayer(TOKENIZER, playing, SamplingParams(max_tokens=8))

    # The same game twice, seen from the same seat: once trained on, once not.
    trajectory = await RolloutRunner(TOKENIZER, learning).run(
        lambda: sit_down(Nim(("me", "you"), 7), "me", {"you": Script("2", "2")})
    )
    table = await sit_down(Nim(("policy", "script"), 7), "script", {"policy": opponent})
    await table.step_async("2")
    last = await table.step_async("2")

    assert trajectory.reward == -1.0
    assert last.reward == 1.0
    assert playing.prompts == learning.prompts
    assert len(playing.prompts) == 2


class Script:
    def __init__(self, *moves: str) -> None:
        self._moves = list(moves)

    async def choose_move(self, _game: Nim, _agent: str) -> str:
        return self._moves.pop(0)


async def test_each_game_and_turn_draws_by_a_seed_of_its_own() -> None:
    seeds = []
    for key in ("a", "b", "a"):
        sampler = ScriptedSampler(["1<|im_end|>", "1<|im_end|>"], tokenizer=TOKENIZER)
        params = SamplingParams(max_tokens=8, seed=7)
        player = PolicyPlayer(TOKENIZER, sampler, params, game_key=key)
        game = Nim(("you", "me"), 7)
        await player.choose_move(game, "you")
        await player.choose_move(game, "you")
        seeds.append([params.seed for params in sampler.params])

    assert seeds[0] == seeds[2]
    assert len({*seeds[0], *seeds[1]}) == 4


async def test_what_a_sampler_raises_reaches_the_table() -> None:
    sampler = ScriptedSampler([ConnectionError("gone")], tokenizer=TOKENIZER)

    with pytest.raises(ConnectionError, match="gone"):
        await PolicyPlayer(TOKENIZER, sampler).choose_move(Nim(("you", "me")), "you")


async def test_a_turn_ends_where_the_game_says() -> None:
    class Lines(Nim):
        def observe(self, agent: str) -> Any:
            return dataclasses.replace(super().observe(agent), stop=("\n",))

    sampler = ScriptedSampler(["1\n"], tokenizer=TOKENIZER, stops="\n")
    player = PolicyPlayer(TOKENIZER, sampler, SamplingParams(max_tokens=8))
    assert await player.choose_move(Lines(("you", "me"), 7), "you") == "1\n"
    assert sampler.params[0].stop == ["\n"]
