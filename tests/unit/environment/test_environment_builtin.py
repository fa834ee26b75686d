from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.recipes.tasks.arithmetic import make_split
from tinsmith_environment import Action, InvalidActionError, InvalidSettingError
from tinsmith_environment.builtin.guessing import GuessingEnvironment, parse_guess
from tinsmith_environment.builtin.math import MathEnvironment


def math(seed: int = 0, path: str = "", **config: Any) -> tuple[MathEnvironment, str]:
    environment = MathEnvironment(path)
    observation = environment.reset(seed, {**MathEnvironment.default_config, **config})
    return environment, observation.messages[0].content


def guessing(seed: int = 0, **config: Any) -> GuessingEnvironment:
    environment = GuessingEnvironment()
    environment.reset(seed, {**GuessingEnvironment.default_config, **config})
    return environment


@pytest.mark.parametrize(
    ("answer", "reward", "parsed"),
    [
        pytest.param("12", 1.0, "12", id="right"),
        pytest.param("It is so.\n#### 12", 1.0, "12", id="marked"),
        pytest.param("13", 0.0, "13", id="wrong"),
        pytest.param("perhaps 12 or 13", 0.0, None, id="unreadable"),
        pytest.param("", 0.0, None, id="empty"),
        pytest.param("#### ", 0.0, None, id="mark-alone"),
    ],
)
def test_math_scores_the_final_number(answer: str, reward: float, parsed: str | None) -> None:
    environment, question = math(question="5+7=", answer="12")
    result = environment.step(Action(text=answer))
    assert question == "5+7="
    assert (result.reward, result.done) == (reward, True)
    assert result.info["parsed_answer"] == parsed
    assert ("parse_error" in result.info) == (parsed is None)


def test_math_draws_problems_by_seed() -> None:
    split = make_split()
    assert math(seed=3)[1] == split.train[3].question
    assert math(seed=3, split="validation")[1] == split.validation[3].question
    assert math(seed=len(split.validation), split="validation")[1] == split.validation[0].question


def test_math_reads_the_operators_file(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"q{i}", "answer": f"because\n#### 1,0{i}0.0"} for i in range(2)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    environment, question = math(seed=5, path=str(path))
    assert question == "q1"
    assert environment.step(Action(text="1010")).reward == 1.0


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        pytest.param({"question": "q"}, "answer", id="no-answer"),
        pytest.param({"answer": "1"}, "question", id="no-question"),
        pytest.param({"question": "q", "answer": "many"}, "answer", id="no-number"),
        pytest.param({"question": 1, "answer": "1"}, "question", id="not-text"),
        pytest.param({"split": "test"}, "split", id="unknown-split"),
    ],
)
def test_math_names_the_wrong_setting(config: dict[str, Any], setting: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        math(**config)
    assert caught.value.setting == setting


def test_guessing_by_bisection_wins() -> None:
    environment = guessing(seed=11, max_turns=7, shaping=0.5)
    low, high, total = 1, 100, 0.0
    for _ in range(7):
        guess = (low + high) // 2
        result = environment.step(Action(text=f"I say {guess}!"))
        total += result.reward
        if result.done:
            break
        if result.observation.messages[0].content == "higher":
            low = guess + 1
        else:
            high = guess - 1
    assert result.info["correct"] is True
    assert result.reward == 1.0
    assert 1.0 < total <= 1.5


def test_guessing_ends_after_max_turns() -> None:
    environment = guessing(max_turns=2)
    assert environment.step(Action(text="no idea")).done is False
    result = environment.step(Action(text="none"))
    assert (result.done, result.reward) == (True, 0.0)
    assert result.observation.messages == ()


def test_a_wrong_guess_earns_the_share_of_the_numbers_that_it_rules_out() -> None:
    # The secret of seed 1 is 3.
    environment = guessing(1, low=1, high=10, shaping=0.5)
    replies = ["1", "1", "9", "99", "5", "no idea"]
    results = [environment.step(Action(text=reply)) for reply in replies]
    said = [result.observation.messages[0].content for result in results[:5]]
    assert said == ["higher", "higher", "lower", "lower", "lower"]
    wanted = [0.5 * ruled_out / 10 for ruled_out in (1, 0, 2, 0, 4, 0)]
    assert [result.reward for result in results] == wanted


@given(st.text(), st.integers(0, 2**64 - 1))
def test_guessing_takes_any_text(text: str, seed: int) -> None:
    result = guessing(seed, shaping=1.0).step(Action(text=text))
    assert 0.0 <= result.reward <= 1.0


@given(st.text())
def test_math_takes_any_text(text: str) -> None:
    environment, _ = math(question="q", answer="7")
    assert environment.step(Action(text=text)).reward in (0.0, 1.0)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        pytest.param("42", 42, id="plain"),
        pytest.param("first 3 then -4.", -4, id="last"),
        pytest.param("9" * 5000, None, id="endless"),
        pytest.param("1.5", None, id="fraction"),
        pytest.param("٤", None, id="other-digits"),
    ],
)
def test_parse_guess(text: str, guess: int | None) -> None:
    assert parse_guess(text) == guess


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        pytest.param({"low": 5, "high": 5}, "high", id="empty-range"),
        pytest.param({"max_turns": 0}, "max_turns", id="no-turns"),
        pytest.param({"max_turns": 1.5}, "max_turns", id="fraction"),
        pytest.param({"shaping": 2}, "shaping", id="shaping"),
        pytest.param({"low": "a"}, "low", id="text"),
        pytest.param({"low": True}, "low", id="bool"),
    ],
)
def test_guessing_names_the_wrong_setting(config: dict[str, Any], setting: str) -> None:
    with pytest.raises(InvalidSettingError) as caught:
        guessing(**config)
    assert caught.value.setting == setting


def test_tokens_are_no_answer() -> None:
    with pytest.raises(InvalidActionError):
        guessing().step(Action(tokens=(1,)))
