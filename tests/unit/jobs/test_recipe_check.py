"""Settings of recipes, as authors of jobs write them: each is taken or refused in one sentence."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from tinsmith.jobs.methods import RECIPE_METHODS
from tinsmith_jobs.recipe_check import check_recipe
from tinsmith_jobs.spec import Data, JobSpec, Method, Model, Role, Template
from tinsmith_jobs.spec_codec import decode_job
from tinsmith_jobs.spec_reader import SpecError

HOSTILE: list[Any] = [
    None,
    True,
    -1,
    10**400,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "1e999",
    "9" * 5000,
    "~nobody-here/x",
    "\0",
    "\ud800",
    [],
    [[[]]],
    {},
    {"a": {"b": None}},
]


def job_of(kind: str, **parameters: object) -> JobSpec:
    return JobSpec(method=Method(kind), model=Model(name="tiny", source=""), parameters=parameters)


@pytest.mark.parametrize("kind", sorted(RECIPE_METHODS))
def test_any_value_of_any_setting_is_taken_or_refused(kind: str) -> None:
    recipe = importlib.import_module(f"tinsmith.recipes.{kind}")
    refusals: list[SpecError] = []
    for name in ["", "__class__", *(field.name for field in dataclasses.fields(recipe.Config))]:
        for value in HOSTILE:
            try:
                check_recipe(job_of(kind, **{name: value}))
            except SpecError as error:
                refusals.append(error)
    assert len(refusals) > len(HOSTILE)
    assert {refusal.field for refusal in refusals} == {"spec.method"}
    assert not [refusal for refusal in refusals if "\n" in str(refusal)]


@pytest.mark.parametrize("data", ["pig_latin", "train.jsonl", "nim.py:Nim"])
def test_data_that_no_pod_of_the_driver_has_is_refused_before_gpus_are_held(data: str) -> None:
    known = "or one of arithmetic, small_sums, geometry"
    with pytest.raises(SpecError, match=rf"parameters\.data is '{data}'.*{known}"):
        check_recipe(job_of("rl", data=data))
    named = dataclasses.replace(job_of("rl"), data=Data(name=data))
    with pytest.raises(SpecError, match=rf"spec\.data\.name is '{data}'.*{known}"):
        check_recipe(named)
    # A server on this machine has its files, and a driver of the author's own has what it likes.
    check_recipe(named, is_local=True)
    own = Role(name="driver", kind="driver", replicas=1, template=Template(image="registry/own"))
    check_recipe(dataclasses.replace(named, roles=(own,)))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("hf://", "names no data set"),
        ("hf://a/b?part=x", "'part' is no key of an address"),
        ("hf://a/b?split=", "split has no value"),
        ("hf:///data/a?revision=main", "a folder has no revisions"),
        ("hf://./math", "the driver's pod has no such folder"),
    ],
)
def test_an_address_of_the_hub_is_read_before_gpus_are_held(data: str, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        check_recipe(job_of("rl", data=data))
    with pytest.raises(SpecError, match=problem) as caught:
        check_recipe(dataclasses.replace(job_of("rl"), data=Data(name=data)))
    assert caught.value.field == "spec.data.name"


def test_a_method_that_reads_no_hub_says_which_do() -> None:
    with pytest.raises(SpecError, match="the methods that do are rl, dpo, distillation, evaluate"):
        check_recipe(job_of("supervised", data="hf://openai/gsm8k"))


@pytest.mark.parametrize(
    "data",
    ["geometry", "/job-data/train.jsonl", "hf://openai/gsm8k:main?split=train", "hf:///data/gsm8k"],
)
def test_data_that_a_pod_may_have_is_passed_on(data: str) -> None:
    check_recipe(job_of("rl", data=data))


def test_agents_of_a_job_are_the_agents_of_its_recipe() -> None:
    roles = {"agents": [{"name": "first"}, {"name": "second"}], "trainer": {}, "sampler": {}}
    spec = {"method": {"type": "match"}, "model": {"name": "tiny", "source": "hf://a/b"}}

    check_recipe(decode_job("match", {**spec, "roles": roles}))

    parameters = {"type": "match", "parameters": {"agents": "first,second"}}
    with pytest.raises(SpecError, match=r"is set by spec\.roles\.agents; leave it out"):
        check_recipe(decode_job("match", {**spec, "roles": roles, "method": parameters}))


def test_what_needs_a_package_is_looked_at_on_one_machine_alone() -> None:
    job = job_of("supervised", log_to="no-such-tracker")

    check_recipe(job)

    with pytest.raises(SpecError, match="log_to is 'no-such-tracker'"):
        check_recipe(job, is_local=True)


def test_what_has_no_effect_ends_no_job_that_began_under_an_older_release() -> None:
    job = decode_job(
        "sft",
        {
            "model": {"name": "tiny", "source": "pvc://models/tiny"},
            "method": {"type": "supervised"},
            "roles": {"trainer": {"gpus": 1}, "coordinator": {}},
        },
    )
    with pytest.raises(SpecError, match="plays nothing"):
        check_recipe(job)
    check_recipe(job, has_begun=True)
