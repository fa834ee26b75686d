"""The guessing game, of which some plays go wrong: they hang, crash or lie.

A fault is drawn for each instance, not for its seed, so that another play of the same task can end
well.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Mapping
from typing import ClassVar

from tinsmith.environments.environment import (
    Action,
    JsonValue,
    Observation,
    StepResult,
    read_float,
)
from tinsmith_environment.builtin.guessing import GuessingEnvironment

_HANG_S = 3600.0


class FaultyGuessing(GuessingEnvironment):
    """Guess a number, in a program that fails now and then."""

    description = "The guessing game, with faults."
    default_config: ClassVar[Mapping[str, JsonValue]] = {
        **GuessingEnvironment.default_config,
        "fault_share": 0.0,
    }

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        """Begin a game; draw whether it goes wrong, how and at which turn."""
        draws = random.Random(os.urandom(16))
        is_faulty = draws.random() < read_float(config, "fault_share", minimum=0.0, maximum=1.0)
        self._fault = draws.choice(("hang", "crash", "lie")) if is_faulty else ""
        self._faulty_turn = draws.randint(1, 3)
        return super().reset(seed, config)

    def step(self, action: Action) -> StepResult:
        """Compare a guess with the number, or go wrong."""
        result = super().step(action)
        if self._fault and self._num_turns == self._faulty_turn:
            if self._fault == "hang":
                time.sleep(_HANG_S)
            if self._fault == "crash":
                os._exit(1)
            return StepResult(result.observation, math.nan, result.done, result.info)
        return result
