"""Inspect over the Tinker wire: the cookbook's own command, evaluator and model, unmodified.

The tiny model is served under the name of a model that the cookbook knows. It has random weights.
A checkpoint of it was taught to answer each word that it is asked for with `yes`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.clients.users import BIN, PROGRAMS, User
from tests.support.hugging_face_cache import fill_cache

from tinsmith_local.process import ServerProcess
from tinsmith_local.tiny_model import TinyModelConfig, build_tiny_model

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
RENDERER = "qwen3_instruct"
NUM_WORDS = 8
TASKS = "words_task.py"


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[User]:
    assert (BIN / "python").exists(), "run make venv-clients first"
    model_dir = build_tiny_model(
        tmp_path_factory.mktemp("model"), TinyModelConfig(num_layers=1, hidden_size=64)
    )
    folder = tmp_path_factory.mktemp("user")
    fill_cache(folder / ".cache" / "huggingface" / "hub", MODEL, model_dir)
    # Inspect takes the file of a task by its path below the folder that it runs in.
    shutil.copy(PROGRAMS / TASKS, folder)
    with ServerProcess(tmp_path_factory.mktemp("server"), {MODEL: model_dir}) as server:
        yield User(server, folder)


@pytest.fixture(scope="module")
def training(user: User) -> Path:
    """The log of a training whose evaluation is Inspect's."""
    return _train(user, RENDERER)


@pytest.fixture(scope="module")
def taught(training: Path) -> str:
    """The checkpoint that answers `yes`."""
    return _checkpoint(training)


def test_a_training_is_evaluated_on_the_way(training: Path) -> None:
    rows = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
    means = {row["step"]: row["words/mean"] for row in rows if "words/mean" in row}
    assert means == {0: 0.0, 20: 1.0}


def test_a_checkpoint_gets_the_scores_that_it_deserves(user: User, taught: str) -> None:
    alike, others = _evaluate(user, "taught", model_path=taught, temperature=0, num_choices=3)
    assert alike["task"] == "words"
    assert alike["metrics"] == {"mean": 1.0, "stderr": 0.0}
    assert others["task"] == "words_and_two_others"
    assert others["metrics"]["mean"] == 0.75
    assert alike["answers"] == others["answers"] == [["yes"] * 3] * NUM_WORDS


def test_the_base_model_has_none_of_them_and_a_seed_repeats_what_it_says(user: User) -> None:
    # Both tasks ask for the same words.
    logs = _evaluate(user, "base", model_name=MODEL, seed=7)
    assert [log["metrics"]["mean"] for log in logs] == [0.0, 0.0]
    assert logs[0]["answers"] == logs[1]["answers"]
    assert len({text for (text,) in logs[0]["answers"]}) == NUM_WORDS


def test_a_checkpoint_says_how_its_prompts_were_written(user: User) -> None:
    checkpoint = _checkpoint(_train(user, "role_colon"))
    # No renderer is named: the run tells it. Its answers end with a string, not with a token.
    task = {"tasks": f"{TASKS}@words", "temperature": 0, "max_tokens": 16}
    output = user.run(*_command("colon", model_path=checkpoint, **task))
    assert "Using renderer: role_colon" in output
    assert "words/mean: 1.0" in output


def test_a_checkpoint_judges_what_another_one_answers(user: User, taught: str) -> None:
    (told,) = user.run_program("words_judge", MODEL, taught, taught)
    assert (told["status"], told["accuracy"]) == ("success", 1.0)
    assert told["judgements"] == ["yes"] * NUM_WORDS


def test_a_checkpoint_that_is_not_there_ends_the_command_with_its_name(
    user: User, taught: str
) -> None:
    missing = f"{taught}-not"
    said = user.fail(*_command("missing", model_path=missing, renderer_name=RENDERER))
    assert "tinker.NotFoundError" in said
    assert f"{missing} does not exist" in said


def _train(user: User, renderer_name: str) -> Path:
    log = user.folder / f"training-{renderer_name}"
    user.run_program("words_training", MODEL, renderer_name, log)
    return log


def _checkpoint(training: Path) -> str:
    *_, last = (training / "checkpoints.jsonl").read_text().splitlines()
    return str(json.loads(last)["sampler_path"])


def _evaluate(user: User, log_dir: str, **arguments: object) -> list[dict[str, Any]]:
    """Run the cookbook's command with the tasks of a file; return what Inspect logged, by task."""
    user.run(*_command(log_dir, renderer_name=RENDERER, max_tokens=16, **arguments))
    logs = user.run_program("inspect_logs", log_dir)
    for log in logs:
        assert (log["status"], log["errors"]) == ("success", [])
        assert log["num_samples"] == NUM_WORDS
    return logs


def _command(log_dir: str, **arguments: object) -> list[str]:
    settings = {"tasks": TASKS, "log_dir": log_dir, **arguments}
    return [
        *(str(BIN / "python"), "-m", "tinker_cookbook.eval.run_inspect_evals"),
        *(f"{name}={value}" for name, value in settings.items()),
    ]
