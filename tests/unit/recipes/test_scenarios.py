"""Scenarios: each is a recipe with settings that it takes, and data that it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.cli import main as command
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.scenarios.table import SCENARIOS, configure
from tinsmith.recipes.tasks import arithmetic, small_sums
from tinsmith.recipes.tasks.agent_games import check_script, load_game
from tinsmith.recipes.tasks.rl_problems import load_problems
from tinsmith_local.made_models import MADE_MODELS


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_a_recipe_with_settings_that_it_takes(name: str) -> None:
    module, config = configure([f"name={name}"])
    assert callable(module.main)
    for setting, value in SCENARIOS[name].settings.items():
        assert getattr(config, setting) == value, setting
    assert config.base_model in MADE_MODELS
    assert 0 < config.num_imitation_steps < config.num_steps


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith("gomoku")])
def test_a_scenario_of_games_names_scripts_that_its_game_has(name: str) -> None:
    _, config = configure([f"name={name}"])
    game = load_game(config.data, board_size=config.board_size, row_length=config.row_length)
    check_script(game, "teacher", config.teacher)
    check_script(game, "validation_opponent", config.validation_opponent)
    whole = configure([f"name={name}", "board_size=9", "row_length=5"])[1]
    assert load_game("gomoku", board_size=whole.board_size, row_length=whole.row_length)


def test_words_win_over_a_file_and_a_file_over_the_scenario(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("num_steps = 120\nseed = 7\n")
    _, config = configure(["name=math", "seed=9", "base_model=mine"], file)
    assert (config.num_steps, config.seed, config.base_model) == (120, 9, "mine")
    assert config.data == "small_sums"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["num_steps=3"], "no scenario is named"),
        (["name=chess"], "there is no scenario 'chess'"),
        (["name=math", "board_size=3"], "there is no setting board_size"),
        (["name=math", "format_coef=2"], "format_coef is 2.0"),
    ],
)
def test_what_no_scenario_is_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        configure(words)


def test_the_command_lists_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["run", "scenario"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert all(name in printed for name in SCENARIOS)


def test_small_sums_are_split_by_unordered_pairs_and_nothing_is_carried() -> None:
    split = small_sums.make_small_split()
    parts = [split.warm_start, split.train, split.validation]
    pairs = [
        {frozenset(map(int, record.question.removesuffix("=").split("+"))) for record in part}
        for part in parts
    ]
    assert sum(len(part) for part in parts) == 400
    assert len(set.union(*pairs)) == sum(map(len, pairs))
    for part in parts:
        for record in part:
            left, right = map(int, record.question.removesuffix("=").split("+"))
            assert left % 10 + right % 10 < 10
            assert record.final_answer == str(left + right)


def test_the_lazy_pupil_copies_units_as_often_as_it_says() -> None:
    problems = load_problems("small_sums")
    [record] = [each for each in problems.warm_start if each.question.endswith("4=")][:1]
    left, right = map(int, record.question.removesuffix("=").split("+"))
    told = [problems.demonstrate(record, occurrence) for occurrence in range(400)]
    assert set(told) == {str(left + right), str(left + right - right % 10)}
    share = told.count(str(left + right - right % 10)) / len(told)
    assert abs(share - small_sums.COPIES_UNITS_FRACTION) < 0.1


@given(st.one_of(st.none(), st.text(max_size=12), st.integers(0, 200).map(str)), st.floats(0, 1))
def test_the_reward_is_that_of_the_cookbook(answer: str | None, format_coef: float) -> None:
    record = arithmetic.make_addition(20, 22)
    earned = arithmetic.format_reward(record, answer, format_coef)
    is_right = arithmetic.is_right(record, answer)
    is_formatted = arithmetic.is_formatted(answer)
    assert earned == is_right + format_coef * (is_formatted - 1)
    assert -format_coef <= earned <= 1.0
    # What is right has a form: a right answer is never punished.
    assert is_formatted or not is_right


def test_an_instruction_stands_below_each_question() -> None:
    problems = load_problems("small_sums", instruction="Say the number.")
    [message] = problems.prompt(problems.train[0])
    assert message["content"] == f"{problems.train[0].question}\nSay the number."
