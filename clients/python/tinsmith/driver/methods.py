"""What a job is to do, as one of the recipes with its settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tinsmith.config_values import build
from tinsmith.driver.agents import JobAgent
from tinsmith.errors import ConfigurationError
from tinsmith.recipes import (
    distillation,
    dpo,
    evaluate,
    match,
    rl,
    rl_episodes,
    self_play,
    supervised,
)
from tinsmith.recipes.scenarios.table import SCENARIOS

_RECIPES: dict[str, ModuleType] = {
    "supervised": supervised,
    "rl": rl,
    "rl_episodes": rl_episodes,
    "self_play": self_play,
    "match": match,
    "dpo": dpo,
    "distillation": distillation,
    "evaluate": evaluate,
}

_SET_ELSEWHERE = {
    "base_model": "spec.model",
    "adapter": "spec.adapter.type",
    "rank": "spec.adapter.rank",
    "num_steps": "spec.method.maxSteps",
    "save_every": "spec.checkpoint.everySteps",
    "checkpoint": "spec.checkpoint.finalName",
    "begin_from": "spec.checkpoint.resumeFrom",
    "output_dir": "nothing: the driver chooses it",
    "overwrite": "nothing: a job has a folder of its own",
    "agents": "spec.roles.agents",
}
_DEFAULT_KEEP_LAST = 3
_AGENTS = "agents"
_SCENARIO = "scenario"
_WEIGHTS = ("base_model", "checkpoint", "run")
"""Settings of an evaluation that name what plays; in what trains, two of them mean other things."""
MAX_EVALUATED = 16
"""Models, checkpoints and runs that an evaluation plays: their scores fit the status of a job."""


@dataclass(frozen=True, slots=True)
class Method:
    """A recipe and its settings.

    Attributes:
        recipe: The module.
        config: Its `Config`.
        base_model: What its trainers and samplers have loaded.
        keep_last: Saves on the way that are kept.
        resume_from: Resource name of the checkpoint to begin from; empty for initial weights.
    """

    recipe: ModuleType
    config: Any
    base_model: str
    keep_last: int
    resume_from: str

    @property
    def takes_agents(self) -> bool:
        """Whether the recipe trains the agents of a job: its `main` has the argument `agents`."""
        return _AGENTS in inspect.signature(self.recipe.main).parameters


def read_method(text: str, output_dir: Path, agents: Sequence[JobAgent] = ()) -> Method:
    """Return what `TINSMITH_JOB_METHOD` describes.

    Args:
        text: JSON with `type`, `maxSteps`, `parameters`, `adapter`, `model`, `checkpoint`, `data`.
        output_dir: Where the recipe writes.
        agents: Of the job, for a recipe with several policies; the first one's model is the
            recipe's own.

    Raises:
        ConfigurationError: If it is not complete, or a parameter is unknown or wrong.
    """
    try:
        method = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"TINSMITH_JOB_METHOD is not JSON: {error}") from error
    kind = method.get("type", "")
    if kind not in _RECIPES:
        raise ConfigurationError(
            f"there is no recipe for spec.method.type {kind!r}",
            remedy=f"use one of {', '.join(_RECIPES)}",
        )
    recipe = _RECIPES[kind]
    parameters = dict(method.get("parameters") or {})
    scenario = _read_scenario(kind, parameters.pop(_SCENARIO)) if _SCENARIO in parameters else {}
    own = _WEIGHTS if recipe is evaluate else ()
    for name in parameters:
        if name in _SET_ELSEWHERE and name not in own:
            raise ConfigurationError(
                f"spec.method.parameters.{name} is set by {_SET_ELSEWHERE[name]}",
                remedy="leave it out",
            )
    checkpoint, adapter = method.get("checkpoint") or {}, method.get("adapter") or {}
    described = {
        "base_model": method.get("model"),
        "adapter": adapter.get("type"),
        "rank": adapter.get("rank"),
        "num_steps": method.get("maxSteps"),
        "save_every": checkpoint.get("everySteps"),
        "checkpoint": checkpoint.get("finalName"),
        "data": method.get("data"),
    }
    if recipe is evaluate:
        described = _describe_evaluation(method, parameters)
    settings: dict[str, Any] = {
        **scenario,
        **_whole_numbers(parameters),
        # What is left out has the recipe's own default.
        **_whole_numbers({name: value for name, value in described.items() if value}),
        "output_dir": output_dir,
    }
    if agents and _AGENTS in inspect.signature(recipe.main).parameters:
        first = agents[0]
        settings |= {
            _AGENTS: ",".join(agent.name for agent in agents),
            "base_model": first.base_model,
            "adapter": first.adapter,
            "rank": first.rank,
        }
    if scenario and settings["adapter"] != scenario["adapter"]:
        raise ConfigurationError(
            f"spec.adapter.type is {settings['adapter']!r}, and the scenario has "
            f"{scenario['adapter']!r}",
            remedy=f"set spec.adapter.type to {scenario['adapter']}",
        )
    base_model = method.get("model") if recipe is evaluate else settings.get("base_model")
    if not base_model:
        raise ConfigurationError("TINSMITH_JOB_METHOD names no model", remedy="set spec.model.name")
    return Method(
        recipe,
        build(recipe.Config, settings, "spec.method.parameters."),
        base_model=base_model,
        keep_last=int(checkpoint.get("keepLast") or _DEFAULT_KEEP_LAST),
        resume_from=checkpoint.get("resumeFrom") or "",
    )


def _read_scenario(kind: str, name: object) -> Mapping[str, Any]:
    """Return the settings of a scenario, which those of the job win over.

    Raises:
        ConfigurationError: If there is none of the name, or it is one of another method.
    """
    scenario = SCENARIOS.get(name) if isinstance(name, str) else None
    if scenario is None or scenario.recipe != kind:
        known = ", ".join(f"{each} ({found.recipe})" for each, found in SCENARIOS.items())
        raise ConfigurationError(
            f"spec.method.parameters.{_SCENARIO} is {name!r}, which is no scenario of method "
            f"{kind}",
            remedy=f"use one of {known}, with its method",
        )
    return scenario.settings


def _describe_evaluation(
    method: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of an evaluation, which trains nothing and saves nothing.

    Raises:
        ConfigurationError: If the job says what only a training has.
    """
    for field, is_set in (
        ("spec.method.maxSteps", method.get("maxSteps")),
        ("spec.checkpoint.resumeFrom", (method.get("checkpoint") or {}).get("resumeFrom")),
    ):
        if is_set:
            raise ConfigurationError(
                f"{field} is set, and method evaluate trains nothing",
                remedy="leave it out, and name what plays in spec.method.parameters: "
                f"{', '.join(_WEIGHTS)}",
            )
    named = [word for name in _WEIGHTS for word in str(parameters.get(name, "")).split(",") if word]
    if len(named) > MAX_EVALUATED:
        raise ConfigurationError(
            f"spec.method.parameters names {len(named)} to evaluate, and a job takes "
            f"{MAX_EVALUATED}",
            remedy="make several jobs",
        )
    return {
        "base_model": "" if named else method.get("model"),
        "data": method.get("data"),
        # Results of a part of the job that was cut off: all is played again, by the same seeds.
        "overwrite": True,
    }


def _whole_numbers(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which 8.0 is 8 again: JSON and protobuf know one kind of number."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in parameters.items()
    }
