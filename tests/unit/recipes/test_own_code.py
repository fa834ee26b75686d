"""A reward function and an environment class are found by one word, and play tasks by seed."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.recipes import rl
from tinsmith.recipes.tasks.own_code import OwnEnvironment, RewardedPrompts, load_object

CODE = """
from tinsmith.environments.environment import Environment, Observation, StepResult

def score(row, completion):
    return float(completion == row["answer"])

def wrong(row, completion):
    return "1"

class Echo(Environment):
    default_config = {"word": "a"}

    def reset(self, seed, config):
        self.word = config["word"] * (seed + 1)
        return Observation.of_user(self.word)

    def step(self, action):
        return StepResult(Observation(), float(action.text == self.word), done=True)
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
    tasks = RewardedPrompts(str(data), f"{code}:score")
    asked = {play(tasks, seed, "3")[0]: play(tasks, seed, "3")[1] for seed in range(8)}
    # Every fifth row is held out; the others are played before one is played again.
    assert sorted(asked) == [f"say {number}" for number in (1, 2, 3, 4, 6, 7, 8, 9)]
    assert [prompt for prompt, reward in asked.items() if reward] == ["say 3"]
    assert play(tasks, 1, "5", is_validation=True) == ("say 5", 1.0)


def test_a_reward_that_is_no_number_loses_the_episode(code: Path, data: Path) -> None:
    tasks = RewardedPrompts(str(data), f"{code}:wrong")
    with pytest.raises(TypeError, match="the reward is '1', which is no finite number"):
        play(tasks, 0, "x")


def test_a_class_is_played_with_its_settings(code: Path) -> None:
    tasks = OwnEnvironment(f"{code}:Echo", {}, {"word": "b"})
    assert play(tasks, 1, "aa") == ("aa", 1.0)
    assert play(tasks, 1, "aa", is_validation=True) == ("bb", 0.0)


def test_another_class_may_be_scored(code: Path) -> None:
    other = code.with_name("other.py")
    # A file may import its neighbour.
    other.write_text(f"import {code.stem}\n\nclass Loud({code.stem}.Echo):\n    pass\n")
    tasks = OwnEnvironment(
        f"{code}:Echo", {}, {"word": "b"}, validation_path=f"{other}:Loud", step_timeout_s=5
    )
    assert play(tasks, 1, "aa") == ("aa", 1.0)
    assert play(tasks, 1, "aa", is_validation=True) == ("bb", 0.0)


def test_a_neighbour_wins_over_an_installed_module_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("NAME = 'neighbour'\n")
    file = tmp_path / "reads.py"
    file.write_text("import colorsys\nNAME = colorsys.NAME\n")
    kept = sys.modules.pop("colorsys", None)
    try:
        assert load_object(f"{file}:NAME", "reward") == "neighbour"
    finally:
        sys.modules.pop("colorsys", None)
        if kept is not None:
            sys.modules["colorsys"] = kept


def test_a_module_of_the_current_folder_is_found(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code.with_name("nearby.py").write_text("WORD = 'found'\n")
    monkeypatch.chdir(code.parent)
    assert load_object("nearby:WORD", "reward") == "found"


def test_a_module_is_named_as_python_names_it() -> None:
    assert load_object("json:dumps", "reward") is json.dumps


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("score", r"reward is 'score'; write FILE\.py:NAME"),
        ("nofile.py:score", r"nofile\.py is not there"),
        ("{code}:nothing", r"my\.py has no nothing"),
        ("{broken}:score", r"broken\.py cannot be imported: ZeroDivisionError"),
        ("no.such.module:score", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_code_that_is_not_there_is_named(
    code: Path, tmp_path: Path, path: str, message: str
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(ConfigurationError, match=message):
        load_object(path.format(code=code, broken=broken), "reward")


def test_what_is_no_environment_is_refused(code: Path, data: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no environment; derive it from"):
        OwnEnvironment(f"{code}:score", {}, {})
    data.write_text('{"prompt": "alone"}')
    with pytest.raises(ConfigurationError, match="needs at least 2 rows"):
        RewardedPrompts(str(data), f"{code}:score")


class Served:
    """A client that serves a model."""

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
        ({"environment": "nofile.py:B"}, r"nofile\.py is not there"),
    ],
)
def test_settings_that_contradict_code_of_ones_own_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    client: Any = Served()
    with pytest.raises(ConfigurationError, match=message):
        rl.main(rl.Config(**settings), client)
