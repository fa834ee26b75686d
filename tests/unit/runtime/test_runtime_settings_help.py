"""`--help` of a pod names every setting, what it is unless it is set, and what it means."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tinsmith_controller.config import ControllerConfig
from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_environment.config import EnvironmentConfig
from tinsmith_gateway.config import GatewayConfig
from tinsmith_runtime.pod.settings_help import describe_settings
from tinsmith_sampler.config import SamplerConfig
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of no pod."""

    data_dir: Path
    """Folder of everything."""
    num_threads: int = 4
    key: str = field(default="", repr=False)
    """A secret,
    100% kept."""


def test_a_setting_has_its_variable_default_and_meaning() -> None:
    assert describe_settings(Settings).splitlines()[1:] == [
        "  TINSMITH_DATA_DIR  (required)",
        "      Folder of everything.",
        "  TINSMITH_NUM_THREADS  [4]",
        "  TINSMITH_KEY",
        "      A secret, 100% kept.",
    ]


@pytest.mark.parametrize(
    "config_class",
    [
        ControllerConfig,
        CoordinatorConfig,
        EnvironmentConfig,
        GatewayConfig,
        SamplerConfig,
        SchedulerConfig,
        TrainerConfig,
    ],
)
def test_no_setting_of_a_pod_is_left_out(config_class: Any) -> None:
    text = describe_settings(config_class)
    for each in dataclasses.fields(config_class):
        assert f"  TINSMITH_{each.name.upper()}" in text
    assert len(text.splitlines()) > 1.5 * len(dataclasses.fields(config_class))
