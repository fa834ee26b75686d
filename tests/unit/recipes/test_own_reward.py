"""A reward function is found by one word, and rewards the answers to prompts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.recipes import rl
from tinsmith.recipes.tasks.own_reward import RewardedPrompts, judged_by, load_reward

CODE = """
def score(row, completion):
    return float(completion == row["answer"])

def wrong(row, completion):
    return "1"
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    file = tmp_path / "my.py"
    file.write_text(CODE)
    return file


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    rows = [{"prompt": f"say {number}", "answer": str(number)} for number in range(10)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def play(tasks: Any, seed: int, answer: str, *, is_validation: bool = False) -> tuple[str, float]:
    """Return what was asked, and what the answer earned."""

    async def run() -> tuple[str, float]:
        instance = await tasks.create_instance(seed, is_validation=is_validation)
        result = await instance.step_async(answer)
        assert result.done
        await instance.delete_async()
        return str(instance.observation.messages[0]["content"]), result.reward

    return asyncio.run(run())


def test_a_function_rewards_the_answers_to_prompts_of_a_file(code: Path, data: Path) -> None:
    tasks = RewardedPrompts(str(data), load_reward(f"{code}:score"))
    asked = {play(tasks, seed, "3")[0]: play(tasks, seed, "3")[1] for seed in range(8)}
    # Every fifth row is held out; the others are played before one is played again.
    assert sorted(asked) == [f"say {number}" for number in (1, 2, 3, 4, 6, 7, 8, 9)]
    assert [prompt for prompt, reward in asked.items() if reward] == ["say 3"]
    assert play(tasks, 1, "5", is_validation=True) == ("say 5", 1.0)


def test_a_reward_that_is_no_number_loses_the_episode(code: Path, data: Path) -> None:
    tasks = RewardedPrompts(str(data), load_reward(f"{code}:wrong"))
    with pytest.raises(TypeError, match="the reward is '1', which is no finite number"):
        play(tasks, 0, "x")


def test_one_row_is_too_few(code: Path, data: Path) -> None:
    data.write_text('{"prompt": "alone"}')
    with pytest.raises(ConfigurationError, match="needs at least 2 rows"):
        RewardedPrompts(str(data), load_reward(f"{code}:score"))


class Asked:
    """A judge that keeps what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, str, str]] = []

    def score(self, messages: Any, answer: str, *, reference: str = "") -> float:
        """Return the same for all."""
        self.calls.append((messages, answer, reference))
        return 0.3


def test_a_judge_reads_the_prompt_the_answer_and_that_of_the_row(data: Path) -> None:
    judge: Any = Asked()
    asked, reward = play(RewardedPrompts(str(data), judged_by(judge)), 5, "x", is_validation=True)
    number = asked.removeprefix("say ")
    assert reward == 0.3
    assert judge.calls == [([{"role": "user", "content": asked}], "x", number)]


class Served:
    """A client that serves a model, and no environment."""

    def get_tokenizer(self, name: str) -> None:
        """Return nothing: no text is read before settings are refused."""

    def list_models(self) -> list[Any]:
        """Return the model."""
        return [type("Model", (), {"base_model": "tiny"})]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward": "a.py:b", "environment": "guessing"}, "both given"),
        ({"reward": "a.py:b", "rollouts": "server"}, "not played on the server"),
        ({"environment": "a.py:B", "num_imitation_steps": 1}, "no pupil to imitate"),
        ({"judge": "tiny", "num_imitation_steps": 1}, "no pupil to imitate"),
        ({"judge": "tiny", "environment": "guessing"}, "judge and environment are both given"),
        ({"judge": "tiny", "rollouts": "server"}, "a judge .* not played on the server"),
        ({"judge": "tiny", "reward": "a.py:b"}, "reward and judge are both given"),
        ({"judge_instruction": "Be brief."}, "belongs to judge="),
    ],
)
def test_settings_that_contradict_a_reward_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    client: Any = Served()
    with pytest.raises(ConfigurationError, match=message):
        rl.main(rl.Config(**settings), client)
