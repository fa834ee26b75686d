"""An environment of a user's own, in a folder that only its server is told of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from tinsmith.environments.environment import (
    Action,
    Environment,
    JsonValue,
    Observation,
    StepResult,
)


class MazeRunEnvironment(Environment):
    """Walks a corridor: `right` until its end."""

    default_config: ClassVar[Mapping[str, JsonValue]] = {"length": 2}

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        self._left = int(str(config["length"]))
        return Observation.of_user(f"{self._left} steps, seed {seed}")

    def step(self, action: Action) -> StepResult:
        self._left -= action.text == "right"
        shown = Observation.of_user(f"{self._left} steps") if self._left else Observation()
        return StepResult(shown, float(not self._left), not self._left)
