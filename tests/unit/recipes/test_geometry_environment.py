"""Geometry as an environment: one turn, or several with a calculator; and data sets of pictures."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tinsmith.environments.environment import Action, InvalidSettingError
from tinsmith.environments.local import create_local_instance
from tinsmith.errors import ConfigurationError
from tinsmith.recipes.tasks.arithmetic import MathFormatError
from tinsmith.recipes.tasks.calculator import calculate
from tinsmith.recipes.tasks.figures import Figure, draw
from tinsmith.recipes.tasks.geometry import draw_problem
from tinsmith.recipes.tasks.geometry_environment import GeometryEnvironment
from tinsmith.recipes.tasks.geometry_tasks import load_geometry, write_call
from tinsmith.recipes.tasks.public_data import load_pictures, read_rows
from tinsmith.recipes.tasks.rl_problems import load_problems
from tinsmith.text.tool_notations import ToolCall

CONFIG = GeometryEnvironment.default_config


def asked(seed: int, **config: object) -> GeometryEnvironment:
    environment = GeometryEnvironment()
    environment.reset(seed, {**CONFIG, **config})  # type: ignore[dict-item]
    return environment


def call(expression: str, name: str = "calculator") -> Action:
    arguments = json.dumps({"expression": expression})
    return Action(text="", tool_calls=(ToolCall(name, arguments, "call_0"),))


@given(st.integers(0, 10**6), st.sampled_from(["train", "validation"]))
def test_the_answer_of_a_figure_earns_one_and_another_nothing(seed: int, split: str) -> None:
    problem = draw_problem(seed, is_validation=split == "validation")
    right = calculate(problem.expression)
    for answer, reward in ((right, 1.0), (f"{right}1", 0.0), ("I do not know", -0.1)):
        step = asked(seed, split=split).step(Action(text=answer))
        assert step.done
        assert step.reward == pytest.approx(reward)
        assert step.info["is_success"] is (answer == right)


def test_a_figure_is_shown_before_its_question() -> None:
    environment = GeometryEnvironment()
    shown = environment.reset(3, {**CONFIG, "instruction": "Say a number."})
    problem = draw_problem(3, is_validation=False)
    [message] = shown.messages
    assert message.content == [
        {"type": "image"},
        {"type": "text", "text": f"{problem.question}\nSay a number."},
    ]
    assert shown.images[0].data == draw(problem.figure)
    assert not shown.tools


def test_a_calculator_answers_and_the_episode_goes_on() -> None:
    environment = GeometryEnvironment()
    shown = environment.reset(3, {**CONFIG, "calculator": True})
    assert [tool.name for tool in shown.tools] == ["calculator"]
    step = environment.step(call("3*4/2"))
    assert (step.reward, step.done) == (0.0, False)
    [answer] = step.observation.messages
    assert (answer.role, answer.content, answer.tool_call_id) == ("tool", "6", "call_0")
    right = calculate(draw_problem(3, is_validation=False).expression)
    end = environment.step(Action(text=right))
    assert (end.reward, end.done) == (1.0, True)
    assert end.info["metrics"] == {"is_formatted": 1.0, "calls": 1.0, "failed_calls": 0.0}


@pytest.mark.parametrize("action", [call("1/0"), call("2*3", name="abacus"), call("x")])
def test_a_call_that_cannot_be_computed_costs_at_once(action: Action) -> None:
    step = asked(3, calculator=True).step(action)
    assert step.reward == pytest.approx(-0.1)
    assert not step.done
    assert str(step.observation.messages[0].content).startswith("error: ")


def test_a_model_that_only_calls_comes_to_an_end() -> None:
    environment = asked(3, calculator=True, max_calls=2)
    assert not environment.step(call("1")).done
    assert not environment.step(call("1")).done
    end = environment.step(call("1"))
    assert end.done
    assert end.reward == pytest.approx(-0.1)
    assert end.info["is_success"] is False


@pytest.mark.parametrize(
    "config", [{"split": "test"}, {"format_coef": 2.0}, {"max_calls": 0}, {"instruction": 1}]
)
def test_settings_that_cannot_be_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(InvalidSettingError):
        asked(1, **config)


def test_an_environment_runs_inside_the_client_with_its_defaults() -> None:
    async def play() -> float:
        instance = await create_local_instance(
            GeometryEnvironment, seed=3, config={"calculator": True}
        )
        assert instance.observation.tools[0]["function"]["name"] == "calculator"
        assert instance.observation.messages[0]["content"][0] == {"type": "image"}
        step = await instance.step_async(call("1+1"))
        assert step.observation.messages[0]["content"] == "2"
        end = await instance.step_async("no number")
        await instance.delete_async()
        assert end.done
        return end.reward

    assert asyncio.run(play()) == pytest.approx(-0.1)
    with pytest.raises(InvalidSettingError, match="colour is not known"):
        asyncio.run(create_local_instance(GeometryEnvironment, config={"colour": 1}))


@given(st.integers(0, 10**6), st.booleans())
def test_the_pupil_answers_what_it_computed(seed: int, calculator: bool) -> None:
    tasks = load_geometry("geometry", calculator=calculator, format_coef=0.1, instruction="")
    assert tasks is not None
    turns = tasks.demonstrate(seed, "0")
    problem = draw_problem(seed, is_validation=False)
    assert turns[-1] in {calculate(problem.expression), calculate(problem.hasty_expression)}
    if calculator:
        assert turns[0] in {
            write_call(problem.expression),
            write_call(problem.hasty_expression),
        }


def write_pictures(folder: Path, part: str, answers: list[str]) -> None:
    (folder / "a.png").write_bytes(draw(Figure("rectangle", 3, 4)))
    rows = [
        {"images": ["a.png"], "problem": "<image>Find the area.", "answer": answer}
        for answer in answers
    ]
    (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_folder_in_the_layout_of_geometry3k_is_read(tmp_path: Path) -> None:
    write_pictures(tmp_path, "train", ["12", "2\\sqrt{3}", "7"])
    write_pictures(tmp_path, "test", ["12"])
    problems = load_pictures(str(tmp_path))
    assert problems is not None
    # An answer that is no number cannot be compared, and is left out.
    assert [each.record.final_answer for each in problems["train"]] == ["12", "7"]
    [held_out] = problems["validation"]
    assert held_out.question == "Find the area."
    assert Image.open(io.BytesIO(held_out.images[0].data)).size == (84, 84)
    tasks = load_geometry(str(tmp_path), calculator=False, format_coef=0.1, instruction="")
    assert tasks is not None
    with pytest.raises(ConfigurationError, match="num_imitation_steps=0"):
        tasks.demonstrate(0, "0")


def test_a_folder_in_the_layout_of_gsm8k_is_read(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1?", "answer": f"It is.\n#### {n + 1}"} for n in range(10)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_pictures(str(tmp_path)) is None
    problems = load_problems(str(tmp_path))
    assert (len(problems.train), len(problems.validation)) == (8, 2)
    assert problems.demonstrate(problems.train[0], 0).endswith("#### 2")


def test_what_datasets_saved_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"question": ["1+1?", "2+2?"], "answer": ["#### 2", "#### 4"]}
    saved = datasets.DatasetDict(
        {"train": datasets.Dataset.from_dict(rows), "test": datasets.Dataset.from_dict(rows)}
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    found = read_rows(str(tmp_path / "saved"))
    assert [row["question"] for row in found["validation"]] == ["1+1?", "2+2?"]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "too few rows"),
        ([{"images": ["b.png"], "problem": "?", "answer": "1"}] * 2, "b.png cannot be read"),
        ([{"images": ["c.gif"], "problem": "?", "answer": "1"}] * 2, "neither PNG nor JPEG"),
        ([{"images": ["a.png"], "problem": "?", "answer": "x"}] * 2, "no answer of .* is a number"),
        ([{"images": ["a.png"], "answer": "1"}] * 2, "needs an image and a question"),
    ],
)
def test_rows_that_are_no_problems_are_named(
    tmp_path: Path, rows: list[dict[str, object]], problem: str
) -> None:
    write_pictures(tmp_path, "test", ["12"])
    (tmp_path / "c.gif").write_bytes(b"GIF89a")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises((ConfigurationError, MathFormatError), match=problem):
        load_pictures(str(tmp_path))


def test_a_folder_without_a_part_to_train_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no train"):
        read_rows(str(tmp_path))
