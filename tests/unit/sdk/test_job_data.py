"""Paths of a job's data, as its author writes them and as its driver opens them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.errors import ConfigurationError
from tinsmith.jobs.data import BUILT_IN, find_data
from tinsmith.jobs.json_form import JobFormatError, parse_spec
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
        *(pytest.param(word, "supervised", HERE, id=word) for word in sorted(BUILT_IN)),
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


def test_what_recipes_bring_along_is_no_path() -> None:
    assert "arithmetic" in BUILT_IN
    assert load_problems("arithmetic").train
    assert load_tasks("arithmetic").train


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
