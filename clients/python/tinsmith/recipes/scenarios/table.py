"""The table of scenarios, and how one becomes a recipe with its settings.

The settings suit models of two layers that know nothing: `tinsmith up --model tiny-2x64` makes one
on the spot. A real model needs a lower learning rate, longer answers and no warm start; each
setting of the recipe can be given.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tinsmith.config_values import load_config
from tinsmith.errors import ConfigurationError

TEXT_MODEL = "tiny-2x64"
VISION_MODEL = "tiny-vl"
"""Base models of scenarios of text and of pictures, as `tinsmith up --model` makes them."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario.

    Attributes:
        description: What is learned, in one line.
        recipe: Name of the recipe that it runs.
        settings: Where they differ from the recipe's defaults.
    """

    description: str
    recipe: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> ModuleType:
        """The recipe."""
        return importlib.import_module(f"tinsmith.recipes.{self.recipe}")


_MATH: Mapping[str, Any] = {
    "base_model": TEXT_MODEL,
    "data": "small_sums",
    "num_imitation_steps": 100,
    "num_demonstrations": 48,
    "num_steps": 150,
    "num_problems": 24,
    "format_coef": 0.1,
    "num_validation": 100,
    "eval_every": 10,
}
_GEOMETRY: Mapping[str, Any] = {
    "base_model": VISION_MODEL,
    "data": "geometry",
    "adapter": "lora",
    "train_unembed": True,
    "imitation_learning_rate": 1e-2,
    "learning_rate": 3e-3,
    "num_imitation_steps": 120,
    "num_demonstrations": 32,
    "num_steps": 160,
    "num_problems": 16,
    "format_coef": 0.1,
    "num_validation": 100,
    "eval_every": 20,
}
_GOMOKU: Mapping[str, Any] = {
    "base_model": TEXT_MODEL,
    "adapter": "full",
    "imitation_learning_rate": 5e-3,
    "learning_rate": 3e-3,
    "num_imitation_steps": 80,
    "num_steps": 180,
    "data": "gomoku",
    "board_size": 3,
    "row_length": 3,
    "teacher": "random",
    "validation_opponent": "random",
    "num_validation": 100,
    "eval_every": 10,
}

SCENARIOS: Mapping[str, Scenario] = {
    "math": Scenario(
        "one turn, all weights: sums, after a pupil that mostly copies the units",
        "rl",
        {**_MATH, "adapter": "full", "imitation_learning_rate": 5e-3, "learning_rate": 2e-3},
    ),
    "math_lora": Scenario(
        "the same with an adapter of rank 32",
        "rl",
        {
            **_MATH,
            "adapter": "lora",
            "train_unembed": True,
            "imitation_learning_rate": 1e-2,
            "learning_rate": 4e-3,
        },
    ),
    "geometry": Scenario(
        "one turn with a picture, an adapter: figures, after a pupil that mostly does not halve",
        "rl",
        _GEOMETRY,
    ),
    "gomoku": Scenario(
        "several turns, all weights: gomoku against a script; board_size=9 row_length=5 is all",
        "self_play",
        {**_GOMOKU, "opponent": "random"},
    ),
    "geometry_tool": Scenario(
        "several turns with a picture and a calculator, an adapter",
        "rl",
        {**_GEOMETRY, "calculator": True, "max_tokens": 32},
    ),
    "gomoku_two": Scenario(
        "two adapters with an optimizer each play gomoku against each other in a match",
        "match",
        {
            **_GOMOKU,
            "adapter": "lora",
            "train_unembed": True,
            # Two layers do not learn from coordinates which cells are free.
            "numbered_cells": True,
            # Behind a shorter warm start a policy learns from practice which cells are free alone,
            # and by one order of cells: no chance is left then that a better move is drawn.
            "num_imitation_steps": 240,
            # Two beginners teach each other little.
            "num_practice_steps": 60,
            "learning_rate": 8e-4,
            "num_steps": 360,
            "eval_every": 20,
        },
    ),
}


def configure(words: Sequence[str], path: Path | None = None) -> tuple[ModuleType, Any]:
    """Return the recipe of a scenario and its settings.

    Args:
        words: `name=...`, and settings of its recipe that win over the scenario's.
        path: A TOML file of settings, between the two.

    Raises:
        ConfigurationError: If there is no such scenario, or its recipe refuses a setting.
    """
    named = [word for word in words if word.partition("=")[0].strip() == "name"]
    if not named:
        raise ConfigurationError(
            "no scenario is named", remedy=f"add name= one of {', '.join(SCENARIOS)}"
        )
    name = named[-1].partition("=")[2]
    scenario = SCENARIOS.get(name)
    if scenario is None:
        raise ConfigurationError(
            f"there is no scenario {name!r}", remedy=f"use one of {', '.join(SCENARIOS)}"
        )
    module = scenario.module
    others = [word for word in words if word not in named]
    return module, load_config(module.Config, path, others, defaults=scenario.settings)
