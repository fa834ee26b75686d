"""Paths of a job's data, as its author writes them and as its driver opens them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.jobs.data import find_data
from tinsmith.jobs.json_form import JobFormatError, parse_spec
from tinsmith.jobs.methods import BUILT_IN_DATA
from tinsmith.recipes.tasks import rl_problems, supervised_tasks
from tinsmith.recipes.tasks.agent_games import load_game
from tinsmith.recipes.tasks.episode_tasks import load_tasks
from tinsmith.recipes.tasks.rl_problems import load_problems
from tinsmith.v1 import job_pb2

HERE = "127.0.0.1:7077"
ELSEWHERE = "https://tinsmith.example.org"


def make_spec(data: str, kind: str = "supervised") -> job_pb2.TrainingJobSpec:
    return parse_spec(
        {"method": {"type": kind, "parameters": {"data": data}}, "data": {"name": data}}
    )


def data_of(spec: job_pb2.TrainingJobSpec) -> tuple[object, str]:
    return spec.method.parameters["data"], spec.data.name


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "chat.jsonl"
    path.write_text("{}\n")
    return path


@pytest.mark.parametrize("local", ["", HERE])
def test_a_relative_path_is_where_the_author_stands(file: Path, local: str) -> None:
    spec = make_spec("chat.jsonl")
    find_data(spec, HERE, local)
    assert data_of(spec) == (str(file), str(file))


@pytest.mark.parametrize(
    ("data", "kind", "address"),
    [
        *(
            pytest.param(word, method, HERE, id=f"{method}-{word}")
            for method, words in BUILT_IN_DATA.items()
            for word in words
        ),
        pytest.param("hf://openai/gsm8k:main", "rl", HERE, id="hub"),
        pytest.param("s3://bucket/train.jsonl", "rl", HERE, id="store"),
        pytest.param("train.jsonl", "supervised", ELSEWHERE, id="cluster"),
        pytest.param("/data/train.jsonl", "supervised", "localhost:8080", id="tunnel"),
        pytest.param("train.jsonl", "custom", HERE, id="own-loop"),
    ],
)
def test_what_is_no_path_of_this_machine_is_passed_on(data: str, kind: str, address: str) -> None:
    spec = make_spec(data, kind)
    find_data(spec, address, HERE)
    assert data_of(spec) == (data, data)


@pytest.mark.parametrize("data", ["no.jsonl", "/nowhere/no.jsonl"])
def test_a_file_that_is_not_there_is_refused(data: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"parameters\.data: {data} is not there"):
        find_data(make_spec(data), HERE, HERE)


def test_a_game_of_ones_own_is_a_file_and_a_class(file: Path) -> None:
    file.with_name("nim.py").write_text("class Nim: ...")
    spec = make_spec("nim.py:Nim", "match")
    find_data(spec, HERE, HERE)
    place = f"{file.with_name('nim.py')}:Nim"
    assert data_of(spec) == (place, place)
    with pytest.raises(ConfigurationError, match=r"no\.py is not there; .*with match: gomoku"):
        find_data(make_spec("no.py:Nim", "match"), HERE, HERE)


def test_data_of_another_recipe_is_no_data_of_this_one() -> None:
    with pytest.raises(ConfigurationError, match="comes with supervised: pig_latin, warm_start"):
        find_data(make_spec("arithmetic", "supervised"), HERE, HERE)


def test_recipes_have_what_they_are_said_to_bring() -> None:
    for method, words in BUILT_IN_DATA.items():
        default = importlib.import_module(f"tinsmith.recipes.{method}").Config().data
        assert default in words, method
    for word in ("arithmetic", "small_sums"):
        assert word in BUILT_IN_DATA["rl"]
        assert load_problems(word).train
    assert BUILT_IN_DATA["evaluate"] == rl_problems.SHIPPED
    assert load_tasks(*BUILT_IN_DATA["rl_episodes"]).train
    assert BUILT_IN_DATA["supervised"] == supervised_tasks.SHIPPED
    for name in BUILT_IN_DATA["match"]:
        assert load_game(name, board_size=3, row_length=3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            {"method": {"maxStep": 1}}, r"spec\.method\.maxStep: .* maxSteps\?", id="deep"
        ),
        pytest.param({"modle": {}}, r"spec\.modle: did you mean model\?", id="top"),
        pytest.param(
            {"roles": {"trainer": {"resources": {"request": {}}}}},
            r"spec\.roles\.trainer\.resources\.request: did you mean requests\?",
            id="role",
        ),
        pytest.param(
            {"scheduling": {"tolerations": [{}, {"operatr": "x"}]}},
            r"spec\.scheduling\.tolerations\[1\]\.operatr: did you mean operator\?",
            id="list",
        ),
        pytest.param({"method": {"qqq": 1}}, r"spec\.method\.qqq: known are type", id="nothing"),
    ],
)
def test_a_field_that_there_is_not_is_named_with_what_is_meant(
    spec: dict[str, object], message: str
) -> None:
    with pytest.raises(JobFormatError, match=message):
        parse_spec(spec)
    assert parse_spec(spec, lenient=True) is not None
