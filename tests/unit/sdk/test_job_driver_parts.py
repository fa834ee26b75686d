"""The parts of a job's driver that need no server."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinsmith.client import Client
from tinsmith.driver.agents import JobAgent
from tinsmith.driver.context import Job
from tinsmith.driver.main import DriverObserver
from tinsmith.driver.methods import read_method
from tinsmith.driver.state import MAX_BYTES, DriverState
from tinsmith.errors import ConfigurationError
from tinsmith.jobs.json_form import (
    JobFormatError,
    parse_manifest,
    parse_spec,
    parse_status,
    to_json,
)
from tinsmith.recipes import distillation, dpo, rl, rl_episodes, self_play, supervised
from tinsmith.recipes.scenarios.table import SCENARIOS

METHOD: dict[str, Any] = {"type": "supervised", "model": "m", "maxSteps": 7}


@pytest.mark.parametrize(
    ("kind", "recipe", "parameters", "loss"),
    [
        ("supervised", supervised, {}, None),
        ("rl", rl, {}, "importance_sampling"),
        ("rl", rl, {"loss": "ppo"}, "ppo"),
        ("rl_episodes", rl_episodes, {}, "importance_sampling"),
        ("self_play", self_play, {"opponent": "league"}, "importance_sampling"),
        ("dpo", dpo, {"beta": 0.2}, None),
        ("distillation", distillation, {"teacher": "t"}, "importance_sampling"),
    ],
)
def test_a_method_is_a_recipe_with_its_settings(
    kind: str, recipe: object, parameters: dict[str, Any], loss: str | None, tmp_path: Path
) -> None:
    method = read_method(
        json.dumps(
            {
                **METHOD,
                "type": kind,
                "parameters": {"learning_rate": 1, "seed": 3.0, **parameters},
                "adapter": {"type": "full"},
                "checkpoint": {"everySteps": 4, "keepLast": 2, "finalName": "end"},
                "data": "d",
            }
        ),
        tmp_path,
    )
    assert method.recipe is recipe
    config = method.config
    assert (config.base_model, config.num_steps, config.save_every) == ("m", 7, 4)
    assert (config.adapter, config.checkpoint, config.data) == ("full", "end", "d")
    assert (config.learning_rate, config.seed, config.output_dir) == (1.0, 3, tmp_path)
    assert (method.keep_last, method.resume_from) == (2, "")
    assert getattr(config, "loss", None) == loss


def test_a_recipe_of_several_policies_takes_the_agents_of_the_job(tmp_path: Path) -> None:
    agents = [
        JobAgent(name, f"model-{name}", "lora", 8 * (index + 1), "a:1", 1, 1, 0, "key")
        for index, name in enumerate(("black", "white"))
    ]
    method = read_method(json.dumps({**METHOD, "type": "match"}), tmp_path, agents)
    assert method.takes_agents
    assert (method.config.agents, method.config.base_model) == ("black,white", "model-black")
    assert method.config.rank == 8
    single = read_method(json.dumps({**METHOD, "type": "rl"}), tmp_path, agents)
    assert (single.takes_agents, single.config.base_model) == (False, "m")


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({}, ("m", "", "")),
        ({"checkpoint": "r/a,r/b"}, ("", "r/a,r/b", "")),
        ({"base_model": "m,n", "run": "r"}, ("m,n", "", "r")),
    ],
)
def test_an_evaluation_plays_what_it_names_or_else_the_model_of_the_job(
    parameters: dict[str, Any], named: tuple[str, str, str], tmp_path: Path
) -> None:
    saving = {"everySteps": 50, "keepLast": 3, "finalName": "final"}
    described = {"type": "evaluate", "model": "m", "adapter": {"rank": 8}, "checkpoint": saving}

    method = read_method(json.dumps({**described, "parameters": parameters}), tmp_path)

    config = method.config
    assert (config.base_model, config.checkpoint, config.run) == named
    assert (method.base_model, config.output_dir, config.overwrite) == ("m", tmp_path, True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_its_settings_below_those_of_the_job(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    whole = {**scenario.settings, "base_model": "m", "num_validation": 7}
    described = {"type": scenario.recipe, "model": "m", "checkpoint": {"everySteps": 50}}
    described["adapter"] = {"type": whole["adapter"], "rank": 32}
    described["parameters"] = {"scenario": name, "num_validation": 7}

    config = read_method(json.dumps(described), tmp_path).config

    assert {setting: getattr(config, setting) for setting in whole} == whole
    shorter = read_method(json.dumps({**described, "maxSteps": 300}), tmp_path)
    assert shorter.config.num_steps == 300


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({**METHOD, "type": "dance"}, "spec.method.type 'dance'"),
        ({**METHOD, "parameters": {"seeds": 1}}, "parameters.seeds; did you mean seed"),
        ({**METHOD, "parameters": {"seed": "x"}}, "parameters.seed is 'x'"),
        ({**METHOD, "parameters": {"rank": 8}}, "is set by spec.adapter.rank"),
        ({**METHOD, "model": ""}, "names no model"),
        ({**METHOD, "type": "match", "parameters": {"agents": "a,b"}}, "set by spec.roles.agents"),
        (
            {**METHOD, "type": "dpo", "parameters": {"begin_from": "c"}},
            "parameters.begin_from is set by spec.checkpoint.resumeFrom",
        ),
        (
            {**METHOD, "type": "rl", "parameters": {"scenario": "chess"}},
            "scenario is 'chess', which is no scenario of method rl; use one of math (rl), ",
        ),
        (
            {**METHOD, "type": "rl", "parameters": {"scenario": "gomoku"}},
            "parameters.scenario is 'gomoku', which is no scenario of method rl",
        ),
        ({**METHOD, "type": "rl", "parameters": {"scenario": []}}, "parameters.scenario is []"),
        (
            {
                **METHOD,
                "type": "rl",
                "parameters": {"scenario": "math"},
                "adapter": {"type": "lora"},
            },
            "spec.adapter.type is 'lora', and the scenario has 'full'; set spec.adapter.type",
        ),
        (
            {**METHOD, "type": "evaluate"},
            "spec.method.maxSteps is set, and method evaluate trains nothing",
        ),
        (
            {"type": "evaluate", "model": "m", "checkpoint": {"resumeFrom": "r/c"}},
            "spec.checkpoint.resumeFrom is set, and method evaluate trains nothing",
        ),
        (
            {"type": "evaluate", "model": "m", "parameters": {"run": ",".join(["r"] * 17)}},
            "names 17 to evaluate, and a job takes 16",
        ),
        (
            {"type": "evaluate", "model": "m", "parameters": {"overwrite": False}},
            "parameters.overwrite is set by nothing",
        ),
    ],
)
def test_a_method_that_is_wrong_is_one_clear_sentence(
    method: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as failure:
        read_method(json.dumps(method), tmp_path)
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_the_state_of_a_driver_fits_a_report(tmp_path: Path) -> None:
    directory, restored = tmp_path / "a", tmp_path / "b"
    directory.mkdir()
    (directory / "state.json").write_text('{"step": 3}')
    lines = [json.dumps({"step": step, "loss": step * 0.1234567891}) for step in range(40_000)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    encoded = DriverState.collect(directory, ["c1", "c2"]).encode()
    assert len(encoded) <= MAX_BYTES
    state = DriverState.decode(encoded)
    state.restore(restored)
    assert (list(state.saves), (restored / "state.json").read_text()) == (
        ["c1", "c2"],
        '{"step": 3}',
    )
    # Old lines go, whole ones and from the front.
    kept = (restored / "metrics.jsonl").read_text().splitlines()
    assert 0 < len(kept) < len(lines)
    assert kept == lines[-len(kept) :]
    assert DriverState.decode(b"") == DriverState()


def test_jobs_have_the_json_of_the_resource() -> None:
    spec = {
        "model": {"name": "m", "source": "hf://a/b"},
        "method": {"type": "rl", "maxSteps": 3, "parameters": {"a": 8, "b": 0.5, "c": [1]}},
        "roles": {"trainer": {"replicas": 0, "resources": {"requests": {"memory": "4Gi"}}}},
        "scheduling": {"minGPUMemoryGiB": 40, "tolerations": [{"operator": "Exists"}]},
        "suspend": True,
    }
    assert to_json(parse_spec(spec)) == spec
    whole = parse_spec({"roles": {"driver": {"resources": {"limits": {"cpu": 2}}}}})
    assert whole.roles.driver.resources.limits == {"cpu": "2"}
    status = {
        "phase": "Running",
        "assignedGPUs": 8,
        "epoch": 2,
        "startTime": "2026-11-22T08:00:00Z",
        "progress": {"step": 5, "metrics": [{"name": "reward", "value": "0.5"}]},
    }
    assert to_json(parse_status({**status, "later": {}})) == status
    with pytest.raises(JobFormatError) as failure:
        parse_spec({"methods": {}})
    assert str(failure.value) == "spec.methods: did you mean method?"
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "manifest",
    [
        [],
        {"kind": "Job"},
        {"kind": "TrainingJob", "apiVersion": "v1"},
        {"kind": "TrainingJob", "apiVersion": "tinsmith.dev/v1alpha1", "metadata": {}},
        {"kind": "TrainingJob", "apiVersion": "tinsmith.dev/v1alpha1", "metadata": {"name": "a"}},
    ],
)
def test_what_is_no_manifest(manifest: object) -> None:
    with pytest.raises(JobFormatError):
        parse_manifest(manifest)


def test_a_model_that_plays_for_long_is_reported_now_and_then(tmp_path: Path) -> None:
    """Its scores come one by one, and the stall rule wants a report."""
    told: list[dict[str, int]] = []
    now_s = [100.0]
    job = SimpleNamespace(report=lambda **fields: told.append(fields))
    method = read_method(
        json.dumps({"type": "evaluate", "model": "m", "parameters": {"base_model": "m,n"}}),
        tmp_path,
    )
    observer = DriverObserver(
        cast(Job, job),
        cast(Client, None),
        tmp_path,
        method,
        DriverState(),
        clock=lambda: now_s[0],
    )

    for _ in range(40):
        observer.playing(1, 2)
        now_s[0] += 0.5

    assert told == [{"step": 1, "max_steps": 2}] * 4
