"""The settings of pods in the schema of the chart's values, from their config classes.

A pod refuses an unknown setting when it starts. With this the chart refuses it before, by its name.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

from tinsmith_controller.config import ControllerConfig
from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_gateway.config import GatewayConfig
from tinsmith_runtime.pod.settings_help import settings_of
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_trainer.config import TrainerConfig

_PODS: dict[str, type[Any]] = {
    "scheduler": SchedulerConfig,
    "gateway": GatewayConfig,
    "coordinator": CoordinatorConfig,
    "environment": EnvironmentConfig,
    "controller": ControllerConfig,
    # A trainer without a model.
    "checkpoints": TrainerConfig,
}
_TYPES: dict[object, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
}


def with_settings(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the values with the settings that each pod has."""
    found = copy.deepcopy(schema)
    for pod, config_class in _PODS.items():
        found["definitions"][f"{pod}Settings"] = _describe(config_class)
        found["properties"][pod]["properties"]["settings"] = {
            "$ref": f"#/definitions/{pod}Settings"
        }
    return found


def _describe(config_class: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    meanings = {each.variable: each.meaning for each in settings_of(config_class, prefix="")}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            field.name: {
                "type": _type_of(hints[field.name]),
                "description": meanings[field.name.upper()],
            }
            for field in sorted(dataclasses.fields(config_class), key=lambda field: field.name)
        },
    }


def _type_of(hint: object) -> str:
    if isinstance(hint, types.UnionType):
        [hint] = [each for each in typing.get_args(hint) if each is not types.NoneType]
    return _TYPES[hint]
