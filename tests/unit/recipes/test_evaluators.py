"""Evaluators of the user's own: when they are called, what they return, and how they may fail."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.recipes import rl
from tinsmith.recipes.experiment.evaluators import Evaluators
from tinsmith.user_code import load_object

CODE = """
import sys
import threading

HELD = threading.Event()

def score(sampler):
    return len(sampler)

def several(sampler):
    return {"words": 2, "sum": 0.5}

def raises(sampler):
    raise KeyError("lost")

def ends(sampler):
    sys.exit(3)

def hangs(sampler):
    HELD.wait()
    return 1.0

def text(sampler):
    return "1"

def nothing(sampler):
    return None

def infinite(sampler):
    return {"a": 1.0, "b": float("inf")}

def strange(sampler):
    return {"two words": 1.0}

def many(sampler):
    return {str(number): 1.0 for number in range(17)}

NUMBER = 7
"""


class Run:
    """A run whose sampler is a text; it counts how often one is opened."""

    name = "run"
    num_opened = 0

    def sampler(self) -> Any:
        """Return a sampler of the live weights."""
        self.num_opened += 1
        return "live"


@pytest.fixture
def code(tmp_path: Path) -> str:
    file = tmp_path / "my_evaluators.py"
    file.write_text(CODE)
    return str(file)


def make(**settings: Any) -> Evaluators:
    return Evaluators(rl.Config(num_steps=10, **settings))


def test_they_are_called_as_often_as_the_settings_say(code: str) -> None:
    evaluators = make(
        evaluators=f"{code}:score",
        eval_every=2,
        rare_evaluators=f"{code}:several",
        rare_eval_every=5,
    )
    run: Any = Run()
    found = {
        step: evaluators.run(step, run, pytest.fail)
        for step in range(1, 11)
        if evaluators.are_due(step)
    }
    often = {"evaluator/score": 4.0}
    rare = {"evaluator/several/words": 2.0, "evaluator/several/sum": 0.5}
    assert found == {2: often, 4: often, 5: rare, 6: often, 8: often, 10: often | rare}
    assert run.num_opened == 1


def test_without_a_number_of_steps_they_are_called_at_the_end(code: str) -> None:
    evaluators = make(evaluators=f"{code}:score", rare_evaluators=f"{code}:several")
    assert [step for step in range(11) if evaluators.are_due(step)] == [10]
    assert not make()
    assert not make().are_due(10)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "KeyError: 'lost'"),
        ("ends", "SystemExit: 3"),
        ("text", "it returned '1', which is no finite number"),
        ("nothing", "it returned None, which is no finite number"),
        ("infinite", "it returned inf, which is no finite number"),
        ("strange", "'two words' is no name of a metric"),
        ("many", "it returned 17 numbers, and may return 16"),
    ],
)
def test_one_that_fails_is_told_by_its_name_and_others_go_on(
    code: str, name: str, why: str
) -> None:
    evaluators = make(evaluators=f"{code}:{name}, {code}:score", eval_every=1)
    said: list[str] = []
    run: Any = Run()
    assert evaluators.run(3, run, said.append) == {"evaluator/score": 4.0}
    assert said == [f"warning: evaluator {name} failed after step 3: {why}"]


def test_one_that_hangs_holds_up_a_bounded_time_once(code: str) -> None:
    evaluators = make(evaluators=f"{code}:hangs", eval_every=1, evaluator_timeout_s=0.01)
    said: list[str] = []
    run: Any = Run()
    assert evaluators.run(1, run, said.append) == {}
    # What has not ended is not called again beside itself.
    assert evaluators.run(2, run, said.append) == {}
    assert "it took over 0.01 s; raise evaluator_timeout_s" in said[0]
    assert "its last call has not ended" in said[1]
    [hung] = [each for each in threading.enumerate() if each.name == "evaluator hangs"]
    assert hung.daemon
    load_object(f"{code}:HELD", "evaluators").set()
    hung.join()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluators": "{code}:missing"}, "has no missing"),
        ({"evaluators": "score"}, r"evaluators is 'score'; write FILE\.py:NAME"),
        ({"rare_evaluators": "nofile.py:score"}, r"nofile\.py is not there"),
        ({"evaluators": "{code}:NUMBER"}, r"is no function; define score\(sampler\) -> float"),
        ({"evaluators": "{code}:score", "rare_evaluators": "{code}:score"}, "two evaluators are"),
        ({"rare_eval_every": -1}, "rare_eval_every is -1"),
        ({"evaluator_timeout_s": 0.0}, "evaluator_timeout_s is 0"),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_begins(
    code: str, settings: dict[str, Any], message: str
) -> None:
    given = {
        name: value.format(code=code) if isinstance(value, str) else value
        for name, value in settings.items()
    }
    with pytest.raises(ConfigurationError, match=message):
        make(**given)
