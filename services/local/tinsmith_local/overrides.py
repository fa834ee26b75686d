"""The file of settings of `tinsmith up`: a table for each pod, checked before anything starts."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_gateway.config import GatewayConfig
from tinsmith_runtime.config import check_known, convert_settings
from tinsmith_runtime.errors import ConfigError
from tinsmith_sampler.config import SamplerConfig
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_trainer.config import TrainerConfig

_POD_CONFIGS: dict[str, Any] = {
    "scheduler": SchedulerConfig,
    "trainer": TrainerConfig,
    "sampler": SamplerConfig,
    "environment": EnvironmentConfig,
    "gateway": GatewayConfig,
    "coordinator": CoordinatorConfig,
}


_FIXED = {
    "data_dir": "--data-dir",
    "base_models": "--model",
    "listen_address": "--port",
    "metrics_address": "--metrics-address",
    "math_problems_path": "--math-problems-path",
    "storage_uri": "storage_uri of [trainer]",
    "scheduler_address": "",
    "pod_key": "",
    "bootstrap_key": "",
    # One process samples with the engine that it trains with.
    "engine": "",
    **{one.name: "" for one in fields(SamplerConfig) if one.name.startswith("vllm_")},
}
"""What the pods of one process are told by it, and the flag that says it; empty if none does."""
_FREE = frozenset(
    {("trainer", "storage_uri")}
    | {(pod, "metrics_address") for pod in _POD_CONFIGS if pod != "scheduler"}
)
"""Of those, what a table may say all the same."""


def read_overrides(path: Path) -> dict[str, dict[str, object]]:
    """Return the settings of pods from the tables of a TOML file.

    Raises:
        ConfigError: If it cannot be read, or names a pod or setting that does not exist.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"settings file {path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"settings file {path} is not TOML: {error}") from error
    converted: dict[str, dict[str, object]] = {}
    for pod, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path} has the setting {pod} outside of a table; write it below one of"
                f" [{'], ['.join(_POD_CONFIGS)}]"
            )
        check_known([pod], list(_POD_CONFIGS), place=str(path), kind="table")
        known = [setting.name for setting in fields(_POD_CONFIGS[pod])]
        check_known(table, known, place=f"[{pod}] of {path}")
        for setting, flag in _FIXED.items():
            is_fixed = setting in table and (pod, setting) not in _FREE
            if is_fixed:
                instead = f"use {flag}" if flag else "leave it out"
                raise ConfigError(
                    f"[{pod}] of {path}: {setting} is given by `tinsmith up` itself; {instead}"
                )
        try:
            converted[pod] = convert_settings(_POD_CONFIGS[pod], table)
        except ConfigError as error:
            raise ConfigError(f"[{pod}] of {path}: {error}") from error
    return converted
