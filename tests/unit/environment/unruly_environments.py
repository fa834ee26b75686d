"""Environments that misbehave; the action says how. Imported by worker processes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tinsmith_environment import Action, Environment, JsonValue, Message, Observation, StepResult


class UnrulyEnvironment(Environment):
    """Does what the action says."""

    default_config: ClassVar[Mapping[str, JsonValue]] = {"fail_reset": False, "hangs_at": ""}
    action_kinds = frozenset({"text", "tokens"})

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        if config["fail_reset"]:
            raise RuntimeError("no level")
        self._num_steps = 0
        self._hangs_at = str(config.get("hangs_at", ""))
        return Observation.of_user(f"seed {seed}")

    def step(self, action: Action) -> StepResult:
        self._num_steps += 1
        result: Any = StepResult(
            Observation.of_user(f"step {self._num_steps}: {action.text or action.tokens}"),
            np.float32(0.5),  # type: ignore[arg-type]
            False,
            {"pid": os.getpid(), "secrets": self._secrets(), "array": np.arange(2)},  # type: ignore[dict-item]
        )
        match action.text:
            case "raise":
                raise RuntimeError("boom")
            case "exit":
                sys.exit(3)
            case "die":
                os._exit(7)
            case "hang":
                if self._hangs_at:
                    Path(self._hangs_at).touch()
                time.sleep(600)
            case "print":
                print("garbage", flush=True)  # noqa: T201
                sys.stdout.write(input() if sys.stdin.readable() and sys.stdin.read(1) else "")
            case "nan":
                result = StepResult(Observation(), float("nan"), False)
            case "infinite":
                result = StepResult(Observation(), float("inf"), False)
            case "text":
                result = StepResult(Observation(), "1", False)  # type: ignore[arg-type]
            case "lie":
                result = StepResult(Observation(), 1.0, "no")  # type: ignore[arg-type]
            case "wrong":
                result = "not a result"
            case "unserialisable":
                result = StepResult(Observation(), 0.0, False, {"object": object()})  # type: ignore[dict-item]
            case "large":
                result = StepResult(Observation.of_user("x" * 3_000_000), 0.0, False)
            case "stops":
                shown = Observation((Message("user", "on"),), stop=(7, "\n"))
                result = StepResult(shown, 0.0, False)
            case "empty stop":
                result = StepResult(Observation(stop=("",)), 0.0, False)
            case "done":
                result = StepResult(Observation(), 1.0, True)
        return result  # type: ignore[no-any-return]

    def _secrets(self) -> list[JsonValue]:
        return [name for name in os.environ if name.startswith("TINSMITH_")]


class TokenSums(Environment):
    """Shows tokens alone, and rewards a turn by the sum of its own."""

    action_kinds = frozenset({"tokens"})

    def reset(self, seed: int, config: Mapping[str, JsonValue]) -> Observation:
        return Observation(tokens=(seed, seed + 1))

    def step(self, action: Action) -> StepResult:
        total = sum(action.tokens or ())
        return StepResult(Observation(tokens=(total,)), float(total), False)


class NotAnEnvironment:
    pass
